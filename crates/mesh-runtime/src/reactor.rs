//! Who reads the links.
//!
//! All links are in one epoll set. Reading duty over that set belongs to whoever holds the `poll` lock: normally the
//! I/O thread, which sleeps on a second set that contains the first; but a thread that has to wait for an answer takes
//! the duty over (it becomes the *leader*), because then the answer wakes it directly: no hand-over, and where the
//! answer is near, no sleep at all. While there is a leader the I/O thread is disarmed and undisturbed.
//!
//! A leader that finds something for another thread steps down: the other is the busier one, and leads when it waits next.
//!
//! LDR-1: at any time somebody is armed: the leader polls, or the I/O thread's set contains the links' set.
//! LDR-2: a thread that waits and is not the leader is woken by whoever reads what it waits for.

use crate::error::RuntimeError;
use crate::spin_board::SpinBoard;
use crate::wait::Waiter;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

const BATCH: usize = 64;
const TOKEN_WAKE: u64 = u64::MAX;
const TOKEN_INNER: u64 = u64::MAX - 1;
const TOKEN_IO: u64 = u64::MAX - 2;
/// How often the I/O thread looks whether the leader is done with handing over: where that one runs on another processor, and
/// where it has to get this one first.
const SPINS: u32 = 64;
const YIELDS: u32 = 2;
/// After that, how long it leaves the processor to whoever else is ahead of the leader.
const HANDED_OVER: Duration = Duration::from_micros(50);

/// What the reactor calls when a descriptor is ready. Only one thread at a time does.
pub trait Handler {
    /// `token`'s descriptor can be read (or is closed) or written.
    fn on_ready(&self, token: u64, readable: bool, writable: bool);
    /// The I/O thread is up and about: run what waits for it. Returns when it wants to be called next.
    fn on_turn(&self) -> Option<Instant>;
}

/// The two sets and the lock that says who reads.
#[derive(Debug)]
pub struct Reactor {
    inner: OwnedFd,
    outer: OwnedFd,
    /// Wakes a leader that blocks; in the inner set.
    wake: OwnedFd,
    /// Wakes the I/O thread alone; in the outer set.
    io: OwnedFd,
    io_rung: AtomicBool,
    poll: Mutex<()>,
    /// What [`Reactor::arm`] was last told, by the holder of the lock.
    armed: AtomicBool,
    /// The leader has woken another thread since this was last cleared.
    served: AtomicBool,
    closed: AtomicBool,
}

fn event_fd() -> Result<OwnedFd, RuntimeError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(RuntimeError::os("eventfd"))
}

fn drain(fd: &OwnedFd) {
    let mut word = [0_u8; 8];
    let _ = rustix::io::read(fd, &mut word);
}

fn ring(fd: &OwnedFd) {
    // Full means rung already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

impl Reactor {
    /// A reactor with nothing in it. Nobody reads until [`Reactor::run_io`] runs or somebody waits.
    ///
    /// # Errors
    /// If descriptors run out.
    pub fn new() -> Result<Self, RuntimeError> {
        let os = RuntimeError::os;
        let inner = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let outer = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let wake = event_fd()?;
        let io = event_fd()?;
        epoll::add(&inner, &wake, EventData::new_u64(TOKEN_WAKE), EventFlags::IN).map_err(os("epoll_ctl"))?;
        epoll::add(&outer, &inner, EventData::new_u64(TOKEN_INNER), EventFlags::IN).map_err(os("epoll_ctl"))?;
        epoll::add(&outer, &io, EventData::new_u64(TOKEN_IO), EventFlags::IN).map_err(os("epoll_ctl"))?;
        Ok(Self {
            inner,
            outer,
            wake,
            io,
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
        epoll::add(&self.inner, fd, EventData::new_u64(token), EventFlags::IN).map_err(RuntimeError::os("epoll_ctl"))
    }

    /// Watches a descriptor for reading, and for writing too if asked.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u64, write: bool) {
        let flags = if write { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        // A descriptor that was removed meanwhile needs no watching.
        let _ = epoll::modify(&self.inner, fd, EventData::new_u64(token), flags);
    }

    /// Watches a descriptor until it is ready once; `first` the first time, again with every further call.
    pub(crate) fn watch_once(&self, fd: BorrowedFd<'_>, token: u64, first: bool) {
        let (flags, data) = (EventFlags::IN | EventFlags::ONESHOT, EventData::new_u64(token));
        if !first || epoll::add(&self.inner, fd, data, flags).is_err() {
            let _ = epoll::modify(&self.inner, fd, data, flags);
        }
    }

    /// Watches a pipe for nothing but its other end being closed, which the kernel reports unasked.
    pub(crate) fn watch_end(&self, fd: BorrowedFd<'_>, token: u64) {
        let _ = epoll::modify(&self.inner, fd, EventData::new_u64(token), EventFlags::empty());
    }

    /// Stops watching.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.inner, fd);
    }

    /// Another thread than the leader was woken.
    pub(crate) fn note_served(&self) {
        self.served.store(true, Ordering::Relaxed);
    }

    pub(crate) fn wake_leader(&self) {
        ring(&self.wake);
    }

    /// Has the I/O thread take a turn: there is something for it to do, or an earlier deadline.
    pub(crate) fn ring_io(&self) {
        if !self.io_rung.swap(true, Ordering::SeqCst) {
            ring(&self.io);
        }
    }

    fn arm(&self, armed: bool) {
        let flags = if armed { EventFlags::IN } else { EventFlags::empty() };
        if armed {
            // First: whom this wakes looks at it.
            self.armed.store(true, Ordering::Release);
        }
        let _ = epoll::modify(&self.outer, self.inner.as_fd(), EventData::new_u64(TOKEN_INNER), flags);
        if !armed {
            self.armed.store(false, Ordering::Release);
        }
    }

    /// The I/O thread's life: reads while nobody else does, keeps deadlines, until [`Reactor::close`].
    pub fn run_io(&self, handler: &dyn Handler) {
        let mut deadline = handler.on_turn();
        let mut buffer = [MaybeUninit::<Event>::uninit(); 4];
        while !self.closed.load(Ordering::SeqCst) {
            let timeout = deadline.map(|at| timespec(at.saturating_duration_since(Instant::now())));
            let turn = match epoll::wait(&self.outer, &mut buffer, timeout.as_ref()) {
                Ok((events, _)) => {
                    let mut turn = events.is_empty();
                    for event in events {
                        if event.data.u64() == TOKEN_IO {
                            // In this order: a ring between the two is heard in this turn, and does not mute later ones.
                            drain(&self.io);
                            self.io_rung.store(false, Ordering::SeqCst);
                            turn = true;
                        } else if let Some(_guard) = self.try_poll_soon() {
                            self.poll_once(handler, Some(Duration::ZERO), || {});
                        } else if self.armed.load(Ordering::Acquire) {
                            std::thread::sleep(HANDED_OVER);
                        }
                    }
                    turn
                }
                Err(_) => true,
            };
            if turn || deadline.is_some_and(|at| at <= Instant::now()) {
                deadline = handler.on_turn();
            }
        }
    }

    /// Ends [`Reactor::run_io`].
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        ring(&self.io);
    }

    /// Reading duty, if nobody has it. A panic of an earlier holder spoilt nothing: the lock guards no data.
    fn try_poll(&self) -> Option<MutexGuard<'_, ()>> {
        match self.poll.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The same for the I/O thread, which has been told that there is something to read: a leader is about to hand the duty
    /// over, or has just taken it. It often is what this thread has interrupted on its processor, so that waiting for it
    /// busily would keep it from ever getting there. None also where a leader has the duty, and this thread is disarmed.
    fn try_poll_soon(&self) -> Option<MutexGuard<'_, ()>> {
        for attempt in 0..SPINS + YIELDS {
            let guard = self.try_poll();
            if guard.is_some() || !self.armed.load(Ordering::Acquire) {
                return guard;
            }
            if attempt < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        None
    }

    /// Takes reading duty and reads nothing, as a stalled process does.
    #[cfg(test)]
    pub(crate) fn stall(&self) -> impl Drop + '_ {
        struct Stall<'a> {
            _rearm: Rearm<'a>,
            _guard: MutexGuard<'a, ()>,
        }
        impl Drop for Stall<'_> {
            fn drop(&mut self) {}
        }
        // Whoever leads just now gives up, as for somebody that is busier.
        let guard = loop {
            if let Some(guard) = self.try_poll() {
                break guard;
            }
            self.note_served();
            self.wake_leader();
            std::thread::yield_now();
        };
        self.arm(false);
        Stall { _rearm: Rearm(self), _guard: guard }
    }

    /// One look at the links, by the holder of the lock. `woken` runs before anything is handled.
    fn poll_once(&self, handler: &dyn Handler, limit: Option<Duration>, woken: impl FnOnce()) {
        let mut buffer = [MaybeUninit::<Event>::uninit(); BATCH];
        let timeout = limit.map(timespec);
        let polled = epoll::wait(&self.inner, &mut buffer, timeout.as_ref());
        woken();
        let Ok((events, _)) = polled else {
            return; // A signal, which comes by its descriptor too.
        };
        for event in &*events {
            let token = event.data.u64();
            if token == TOKEN_WAKE {
                drain(&self.wake);
                continue;
            }
            let flags = event.flags;
            let readable = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
            handler.on_ready(token, readable, flags.contains(EventFlags::OUT));
        }
    }

    /// Waits until `ready`, reading the links meanwhile if nobody else does. False if the deadline came first.
    ///
    /// With `look_only` it returns before it would block.
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
                        // Whoever shares this core, unknown to the board, goes first.
                        std::thread::yield_now();
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
                    // Before the events are handled: they may complete what this very thread waits for.
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
    /// Without it: the deadline came, or it would have had to block and was not to.
    NotYet,
    /// With something for another thread. That one is the busier of the two, and shall lead when it waits again.
    ForOthers,
}

/// Hands reading duty back to the I/O thread (LDR-1), also when a leader panics.
struct Rearm<'a>(&'a Reactor);

impl Drop for Rearm<'_> {
    fn drop(&mut self) {
        self.0.arm(true);
    }
}

pub(crate) fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}

/// Whether an error only means "try later".
pub(crate) fn would_block(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::INTR)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    impl Handler for Nobody {
        fn on_ready(&self, _token: u64, _readable: bool, _writable: bool) {}

        fn on_turn(&self) -> Option<Instant> {
            None
        }
    }

    /// The time that this thread has had of a processor.
    fn worked() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
    }

    #[test]
    fn the_io_thread_leaves_the_processor_to_a_leader_that_is_about_to_hand_over() {
        let reactor = Reactor::new().unwrap();
        let window = Duration::from_millis(100);
        let took = std::thread::scope(|scope| {
            // As a leader that has armed the I/O thread and was interrupted before it gave the lock back.
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
}
