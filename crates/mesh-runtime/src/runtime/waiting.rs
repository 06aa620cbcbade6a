//! How threads wait for calls and messages, and how a signal reaches the main thread meanwhile.

use super::{Runtime, TOKEN_LOOP, lock};
use crate::calls::Call;
use crate::inbox::{Inbox, LoopWaker};
use crate::meter::Meter;
use crate::wait::Waiter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

    /// Waits until a message of `cost` bytes is let through by a meter, or the meter has ended. As with
    /// [`Runtime::wait_call`] only the main thread is `interruptible`.
    pub fn wait_meter(&self, meter: &Meter, cost: u64, deadline: Option<Instant>, interruptible: bool) -> Waited {
        if self.forked.load(Ordering::SeqCst) {
            return Waited::Ready;
        }
        if interruptible {
            *lock(&self.main) = Some(Waiter::current());
        }
        self.reactor.wait(self, &self.board, self.options.spin, deadline, false, &|| {
            // Again each time: whoever changes the meter forgets those that it has woken.
            meter.expect();
            meter.has_room(cost) || interruptible && self.signalled.load(Ordering::SeqCst)
        });
        if interruptible {
            *lock(&self.main) = None;
        }
        if meter.has_room(cost) {
            Waited::Ready
        } else if interruptible && self.signalled.swap(false, Ordering::SeqCst) {
            Waited::Interrupted
        } else {
            Waited::NotYet
        }
    }

    /// Whether the calling thread is that of the event loop of this process's actors, which may not wait for them.
    pub fn on_loop_thread(&self) -> bool {
        let me = std::thread::current().id();
        lock(&self.loop_thread).is_some_and(|thread| thread == me)
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
        call.tell(&self.reactor, waker, token, seen);
    }

    /// Has `waker` told, with `token`, when the inbox has messages.
    pub fn attach_loop(&self, inbox: &Inbox, waker: &Arc<LoopWaker>, token: u64) {
        inbox.attach(&self.reactor, Arc::clone(waker), token);
    }

    /// Makes a token ready by hand.
    pub fn push_loop(&self, waker: &LoopWaker, token: u64) {
        waker.push(&self.reactor, token);
    }

    /// What the event loop of this process's actors does instead of sleeping on its own descriptors: waits here until
    /// `waker` has something, one of the loop's descriptors is ready (`watched` is the set that they are in), or the
    /// deadline.
    pub fn wait_loop(&self, waker: &LoopWaker, watched: BorrowedFd<'_>, deadline: Option<Instant>) {
        if waker.any() || self.forked.load(Ordering::SeqCst) {
            return;
        }
        if self.closed.load(Ordering::SeqCst) {
            // There is no I/O thread any more that would read for those who are not the leader.
            let mut fds = [PollFd::from_borrowed_fd(watched, PollFlags::IN)];
            let _ = poll(&mut fds, deadline.map(until).as_ref());
            return;
        }
        self.loop_ready.store(false, Ordering::SeqCst);
        let me = Waiter::current();
        *lock(&self.loop_waiter) = Some(Arc::clone(&me));
        *lock(&self.loop_thread) = Some(std::thread::current().id());
        waker.wait_here(true);
        let first = self.loop_fd.swap(watched.as_raw_fd(), Ordering::SeqCst) != watched.as_raw_fd();
        self.reactor.watch_once(watched, TOKEN_LOOP, first);
        self.reactor.wait(self, &self.board, self.options.spin, deadline, false, &|| {
            waker.any() || self.loop_ready.load(Ordering::SeqCst) || self.closed.load(Ordering::SeqCst)
        });
        waker.wait_here(false);
        *lock(&self.loop_waiter) = None;
    }

    /// One of the loop's descriptors is ready. It is not looked at again until the loop waits again.
    pub(super) fn on_loop(&self) {
        self.loop_ready.store(true, Ordering::SeqCst);
        if let Some(waiter) = lock(&self.loop_waiter).clone() {
            waiter.notify(&self.reactor);
        }
    }
}

fn until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) }
}
