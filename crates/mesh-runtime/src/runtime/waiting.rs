//! How threads wait for calls and messages, and how a signal reaches the main thread meanwhile.

use super::{Runtime, TOKEN_LOOP, lock};
use crate::calls::Call;
use crate::completion::Completion;
use crate::inbox::{Inbox, LoopWaker};
use crate::meter::Meter;
use crate::wait::Waiter;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
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
    /// There is something that everybody who waits is to be told ([`Runtime::alarm`]).
    Alarm,
}

/// What a thread can wait for until it is done, or has progressed.
trait Awaited {
    fn is_done(&self) -> bool;
    fn arrived(&self) -> usize;
    /// Has the calling thread woken when it progresses.
    fn expect(&self);
}

impl Awaited for Call {
    fn is_done(&self) -> bool {
        self.is_done()
    }
    fn arrived(&self) -> usize {
        self.arrived()
    }
    fn expect(&self) {
        self.expect();
    }
}

impl Awaited for Completion {
    fn is_done(&self) -> bool {
        self.is_done()
    }
    fn arrived(&self) -> usize {
        self.arrived()
    }
    fn expect(&self) {
        self.expect();
    }
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

    /// Blocks until there are notices, or the runtime is closed, without ever reading the links: whoever waits for
    /// these is to be in nobody's way.
    pub fn wait_notices(&self) {
        let inbox = &self.notices;
        while inbox.is_empty() && !inbox.is_closed() {
            inbox.expect();
            Waiter::current().park(None, &|| !inbox.is_empty() || inbox.is_closed());
        }
    }

    /// Blocks until a list has tokens, or is finished, without ever reading the links: as [`Runtime::wait_notices`].
    pub fn wait_aside(&self, list: &Completion, deadline: Option<Instant>) {
        let ready = || list.is_done() || list.arrived() > 0;
        list.expect();
        while !ready() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            Waiter::current().park(left, &ready);
        }
        list.leave();
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
        self.wait_or(call, seen, deadline, look, interruptible, None)
    }

    /// As [`Runtime::wait_call`]; an alarm later than `heard` ends the wait too.
    pub fn wait_call_or_alarm(
        &self,
        call: &Call,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
        heard: u64,
    ) -> Waited {
        self.wait_or(call, seen, deadline, look, interruptible, Some(heard))
    }

    /// Waits for a completion: to be finished, or to have more than `seen` tokens. With `heard`, an alarm later than that
    /// ends the wait too; otherwise as [`Runtime::wait_call`].
    pub fn wait_completion(
        &self,
        completion: &Completion,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
        heard: Option<u64>,
    ) -> Waited {
        // Calls are found by an alarm in their table. What waits for anything else is found here.
        let me = Waiter::current();
        if !look {
            lock(&self.watchers).push(Arc::clone(&me));
        }
        let waited = self.wait_or(completion, seen, deadline, look, interruptible, heard);
        if !look {
            let mut watchers = lock(&self.watchers);
            if let Some(place) = watchers.iter().position(|one| Arc::ptr_eq(one, &me)) {
                watchers.swap_remove(place);
            }
        }
        if self.closed.load(Ordering::SeqCst) {
            // There is no I/O thread any more to read when a leader leaves: another that waits is to lead.
            for watcher in lock(&self.watchers).clone() {
                watcher.notify(&self.reactor);
            }
        }
        // It may go on for long without this thread.
        completion.leave();
        waited
    }

    fn wait_or(
        &self,
        call: &impl Awaited,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
        heard: Option<u64>,
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
        let alarmed = || heard.is_some_and(|heard| self.alarms() != heard);
        self.reactor.wait(self, &self.board, self.options.spin, deadline, look, &|| {
            ready() || interruptible && self.signalled.load(Ordering::SeqCst) || alarmed()
        });
        if interruptible {
            *lock(&self.main) = None;
        }
        if ready() {
            Waited::Ready
        } else if interruptible && self.signalled.swap(false, Ordering::SeqCst) {
            Waited::Interrupted
        } else if alarmed() {
            Waited::Alarm
        } else {
            Waited::NotYet
        }
    }

    /// Ends all waits for calls that are under way.
    pub fn alarm(&self) {
        // Before it is counted: who counts it already sees that it is on.
        self.alarmed.store(true, Ordering::SeqCst);
        self.alarms.fetch_add(1, Ordering::SeqCst);
        self.calls.wake_all(&self.reactor);
        for watcher in lock(&self.watchers).clone() {
            watcher.notify(&self.reactor);
        }
    }

    /// Everybody has been told: who begins to wait from now on just waits.
    pub fn calm(&self) {
        self.alarmed.store(false, Ordering::SeqCst);
    }

    /// What to take for heard at the beginning of a wait: no alarm that is still on.
    pub fn alarms_heard(&self) -> u64 {
        let alarms = self.alarms();
        if self.alarmed.load(Ordering::SeqCst) { alarms.wrapping_sub(1) } else { alarms }
    }

    /// How many alarms there were.
    pub fn alarms(&self) -> u64 {
        self.alarms.load(Ordering::SeqCst)
    }

    /// The waiter of the main thread, while that waits and signals are to wake it.
    pub(crate) fn set_main(&self, waiter: Option<Arc<Waiter>>) {
        *lock(&self.main) = waiter;
    }

    pub(crate) fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::SeqCst)
    }

    pub(crate) fn take_signal(&self) -> bool {
        self.signalled.swap(false, Ordering::SeqCst)
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
        // Another sender may be quicker and take it: who saw room tries, and waits again if need be.
        let room = Cell::new(false);
        self.reactor.wait(self, &self.board, self.options.spin, deadline, false, &|| {
            // Again each time: whoever changes the meter forgets those that it has woken.
            meter.expect();
            room.set(meter.has_room(cost));
            room.get() || interruptible && self.signalled.load(Ordering::SeqCst)
        });
        if interruptible {
            *lock(&self.main) = None;
        }
        if room.get() {
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

    /// Has `list` told when the call progresses.
    pub fn tell_list(&self, call: &Call, list: &Arc<Completion>, token: u64, seen: usize) {
        call.note(&self.reactor, list, token, seen);
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
