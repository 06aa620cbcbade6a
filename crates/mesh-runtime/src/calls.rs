//! Calls that wait for their replies.

use crate::inbox::LoopWaker;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use mesh_proto::{CallId, Ended, Gather, ProcAddr, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SHARDS: usize = 8;

/// What became of a call at one rank.
pub type Outcome = mesh_proto::Outcome<Arc<Message>>;

#[derive(Debug)]
struct State {
    gather: Option<Gather<Arc<Message>>>,
    outcomes: Option<Vec<Outcome>>,
    /// Places in the order in which their outcomes came; kept for streams only.
    order: Vec<(usize, Outcome)>,
    waiters: Vec<Arc<Waiter>>,
    /// With how many outcomes they have seen: they want to be told of more.
    wakers: Vec<(Arc<LoopWaker>, u64, usize)>,
}

/// One call, from its sending until its last reply.
#[derive(Debug)]
pub struct Call {
    /// Its id, unique in this process.
    pub id: CallId,
    stream: bool,
    done: AtomicBool,
    /// Outcomes that a stream can hand out so far.
    arrived: AtomicUsize,
    state: Mutex<State>,
}

impl Call {
    fn new(id: CallId, target: Target, stream: bool) -> Self {
        let gather = Gather::new(target);
        let empty = gather.is_complete();
        Self {
            id,
            stream,
            done: AtomicBool::new(empty),
            arrived: AtomicUsize::new(0),
            state: Mutex::new(State {
                gather: (!empty).then_some(gather),
                outcomes: empty.then(Vec::new),
                order: Vec::new(),
                waiters: Vec::new(),
                wakers: Vec::new(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether every outcome is there.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    /// How many outcomes a stream has so far.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// The outcomes in the order of the target, once all are there. They can be had once.
    pub fn take_outcomes(&self) -> Option<Vec<Outcome>> {
        self.lock().outcomes.take()
    }

    /// Places in the target that have no outcome yet.
    pub fn missing(&self) -> Vec<usize> {
        self.lock().gather.as_ref().map(|gather| gather.missing_places().collect()).unwrap_or_default()
    }

    /// A stream's `n`th outcome, in order of arrival, with its place in the target.
    pub fn nth(&self, n: usize) -> Option<(usize, Outcome)> {
        self.lock().order.get(n).cloned()
    }

    /// Has the calling thread woken when the call progresses.
    pub(crate) fn expect(&self) {
        let me = Waiter::current();
        let mut state = self.lock();
        if !state.waiters.iter().any(|w| Arc::ptr_eq(w, &me)) {
            state.waiters.push(me);
        }
    }

    /// Has an event loop told when the call progresses; at once if there is nothing to wait for.
    pub(crate) fn tell(&self, reactor: &Reactor, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        let mut state = self.lock();
        if self.is_done() || self.arrived() > seen {
            drop(state);
            waker.push(reactor, token);
        } else {
            state.wakers.push((Arc::clone(waker), token, seen));
        }
    }

    /// Changes the state; if that completes the call, `finish` runs before anybody can see it.
    fn update(&self, reactor: &Reactor, finish: impl FnOnce(), change: impl FnOnce(&mut State) -> bool) -> bool {
        let mut state = self.lock();
        let before = state.order.len();
        let complete = change(&mut state);
        if complete {
            if let Some(gather) = state.gather.take() {
                state.outcomes = Some(gather.into_outcomes());
            }
            finish();
            self.done.store(true, Ordering::SeqCst);
        }
        self.arrived.store(state.order.len(), Ordering::SeqCst);
        if complete || state.order.len() > before {
            // Who waits for a later outcome of a stream looks, and goes on waiting: it is to be woken again.
            let waiters = if complete { std::mem::take(&mut state.waiters) } else { state.waiters.clone() };
            let arrived = state.order.len();
            let wakers: Vec<_> = state.wakers.extract_if(.., |(_, _, seen)| complete || arrived > *seen).collect();
            drop(state);
            for waiter in waiters {
                waiter.notify(reactor);
            }
            for (waker, token, _) in wakers {
                waker.push(reactor, token);
            }
        }
        complete
    }

    fn on_outcome(&self, reactor: &Reactor, finish: impl FnOnce(), index: usize, outcome: Outcome) -> bool {
        self.update(reactor, finish, |state| {
            let stream = self.stream.then(|| outcome.clone());
            let Some(gather) = &mut state.gather else { return false };
            let missing = gather.missing();
            let complete = gather.on_outcome(index, outcome);
            if let Some(outcome) = stream.filter(|_| gather.missing() < missing) {
                state.order.push((index, outcome));
            }
            complete
        })
    }

    fn on_down(&self, reactor: &Reactor, finish: impl FnOnce(), addr: ProcAddr, ended: &Arc<Ended>) {
        let index = self.lock().gather.as_ref().and_then(|gather| gather.target().index_of(addr));
        if let Some(index) = index {
            self.on_outcome(reactor, finish, index, Outcome::Lost(Arc::clone(ended)));
        }
    }
}

/// All calls of a process that wait.
#[derive(Debug)]
pub(crate) struct Calls {
    next: AtomicU64,
    shards: [Mutex<HashMap<CallId, Arc<Call>>>; SHARDS],
}

impl Default for Calls {
    fn default() -> Self {
        Self { next: AtomicU64::new(1), shards: Default::default() }
    }
}

impl Calls {
    fn shard(&self, id: CallId) -> MutexGuard<'_, HashMap<CallId, Arc<Call>>> {
        self.shards[id as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a call to `target`.
    pub(crate) fn open(&self, target: Target, stream: bool) -> Arc<Call> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let call = Arc::new(Call::new(id, target, stream));
        if !call.is_done() {
            self.shard(id).insert(id, Arc::clone(&call));
        }
        call
    }

    fn close(&self, id: CallId) {
        self.shard(id).remove(&id);
    }

    /// One outcome for one call; late ones are dropped.
    pub(crate) fn on_outcome(&self, reactor: &Reactor, id: CallId, index: usize, outcome: Outcome) {
        let Some(call) = self.shard(id).get(&id).cloned() else { return };
        call.on_outcome(reactor, || self.close(id), index, outcome);
    }

    /// A proc has ended: every call that waits for it has its answer.
    pub(crate) fn on_down(&self, reactor: &Reactor, addr: ProcAddr, ended: &Arc<Ended>) {
        for call in self.all() {
            call.on_down(reactor, || self.close(call.id), addr, ended);
        }
    }

    /// The caller no longer waits. False if the call was complete.
    pub(crate) fn cancel(&self, reactor: &Reactor, call: &Call) -> bool {
        self.shard(call.id).remove(&call.id);
        let mut cancelled = false;
        call.update(
            reactor,
            || {},
            |state| {
                cancelled = state.gather.as_mut().is_some_and(Gather::cancel);
                cancelled
            },
        );
        cancelled
    }

    /// Ends every call that waits: the runtime closes.
    pub(crate) fn fail_all(&self, reactor: &Reactor, ended: &Arc<Ended>) {
        for call in self.all() {
            self.close(call.id);
            let len = call.lock().gather.as_ref().map_or(0, |g| g.target().len());
            for index in 0..len {
                call.on_outcome(reactor, || {}, index, Outcome::Lost(Arc::clone(ended)));
            }
        }
    }

    /// How many calls wait.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    fn all(&self) -> Vec<Arc<Call>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(shard.lock().unwrap_or_else(PoisonError::into_inner).values().cloned());
        }
        all
    }
}
