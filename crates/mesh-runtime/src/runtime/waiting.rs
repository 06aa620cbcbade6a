//! How threads wait for calls and messages, and how a signal reaches the main thread meanwhile.

use super::{Runtime, lock};
use crate::calls::Call;
use crate::inbox::{Inbox, LoopWaker};
use crate::wait::Waiter;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// What was waited for is there.
    Ready,
    /// The deadline came first, or it would have had to block and was not to.
    NotYet,
    /// A signal wants the main thread's attention.
    Interrupted,
}

impl Runtime {
    /// Blocks until the inbox has a message or is closed.
    pub fn wait_inbox(&self, inbox: &Inbox) {
        if inbox.is_empty() && !inbox.is_closed() {
            inbox.expect();
            self.reactor
                .wait(self, &self.board, self.options.spin, None, false, &|| !inbox.is_empty() || inbox.is_closed());
        }
    }

    /// Waits for a call: to complete, or, for a stream, to have more than `seen` outcomes.
    ///
    /// With `look` it returns before it would block. Only the main thread is `interruptible`.
    pub fn wait_call(
        &self,
        call: &Call,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
    ) -> Waited {
        let ready = || call.is_done() || seen.is_some_and(|seen| call.arrived() > seen);
        if ready() {
            return Waited::Ready;
        }
        if self.forked.load(Ordering::SeqCst) {
            return Waited::NotYet;
        }
        call.expect();
        if interruptible {
            *lock(&self.main) = Some(Waiter::current());
        }
        self.reactor.wait(self, &self.board, self.options.spin, deadline, look, &|| {
            ready() || interruptible && self.signalled.load(Ordering::SeqCst)
        });
        if interruptible {
            *lock(&self.main) = None;
        }
        if ready() {
            Waited::Ready
        } else if interruptible && self.signalled.swap(false, Ordering::SeqCst) {
            Waited::Interrupted
        } else {
            Waited::NotYet
        }
    }

    /// Where a signal handler is to write, and where such bytes are to go on to (-1 for nowhere).
    pub fn signal_fd(&self, forward: RawFd) -> RawFd {
        self.forward.store(forward, Ordering::SeqCst);
        self.signal.1.as_raw_fd()
    }

    /// The descriptor of [`Runtime::signal_fd`], without touching anything.
    pub fn own_signal_fd(&self) -> RawFd {
        self.signal.1.as_raw_fd()
    }

    pub(super) fn on_signal(&self) {
        let mut bytes = [0_u8; 64];
        let n = rustix::io::read(&self.signal.0, &mut bytes).unwrap_or(0);
        let forward = self.forward.load(Ordering::SeqCst);
        if forward >= 0 && n > 0 {
            // SAFETY: the descriptor belongs to whoever set it as the process's signal descriptor; should it be closed
            // meanwhile the write fails, as it would have failed for the interpreter itself.
            let fd = unsafe { BorrowedFd::borrow_raw(forward) };
            let _ = rustix::io::write(fd, &bytes[..n]);
        }
        self.signalled.store(true, Ordering::SeqCst);
        if let Some(main) = lock(&self.main).clone() {
            main.notify(&self.reactor);
        }
    }

    /// Has `waker` told when the call progresses.
    pub fn tell_loop(&self, call: &Call, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        call.tell(waker, token, seen);
    }
}
