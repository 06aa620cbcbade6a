//! How threads wait for calls and messages, while one of them reads for all.

use super::alarms::Alarms;
use super::event_loop::{EventLoop, EventLoops};
use super::signals::Signals;
use crate::call::Call;
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::inbox::Inbox;
use crate::journal::Journal;
use crate::loop_waker::LoopWaker;
use crate::meter::Meter;
use crate::reactor::{Handler, Reactor};
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use crate::waits::Waiting as Blocked;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The awaited thing is there.
    Ready,
    /// The deadline came first, or it would have had to block and must not.
    NotYet,
    /// A signal wants the main thread's attention.
    Interrupted,
    /// There is something to tell everybody who waits ([`crate::Runtime::alarm`]).
    Alarm,
}

/// How long, and for what else, a thread waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    /// When it gives up.
    pub deadline: Option<Instant>,
    /// It returns instead of blocking.
    pub look: bool,
    /// A signal ends the wait. Only the main thread is interruptible.
    pub interruptible: bool,
    /// An alarm later than this one ends the wait; without one, none does.
    pub heard: Option<u64>,
}

/// What a thread can wait for until it is done, or has progressed.
pub trait Awaited: Sized {
    fn is_done(&self) -> bool;
    fn arrived(&self) -> usize;
    /// Makes progress wake the calling thread.
    fn expect(&self);
    /// Notes that the calling thread blocks, until the result is dropped.
    fn block(&self) -> Blocked<'_>;
    /// Waits for it, once.
    fn wait(&self, waiting: &Waiting, handler: &dyn Handler, seen: Option<usize>, patience: Patience) -> Waited {
        waiting.for_progress(handler, self, seen, patience)
    }
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
    fn block(&self) -> Blocked<'_> {
        self.block()
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
    fn block(&self) -> Blocked<'_> {
        self.block()
    }
    fn wait(&self, waiting: &Waiting, handler: &dyn Handler, seen: Option<usize>, patience: Patience) -> Waited {
        waiting.for_completion(handler, self, seen, patience)
    }
}

/// What ends a wait, beside the awaited thing. `handler` takes what arrives meanwhile.
#[derive(Debug)]
pub struct Waiting {
    reactor: Arc<Reactor>,
    board: Arc<SpinBoard>,
    spin: Duration,
    standing: Arc<Standing>,
    pub(super) signals: Signals,
    pub(super) alarms: Alarms,
    pub(super) event_loops: EventLoops,
}

impl Waiting {
    /// Signals are announced under `token`.
    pub(super) fn new(
        reactor: &Arc<Reactor>,
        board: &Arc<SpinBoard>,
        spin: Duration,
        standing: &Arc<Standing>,
        token: u64,
    ) -> Result<Self, RuntimeError> {
        Ok(Self {
            reactor: Arc::clone(reactor),
            board: Arc::clone(board),
            spin,
            standing: Arc::clone(standing),
            signals: Signals::new(reactor, token)?,
            alarms: Alarms::default(),
            event_loops: EventLoops::default(),
        })
    }

    fn until(
        &self,
        handler: &dyn Handler,
        spin: Duration,
        Patience { deadline, look, interruptible, heard }: Patience,
        ready: &dyn Fn() -> bool,
    ) -> Waited {
        let signals = self.signals.heed(interruptible);
        let alarmed = || heard.is_some_and(|heard| self.alarms.count() != heard);
        self.reactor.wait(handler, &self.board, spin, deadline, look, &|| {
            ready() || signals.as_ref().is_some_and(|signals| signals.came()) || alarmed()
        });
        if ready() {
            Waited::Ready
        } else if signals.is_some_and(|signals| signals.take()) {
            Waited::Interrupted
        } else if alarmed() {
            Waited::Alarm
        } else {
            Waited::NotYet
        }
    }

    /// Waits until the inbox has a message or is closed.
    pub(super) fn for_message(&self, handler: &dyn Handler, inbox: &Inbox) {
        let ready = || inbox.is_due() || inbox.is_closed();
        if !ready() {
            inbox.expect(&self.reactor);
            self.until(handler, self.spin, Patience::default(), &ready);
        }
    }

    /// Waits until a call or a completion is done, or has more than `seen` outcomes or tokens.
    pub(super) fn for_progress(
        &self,
        handler: &dyn Handler,
        awaited: &impl Awaited,
        seen: Option<usize>,
        patience: Patience,
    ) -> Waited {
        let ready = || awaited.is_done() || seen.is_some_and(|seen| awaited.arrived() > seen);
        if ready() {
            return Waited::Ready;
        }
        if self.standing.is_forked() {
            return Waited::NotYet;
        }
        awaited.expect();
        self.until(handler, self.spin, patience, &ready)
    }

    /// Like [`Self::for_progress`]. An alarm finds waiters for calls in their table; all others it finds here.
    pub(super) fn for_completion(
        &self,
        handler: &dyn Handler,
        completion: &Completion,
        seen: Option<usize>,
        patience: Patience,
    ) -> Waited {
        let watching = (!patience.look).then(|| self.alarms.watch());
        let waited = self.for_progress(handler, completion, seen, patience);
        drop(watching);
        if self.standing.is_over() {
            // No I/O thread is left to read when a leader leaves: another waiter must lead.
            self.alarms.wake(&self.reactor);
        }
        // It may continue for long without this thread.
        completion.leave();
        waited
    }

    /// Waits until a meter lets a message of `cost` bytes through, or has ended.
    pub(super) fn for_room(&self, handler: &dyn Handler, meter: &Meter, cost: u64, patience: Patience) -> Waited {
        if self.standing.is_forked() {
            return Waited::Ready;
        }
        // Another sender may be faster and take the room: a thread that saw room tries, and waits again if necessary.
        let room = Cell::new(false);
        self.until(handler, self.spin, patience, &|| {
            if !room.get() {
                // Again each time: a change of the meter forgets the threads that it has woken.
                meter.expect();
                room.set(meter.has_room(cost));
            }
            room.get()
        })
    }

    /// Waits until there are more than `seen` events, or there will be no more.
    pub(super) fn for_events(&self, handler: &dyn Handler, journal: &Journal, seen: u64, patience: Patience) -> Waited {
        let ready = || journal.next() > seen || journal.is_closed();
        if ready() {
            return Waited::Ready;
        }
        journal.expect();
        self.until(handler, Duration::ZERO, patience, &ready)
    }

    /// Waits as an event loop that comes here for once: see [`super::Runtime::visit_loop`]. Whatever `waker` gets later rings
    /// its descriptor again.
    pub(super) fn for_visitor(
        &self,
        handler: &dyn Handler,
        event_loop: &EventLoop,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        patience: Patience,
    ) -> Waited {
        let waited = if waker.any() || self.standing.is_closed() || event_loop.was_ready() {
            Waited::Ready
        } else {
            event_loop.wait(&self.reactor, waker, watched, || {
                // It has looked before.
                self.until(handler, Duration::ZERO, patience, &|| {
                    waker.any() || event_loop.is_ready() || self.standing.is_over()
                })
            })
        };
        waker.wait_outside();
        if waker.any() { Waited::Ready } else { waited }
    }

    /// Replaces the sleep of an event loop of this process's actors on its own descriptors: waits here until `waker`
    /// has something, one of the loop's descriptors is ready (`watched` is the set that they are in), or the deadline
    /// passes.
    pub(super) fn for_loop(
        &self,
        handler: &dyn Handler,
        event_loop: &EventLoop,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        deadline: Option<Instant>,
    ) {
        if waker.any() || self.standing.is_forked() {
            return;
        }
        if self.standing.is_over() {
            // No I/O thread is left to read for threads that are not the leader.
            waker.wait_outside();
            if waker.any() {
                return;
            }
            let mut fds = [PollFd::from_borrowed_fd(watched, PollFlags::IN)];
            let _ = poll(&mut fds, deadline.map(until).as_ref());
            return;
        }
        event_loop.wait(&self.reactor, waker, watched, || {
            self.until(handler, self.spin, Patience { deadline, ..Patience::default() }, &|| {
                waker.any() || event_loop.is_ready() || self.standing.is_over()
            });
        });
    }
}

fn until(deadline: Instant) -> Timespec {
    let left = deadline.saturating_duration_since(Instant::now());
    Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) }
}
