//! Something that any thread can finish: a promise, or a list of which others have finished.
//!
//! CMP-1: a completion has one outcome, the first. A thread that sees it done also sees what was stored for it before.
//! CMP-2: finishing takes no interpreter and no thread-local state, and never waits for anything but short locks. It
//! works on any thread, even after the runtime is gone.
//! CMP-3: a promise whose last finisher is gone is finished as broken.

use crate::loop_waker::LoopWaker;
use crate::reactor::Reactor;
use crate::standing::Standing;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::wait::Waiter;
use crate::waits::{Waiting, Waits};
use mesh_proto::ActorId;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// What is told, with its token, that something has progressed.
#[derive(Clone, Debug)]
pub(crate) enum Listener {
    Loop(Arc<LoopWaker>),
    List(Arc<Completion>),
}

impl Listener {
    pub(crate) fn tell(&self, reactor: &Reactor, token: u64) {
        match self {
            Self::Loop(waker) => waker.push(reactor, token),
            // It may belong to another runtime, and knows its own.
            Self::List(list) => list.push(token),
        }
    }

    pub(crate) fn is(&self, list: &Arc<Completion>) -> bool {
        matches!(self, Self::List(one) if Arc::ptr_eq(one, list))
    }
}

/// The outcome of a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It has a value, which is stored elsewhere.
    Value,
    /// It has an error, which is stored elsewhere.
    Error,
    /// Given up by those who waited for it.
    Cancelled,
    /// Everything that could have finished it is gone.
    Broken,
    /// Native code finished it with this status.
    Status(i32),
}

// As one number, so that one exchange settles the first outcome; 0 is none yet.
const VALUE: u64 = 1;
const ERROR: u64 = 2;
const CANCELLED: u64 = 3;
const BROKEN: u64 = 4;
const STATUS: u64 = 5;
const STATUS_AT: u32 = 8;

impl Fate {
    fn encode(self) -> u64 {
        match self {
            Self::Value => VALUE,
            Self::Error => ERROR,
            Self::Cancelled => CANCELLED,
            Self::Broken => BROKEN,
            Self::Status(status) => STATUS | u64::from(status.cast_unsigned()) << STATUS_AT,
        }
    }

    fn decode(word: u64) -> Option<Self> {
        match word & ((1 << STATUS_AT) - 1) {
            VALUE => Some(Self::Value),
            ERROR => Some(Self::Error),
            CANCELLED => Some(Self::Cancelled),
            BROKEN => Some(Self::Broken),
            STATUS => Some(Self::Status(((word >> STATUS_AT) as u32).cast_signed())),
            _ => None,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    /// In order of arrival; none for a promise.
    tokens: Vec<u64>,
    waiters: Vec<Arc<Waiter>>,
    /// With how many tokens each has seen.
    listeners: Vec<(Listener, u64, usize)>,
}

/// What to wake. Each listener comes with its token and how many tokens it has seen.
type ToWake = (Vec<Arc<Waiter>>, Vec<(Listener, u64, usize)>);

/// Something that any thread can finish and others wait for.
#[derive(Debug)]
pub struct Completion {
    /// Where its waiters wait. Native code may keep a completion for longer.
    reactor: Weak<Reactor>,
    standing: Arc<Standing>,
    /// A [`Fate`]; 0 until there is one.
    fate: AtomicU64,
    done: AtomicBool,
    arrived: AtomicUsize,
    /// Whether to note when it finishes.
    timed: AtomicBool,
    /// Nanoseconds since the epoch; 0 until then, or if not noted.
    finished: AtomicU64,
    waits: Waits,
    state: Mutex<State>,
}

impl Completion {
    /// An unfinished completion.
    pub(crate) fn new(reactor: &Arc<Reactor>, standing: &Arc<Standing>) -> Arc<Self> {
        Arc::new(Self::of(Arc::downgrade(reactor), Arc::clone(standing)))
    }

    pub(crate) fn of(reactor: Weak<Reactor>, standing: Arc<Standing>) -> Self {
        Self {
            reactor,
            standing,
            fate: AtomicU64::new(0),
            done: AtomicBool::new(false),
            arrived: AtomicUsize::new(0),
            timed: AtomicBool::new(false),
            finished: AtomicU64::new(0),
            waits: Waits::default(),
            state: Mutex::new(State::default()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is finished, and what was stored for its outcome is visible.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    /// Sets which actor is about to wait for it.
    pub fn asked_by(&self, actor: ActorId) {
        self.waits.asked_by(actor);
    }

    /// Notes that the calling thread waits, until the result is dropped (WTS-1).
    pub fn block(&self) -> Waiting<'_> {
        self.waits.block()
    }

    /// Which actor waits for it, and since when, if any does.
    pub(crate) fn awaited(&self) -> Option<(ActorId, Instant)> {
        let listens = !self.lock().listeners.is_empty();
        self.waits.look(listens && !self.is_done())
    }

    /// Whether somebody waits for it now.
    pub(crate) fn is_awaited(&self) -> bool {
        let state = self.lock();
        !self.is_done() && (!state.waiters.is_empty() || !state.listeners.is_empty())
    }

    /// How many tokens have arrived.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// The `n`th token to arrive.
    pub fn token(&self, n: usize) -> Option<u64> {
        self.lock().tokens.get(n).copied()
    }

    /// Takes the tokens that have arrived, and starts counting again.
    pub fn take(&self) -> Vec<u64> {
        let mut state = self.lock();
        self.arrived.store(0, Ordering::SeqCst);
        std::mem::take(&mut state.tokens)
    }

    /// Its outcome, which may be about to be shown.
    pub fn fate(&self) -> Option<Fate> {
        Fate::decode(self.fate.load(Ordering::SeqCst))
    }

    /// Whether this is a copy in a forked child, whose locks may never be released.
    fn is_copy(&self) -> bool {
        self.standing.is_forked()
    }

    /// Settles the outcome. False if there is one already. Store what belongs to it now, before [`Completion::end`].
    pub fn begin(&self, fate: Fate) -> bool {
        self.fate.compare_exchange(0, fate.encode(), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Makes it note when it finishes.
    pub fn time(&self) {
        self.timed.store(true, Ordering::Relaxed);
    }

    /// When it finished, in nanoseconds since the epoch, if that was noted.
    pub fn finished(&self) -> Option<u64> {
        Some(self.finished.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }

    /// Shows the outcome that [`Completion::begin`] has settled (CMP-1).
    pub fn end(&self) {
        if self.timed.load(Ordering::Relaxed) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            self.finished.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
        self.wake(self.show());
    }

    /// Shows the outcome. Returns what to wake.
    pub(crate) fn show(&self) -> ToWake {
        let mut state = self.lock();
        self.done.store(true, Ordering::SeqCst);
        (std::mem::take(&mut state.waiters), std::mem::take(&mut state.listeners))
    }

    /// Finishes it. False if it already has an outcome, or in a forked copy.
    pub fn finish(&self, fate: Fate) -> bool {
        if self.is_copy() || !self.begin(fate) {
            return false;
        }
        self.end();
        true
    }

    /// Something that this listens to has progressed.
    pub(crate) fn push(&self, token: u64) {
        self.wake(self.add(token));
    }

    /// Adds a token. Returns what to wake.
    pub(crate) fn add(&self, token: u64) -> ToWake {
        let mut state = self.lock();
        state.tokens.push(token);
        let arrived = state.tokens.len();
        self.arrived.store(arrived, Ordering::SeqCst);
        // A waiter looks, continues to wait, and must be woken again.
        let waiters = state.waiters.clone();
        (waiters, state.listeners.extract_if(.., |(_, _, seen)| arrived > *seen).collect())
    }

    fn wake(&self, (waiters, listeners): ToWake) {
        if waiters.is_empty() && listeners.is_empty() {
            return;
        }
        // Waiting threads hold the runtime, and with it the reactor.
        let Some(reactor) = self.reactor.upgrade() else { return };
        for waiter in waiters {
            waiter.notify(&*reactor);
        }
        for (listener, token, _) in listeners {
            listener.tell(&reactor, token);
        }
    }

    pub(crate) fn expect(&self) {
        let me = Waiter::current();
        let mut state = self.lock();
        if !state.waiters.iter().any(|one| Arc::ptr_eq(one, &me)) {
            state.waiters.push(me);
        }
    }

    /// Notes that the calling thread no longer waits.
    pub(crate) fn leave(&self) {
        let me = Waiter::current();
        self.lock().waiters.retain(|one| !Arc::ptr_eq(one, &me));
    }

    /// Blocks until a list has tokens or is finished, or the deadline passes, without ever reading the links, so that
    /// the thread delays nobody.
    pub fn wait_aside(&self, deadline: Option<Instant>) {
        let ready = || self.is_done() || self.arrived() > 0;
        self.expect();
        while !ready() {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            Waiter::current().park(left, &ready);
        }
        self.leave();
    }

    fn listen(&self, listener: Listener, token: u64, seen: usize) {
        let mut state = self.lock();
        if !self.is_done() && self.arrived() <= seen {
            if state.listeners.is_empty() {
                self.waits.listened();
            }
            state.listeners.push((listener, token, seen));
            return;
        }
        drop(state);
        self.wake((Vec::new(), vec![(listener, token, seen)]));
    }

    /// Notifies an event loop when it is finished or has more than `seen` tokens; at once if so.
    pub fn tell(&self, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        self.listen(Listener::Loop(Arc::clone(waker)), token, seen);
    }

    /// Adds `token` to a list when it is finished or has more than `seen` tokens; at once if so.
    pub fn note(&self, list: &Arc<Completion>, token: u64, seen: usize) {
        self.listen(Listener::List(Arc::clone(list)), token, seen);
    }

    /// Stops telling a list.
    pub fn forget(&self, list: &Arc<Completion>) {
        self.lock().listeners.retain(|(listener, _, _)| !listener.is(list));
    }
}

/// The right to finish a promise. When the last reference is dropped, an unfinished promise is broken (CMP-3).
#[derive(Debug)]
pub struct Finisher(Arc<Completion>);

impl Finisher {
    /// The finisher of a promise. Make only one.
    pub fn new(completion: &Arc<Completion>) -> Arc<Self> {
        Arc::new(Self(Arc::clone(completion)))
    }

    /// Like [`Completion::finish`].
    pub fn finish(&self, fate: Fate) -> bool {
        self.0.finish(fate)
    }

    /// Whether this is a copy in a forked child, where nothing can be finished.
    pub fn is_copy(&self) -> bool {
        self.0.is_copy()
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        if !self.0.is_done() {
            self.0.finish(Fate::Broken);
        }
    }
}
