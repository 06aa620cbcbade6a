//! A message that its actor's executor has taken, until it is handled.

use crate::inbox::Inbox;
use crate::message::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The executor has the message and has not come to it yet.
const WAITS: u64 = u64::MAX;
/// It is handled, or does not count.
const OVER: u64 = 0;

/// Tells an inbox and its gauge how far one of its messages is. Dropping it does not end the handling: [`Self::end`] does.
#[derive(Debug)]
pub struct Handling {
    inbox: Arc<Inbox>,
    /// The gauge's number of the handling, [`WAITS`] or [`OVER`].
    begun: AtomicU64,
}

impl Handling {
    /// Of a message that was just taken from an inbox.
    #[must_use]
    pub fn new(inbox: &Arc<Inbox>, message: &Message) -> Self {
        let begun = if Inbox::counts(message) { WAITS } else { OVER };
        Self { inbox: Arc::clone(inbox), begun: AtomicU64::new(begun) }
    }

    /// An endpoint is about to run.
    pub fn begin(&self, message: &Message) {
        if self.begun.load(Ordering::Relaxed) == WAITS {
            let serial = self.inbox.gauge.begin(message.name_bytes(), message.header().src);
            self.begun.store(serial, Ordering::Relaxed);
            self.inbox.begun(message);
        }
    }

    /// The endpoint has run, or never will. To be called before its reply is sent: whoever gets that may look at the figures
    /// at once.
    pub fn end(&self, message: &Message, failed: bool) {
        match self.begun.swap(OVER, Ordering::Relaxed) {
            OVER => {}
            WAITS => self.inbox.begun(message),
            serial => self.inbox.gauge.end(serial, failed),
        }
    }
}
