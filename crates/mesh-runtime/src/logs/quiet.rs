//! What a poll of the links says about the pipes of this host's processes, so that most results need no look at these.
//!
//! The pipes' own set is in the set of the links, watched for one event at a time. A process writes before it sends. So if a
//! poll of the links reports a link but not the pipes, nothing written before the first message there is left in the pipes.
//! Messages behind it may have come after the poll.
//!
//! LOG-9: a message is called quiet only if whatever processes of this host had written before it was sent has been read.

use crate::sync::{AtomicBool, AtomicU8, Ordering};

const NEVER_WATCHED: u8 = 0;
/// An event has come since.
const UNWATCHED: u8 = 1;
/// The thread that reads the pipes is about to have them watched.
const BEGINNING: u8 = 2;
const WATCHED: u8 = 3;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PipeWatch {
    state: AtomicU8,
    /// They were watched when the latest poll began.
    polled: AtomicBool,
}

impl PipeWatch {
    /// Has the pipes watched, unless they are; `watch` must report what is in them already, and learns whether it is called
    /// for the first time. On the thread that reads the pipes, after it has noted what it has read.
    pub(crate) fn begin(&self, watch: impl FnOnce(bool)) {
        let before = self.state.load(Ordering::SeqCst);
        if before == WATCHED {
            return;
        }
        self.state.store(BEGINNING, Ordering::SeqCst);
        watch(before == NEVER_WATCHED);
        // Unless something was written meanwhile.
        let _ = self.state.compare_exchange(BEGINNING, WATCHED, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// A poll of the links is about to begin. This and the next two are for whoever polls.
    pub(crate) fn poll(&self) {
        self.polled.store(self.state.load(Ordering::SeqCst) == WATCHED, Ordering::SeqCst);
    }

    /// The poll has reported the pipes, or more than it could. Before anything is read.
    pub(crate) fn written(&self) {
        // Before the first time there is nothing to undo, and it stays the first.
        let _ = self
            .state
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| (state != NEVER_WATCHED).then_some(UNWATCHED));
    }

    /// Whether the first message of a link that this poll has reported is quiet.
    pub(crate) fn is_quiet(&self) -> bool {
        self.polled.load(Ordering::SeqCst) && self.state.load(Ordering::SeqCst) == WATCHED
    }
}
