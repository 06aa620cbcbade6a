//! Which thread reads the links.
//!
//! All links are in one epoll set. The holder of the `poll` lock has the duty of reading it: normally the I/O thread,
//! which sleeps on a second set that contains the first. But a thread that waits for an answer takes over and becomes
//! the *leader*, because then the answer wakes it directly: no hand-over, and no sleep at all if the answer is near.
//! While there is a leader the I/O thread is disarmed and undisturbed.
//!
//! A leader that finds something for another thread steps down: the other is busier, and leads when it waits next.
//!
//! LDR-1: at any time someone is armed: the leader polls, or the I/O thread's set contains the links' set.
//! LDR-2: a waiting thread that is not the leader is woken by whichever thread reads what it waits for.

use crate::error::RuntimeError;
use crate::sets::Sets;
use crate::spin_board::SpinBoard;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, yield_now};
use crate::wait::{Leading, Waiter};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

/// How often the I/O thread checks whether the leader has finished handing over: first for a leader on another
/// processor, then for one that needs this processor to get there.
const SPINS: u32 = 64;
const YIELDS: u32 = 2;
/// After that, how long it leaves the processor to others.
const HANDED_OVER: Duration = Duration::from_micros(50);

/// The set of the pipes: a poll reports it before any link, and also if it has more to report than it can.
pub(crate) const TOKEN_PIPES: u64 = u64::MAX - 3;

/// What the reactor calls when a descriptor is ready; one thread at a time.
pub trait Handler {
    /// `token`'s descriptor can be read (or is closed) or written.
    fn on_ready(&self, token: u64, readable: bool, writable: bool);
    /// The links are about to be polled.
    fn on_poll(&self) {}
    /// The I/O thread is awake: do what waits for it. Returns when to call again.
    fn on_turn(&self) -> Option<Instant>;
}

/// The links' descriptors, and the lock that decides which thread reads.
#[derive(Debug)]
pub struct Reactor {
    sets: Sets,
    io_rung: AtomicBool,
    poll: Mutex<()>,
    /// The last argument of [`Reactor::arm`], set by the holder of the lock.
    armed: AtomicBool,
    /// The leader has woken another thread since this was last cleared.
    served: AtomicBool,
    closed: AtomicBool,
}

impl Reactor {
    /// An empty reactor. Nothing is read until [`Reactor::run_io`] runs or a thread waits.
    ///
    /// # Errors
    /// If descriptors run out.
    pub fn new() -> Result<Self, RuntimeError> {
        Ok(Self {
            sets: Sets::new()?,
            io_rung: AtomicBool::new(false),
            poll: Mutex::new(()),
            armed: AtomicBool::new(true),
            served: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        })
    }

    /// Watches a descriptor for reading.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), RuntimeError> {
        self.sets.add(fd, token)
    }

    /// Watches a descriptor for reading, and with `write` for writing too.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u64, write: bool) {
        self.sets.watch(fd, token, write);
    }

    /// Watches a descriptor for reading, for writing, for both, or only for its end, which is reported once.
    pub(crate) fn watch_ways(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) {
        self.sets.watch_ways(fd, token, read, write);
    }

    /// Watches a descriptor until it is ready once. Call with `first` the first time, and without it to watch again.
    pub(crate) fn watch_once(&self, fd: BorrowedFd<'_>, token: u64, first: bool) {
        self.sets.watch_once(fd, token, first);
    }

    /// Watches a pipe only for its other end closing, which the kernel reports unasked.
    pub(crate) fn watch_end(&self, fd: BorrowedFd<'_>, token: u64) {
        self.sets.watch_end(fd, token);
    }

    /// Stops watching.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        self.sets.remove(fd);
    }

    /// Makes the I/O thread take a turn: there is something for it to do, or an earlier deadline.
    pub(crate) fn ring_io(&self) {
        if !self.io_rung.swap(true, Ordering::SeqCst) {
            self.sets.ring_io();
        }
    }

    fn arm(&self, armed: bool) {
        if armed {
            // First: whoever this wakes reads it.
            self.armed.store(true, Ordering::Release);
        }
        self.sets.arm(armed);
        if !armed {
            self.armed.store(false, Ordering::Release);
        }
    }

    /// The I/O thread's main loop: reads while no other thread does and keeps deadlines, until [`Reactor::close`].
    pub fn run_io(&self, handler: &dyn Handler) {
        let mut deadline = handler.on_turn();
        while !self.closed.load(Ordering::SeqCst) {
            let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let roused = self.sets.wait_as_io(timeout);
            if roused.rung {
                // In this order, a ring between the two is heard in this turn and does not mute later ones. The
                // exchange sees what those threads did before that found it rung.
                self.sets.hear_io();
                self.io_rung.swap(false, Ordering::SeqCst);
            }
            if roused.readable {
                if let Some(_guard) = self.try_poll_soon() {
                    self.poll_once(handler, Some(Duration::ZERO), || {});
                } else if !cfg!(loom) && self.armed.load(Ordering::Acquire) {
                    std::thread::sleep(HANDED_OVER);
                }
            }
            let turn = roused.rung || !roused.readable;
            if turn || deadline.is_some_and(|at| at <= Instant::now()) {
                deadline = handler.on_turn();
            }
        }
    }

    /// Ends [`Reactor::run_io`].
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.sets.ring_io();
    }

    /// Takes reading duty if it is free. A panic of an earlier holder is harmless: the lock guards no data.
    fn try_poll(&self) -> Option<MutexGuard<'_, ()>> {
        match self.poll.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Like [`Reactor::try_poll`], for the I/O thread, which was told that there is something to read: a leader is
    /// about to hand over, or has just taken duty. This thread has often interrupted that leader on its processor, so a
    /// busy wait would keep the leader from getting there. None also if a leader has duty and this thread is disarmed.
    fn try_poll_soon(&self) -> Option<MutexGuard<'_, ()>> {
        if cfg!(loom) {
            return self.try_poll();
        }
        for attempt in 0..SPINS + YIELDS {
            let guard = self.try_poll();
            if guard.is_some() || !self.armed.load(Ordering::Acquire) {
                return guard;
            }
            if attempt < SPINS {
                std::hint::spin_loop();
            } else {
                yield_now();
            }
        }
        None
    }

    #[cfg(loom)]
    pub(crate) fn sets(&self) -> &Sets {
        &self.sets
    }

    /// Takes reading duty but reads nothing, like a stalled process.
    #[cfg(test)]
    pub(crate) fn stall(&self) -> impl Drop + '_ {
        struct Stall<'a> {
            _rearm: Rearm<'a>,
            _guard: MutexGuard<'a, ()>,
        }
        impl Drop for Stall<'_> {
            fn drop(&mut self) {}
        }
        // Make the current leader give up, as for a busier thread.
        let guard = loop {
            if let Some(guard) = self.try_poll() {
                break guard;
            }
            self.note_served();
            self.wake_leader();
            yield_now();
        };
        self.arm(false);
        Stall { _rearm: Rearm(self), _guard: guard }
    }

    /// Polls the links once, by the holder of the lock. `woken` runs before anything is handled.
    fn poll_once(&self, handler: &dyn Handler, limit: Option<Duration>, woken: impl FnOnce()) {
        handler.on_poll();
        self.sets.poll_links(limit, TOKEN_PIPES, woken, |token, readable, writable| {
            handler.on_ready(token, readable, writable)
        });
    }

    /// Waits until `ready`, reading the links meanwhile if no other thread does. False if the deadline came first.
    ///
    /// With `look_only` it returns instead of blocking.
    pub(crate) fn wait(
        &self,
        handler: &dyn Handler,
        board: &Arc<SpinBoard>,
        spin: Duration,
        deadline: Option<Instant>,
        look_only: bool,
        ready: &dyn Fn() -> bool,
    ) -> bool {
        let waiter = Waiter::current();
        loop {
            if ready() {
                return true;
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return false;
            }
            if let Some(_guard) = self.try_poll() {
                self.arm(false);
                let rearm = Rearm(self);
                let led = self.lead(handler, board, &waiter, spin, deadline, look_only, ready);
                drop(rearm);
                match led {
                    Led::Ready => return true,
                    Led::NotYet => return false,
                    Led::ForOthers => {}
                }
            }
            if look_only {
                return false;
            }
            board.leave();
            waiter.park(deadline.map(|at| at.saturating_duration_since(Instant::now())), ready);
            board.enter();
        }
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, which has them all in hand")]
    fn lead(
        &self,
        handler: &dyn Handler,
        board: &Arc<SpinBoard>,
        waiter: &Waiter,
        spin: Duration,
        deadline: Option<Instant>,
        look_only: bool,
        ready: &dyn Fn() -> bool,
    ) -> Led {
        self.served.store(false, Ordering::Relaxed);
        loop {
            if !spin.is_zero() && !board.single_core() && !board.crowded() && waiter.may_spin() {
                board.enter();
                board.look(true);
                let until = Instant::now() + spin;
                let mut looks = 0_u32;
                let led = loop {
                    self.poll_once(handler, Some(Duration::ZERO), || {});
                    if ready() {
                        break Some(Led::Ready);
                    }
                    if self.served.load(Ordering::Relaxed) {
                        break Some(Led::ForOthers);
                    }
                    looks += 1;
                    if Instant::now() >= until || board.crowded() {
                        break None;
                    }
                    if looks.is_multiple_of(8) {
                        // Other users of this core, unknown to the board, go first.
                        yield_now();
                    }
                };
                board.look(false);
                waiter.spun(matches!(led, Some(Led::Ready)));
                if let Some(led) = led {
                    return led;
                }
            }
            if look_only {
                return if ready() { Led::Ready } else { Led::NotYet };
            }
            let limit = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if waiter.begin_lead(ready) {
                board.leave();
                self.poll_once(handler, limit, || {
                    // Before the events are handled: they may complete what this thread waits for.
                    waiter.end_lead();
                    board.enter();
                });
            }
            if ready() {
                return Led::Ready;
            }
            if self.served.load(Ordering::Relaxed) {
                return Led::ForOthers;
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return Led::NotYet;
            }
        }
    }
}

/// How a thread's turn as the leader ended.
enum Led {
    /// With what it waits for.
    Ready,
    /// Without it: the deadline came, or it would have had to block and must not.
    NotYet,
    /// With something for another thread, which is busier and leads when it waits next.
    ForOthers,
}

impl Leading for Reactor {
    fn note_served(&self) {
        self.served.store(true, Ordering::Relaxed);
    }

    fn wake_leader(&self) {
        self.sets.ring_leader();
    }
}

/// Hands reading duty back to the I/O thread when dropped (LDR-1), even if a leader panics.
struct Rearm<'a>(&'a Reactor);

impl Drop for Rearm<'_> {
    fn drop(&mut self) {
        self.0.arm(true);
    }
}

/// Whether an error only means "try later".
pub(crate) fn would_block(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::INTR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd as _;

    struct Nobody;

    impl Handler for Nobody {
        fn on_ready(&self, _token: u64, _readable: bool, _writable: bool) {}

        fn on_turn(&self) -> Option<Instant> {
            None
        }
    }

    /// The processor time of this thread.
    fn worked() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
    }

    #[test]
    fn the_io_thread_leaves_the_processor_to_a_leader_that_is_about_to_hand_over() {
        let reactor = Reactor::new().unwrap();
        let window = Duration::from_millis(100);
        let took = std::thread::scope(|scope| {
            // Like a leader that has armed the I/O thread and was interrupted before it returned the lock.
            let guard = reactor.try_poll().unwrap();
            reactor.wake_leader();
            let io = scope.spawn(|| {
                reactor.run_io(&Nobody);
                worked()
            });
            std::thread::sleep(window);
            reactor.close();
            drop(guard);
            io.join().unwrap()
        });
        assert!(took < window / 2, "{took:?} of {window:?} were spent on looking");
    }

    /// What is rung for while a poll is handled is for the next poll, whoever makes it.
    #[test]
    fn a_ring_from_within_a_poll_is_not_lost_in_it() {
        let sets = Sets::new().unwrap();
        let link = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        sets.add(link.as_fd(), 1).unwrap();
        sets.ring_leader();
        let mut handled = 0;
        sets.poll_links(
            Some(Duration::ZERO),
            TOKEN_PIPES,
            || {},
            |_, _, _| {
                handled += 1;
                sets.remove(link.as_fd());
                sets.ring_leader();
            },
        );
        assert_eq!(handled, 1);
        assert!(sets.wait_as_io(Some(Duration::ZERO)).readable, "the ring was lost");
    }
}
