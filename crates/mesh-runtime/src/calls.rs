//! Calls that wait for their replies.

use crate::completion::{Completion, Listener};
use crate::inbox::LoopWaker;
use crate::locks::lock;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::reactor::Reactor;
use crate::unseen::{Callee, Unseen, is_failure};
use crate::wait::Waiter;
use crate::waits::{Waiting, Waits};
use mesh_proto::control::Undeliverable;
use mesh_proto::messages::{Answer, Meaning, Reply};
use mesh_proto::{ActorId, CallId, EndReason, Ended, Gather, Holders, HostNo, ProcAddr, Target, Undelivered, Verdict};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

const SHARDS: usize = 8;

/// What became of a call at one rank.
pub type Outcome = mesh_proto::Outcome<Arc<Message>>;

/// The outcome of a call to a process that is no longer there, or never was.
pub(crate) fn lost(reason: EndReason) -> Outcome {
    Outcome::Lost(Arc::new(Ended { orderly: true, ..Ended::unmade(reason) }))
}

#[derive(Debug)]
pub(crate) struct State {
    gather: Option<Gather<Arc<Message>>>,
    pub(crate) outcomes: Option<Vec<Outcome>>,
    /// Somebody has looked at an outcome or has given the call up, so a failure need not be reported (UNS-1).
    pub(crate) looked: bool,
    /// Nobody can look at the outcomes any longer.
    pub(crate) dropped: bool,
    /// Places in the order in which their outcomes came; kept for streams only.
    order: Vec<(usize, Outcome)>,
    /// In a call to many: the first rank whose proc has died. The waiter need not wait for the others.
    lost: Option<(usize, Outcome)>,
    /// By place: who holds a port that was handed on.
    holders: BTreeMap<usize, Holders>,
    waiters: Vec<Arc<Waiter>>,
    /// With a token, and how many outcomes they have seen. They are told of more.
    listeners: Vec<(Listener, u64, usize)>,
}

impl State {
    /// Counts what a waiter may be woken for before all outcomes are there: a stream's outcomes, or a loss.
    fn progress(&self) -> usize {
        self.order.len() + usize::from(self.lost.is_some())
    }
}

fn is_value(reply: &Message) -> bool {
    Reply::read(reply.header()).is_ok_and(|reply| !reply.answer.is_error())
}

fn handed_out(outcome: &Outcome) {
    if let Outcome::Replied(message) = outcome {
        message.done();
    }
}

/// What the callee would have sent if it had been the last to drop the port.
fn end_of_port(callee: ProcAddr, id: CallId) -> Message {
    let end = Undeliverable { call: id, place: 0, actor: 0, why: Undelivered::PortHandedOn };
    Message::plain(end.frame(callee, callee))
}

/// One call, from its sending until its last reply.
#[derive(Debug)]
pub struct Call {
    /// Its id, unique in this process.
    pub id: CallId,
    stream: bool,
    /// Who was called, if the replies are combined on the way up.
    reduced: OnceLock<(Target, ActorId)>,
    /// Who was called, if a failure that nobody looks at is to be reported.
    pub(crate) callee: OnceLock<Arc<Callee>>,
    done: AtomicBool,
    /// One of the outcomes is a failure that is reported to nobody else.
    failed: AtomicBool,
    /// Outcomes that a stream can hand out so far.
    arrived: AtomicUsize,
    /// Whether to note when the call completes, and when it did, in nanoseconds since the epoch.
    timed: AtomicBool,
    finished: AtomicU64,
    /// How many bytes the senders of a stream may be ahead of its reader; 0 for what the process has set.
    ahead: AtomicU64,
    /// The account with the senders of a stream, made with the first value that they count.
    account: OnceLock<Arc<Account>>,
    waits: Waits,
    state: Mutex<State>,
}

impl Call {
    fn new(id: CallId, target: Target, stream: bool) -> Self {
        let gather = Gather::new(target);
        let empty = gather.is_complete();
        Self {
            id,
            stream,
            reduced: OnceLock::new(),
            callee: OnceLock::new(),
            done: AtomicBool::new(empty),
            failed: AtomicBool::new(false),
            arrived: AtomicUsize::new(0),
            timed: AtomicBool::new(false),
            finished: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            account: OnceLock::new(),
            waits: Waits::default(),
            state: Mutex::new(State {
                gather: (!empty).then_some(gather),
                outcomes: empty.then(Vec::new),
                looked: false,
                dropped: false,
                order: Vec::new(),
                lost: None,
                holders: BTreeMap::new(),
                waiters: Vec::new(),
                listeners: Vec::new(),
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether every outcome is there.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }

    /// Whether a failure, other than a death, is among the outcomes.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Says who was called, and so has a failure reported that nobody looks at.
    pub fn describe(&self, callee: &Arc<Callee>) {
        let _ = self.callee.set(Arc::clone(callee));
    }

    /// The waiter was interrupted: no failure of the call is to be reported.
    pub fn look_away(&self) {
        self.lock().looked = true;
    }

    /// How many outcomes a stream has so far.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// Has the call note when it completes.
    pub fn keep_time(&self) {
        self.timed.store(true, Ordering::Relaxed);
    }

    /// When it completed, if [`Call::keep_time`] came before that.
    pub fn finished(&self) -> Option<u64> {
        match self.finished.load(Ordering::Relaxed) {
            0 => None,
            at => Some(at),
        }
    }

    /// Takes the outcomes, in the order of the target, once all are there.
    pub fn take_outcomes(&self) -> Option<Vec<Outcome>> {
        let mut state = self.lock();
        state.looked = true;
        state.outcomes.take()
    }

    /// Places in the target that have no outcome yet.
    pub fn missing(&self) -> Vec<usize> {
        self.lock().gather.as_ref().map(|gather| gather.missing_places().collect()).unwrap_or_default()
    }

    /// A stream's `n`th outcome, in order of arrival, with its place in the target.
    pub fn nth(&self, n: usize) -> Option<(usize, Outcome)> {
        let mut state = self.lock();
        state.looked = true;
        let found = state.order.get(n).cloned();
        drop(state);
        found.inspect(|(_, outcome)| handed_out(outcome))
    }

    /// The reader of a stream has come to its `n`th outcome: the sender may send as much again, even if nobody looks at it yet.
    pub fn hand_out(&self, n: usize) {
        let outcome = self.lock().order.get(n).map(|(_, outcome)| outcome.clone());
        if let Some(outcome) = outcome {
            handed_out(&outcome);
        }
    }

    /// Lets the senders of a stream be so many bytes ahead of its reader, unless that is 0. Before their first value comes.
    pub fn limit_ahead(&self, bytes: u64) {
        self.ahead.store(bytes, Ordering::Relaxed);
    }

    /// The stream is no longer read: its senders need not wait.
    fn close_account(&self) {
        if let Some(account) = self.account.get() {
            account.close();
        }
    }

    /// As [`Call::nth`], but takes the outcome out.
    pub fn take_nth(&self, n: usize) -> Option<(usize, Outcome)> {
        let mut state = self.lock();
        state.looked = true;
        let (index, place) = state.order.get_mut(n)?;
        let (index, outcome) = (*index, std::mem::replace(place, Outcome::Cancelled));
        if let Some(gather) = &mut state.gather {
            gather.let_go(index);
        } else if let Some(place) = state.outcomes.as_mut().and_then(|all| all.get_mut(index)) {
            *place = Outcome::Cancelled;
        }
        drop(state);
        handed_out(&outcome);
        Some((index, outcome))
    }

    /// Says which actor is about to wait for it.
    pub fn asked_by(&self, actor: ActorId) {
        self.waits.asked_by(actor);
    }

    /// The calling thread is about to wait, until it drops the result (WTS-1).
    pub fn block(&self) -> Waiting<'_> {
        self.waits.block()
    }

    /// Which actor waits for it, and since when, if anybody does.
    fn awaited(&self) -> Option<(ActorId, Instant)> {
        let listens = !self.lock().listeners.is_empty();
        self.waits.look(listens)
    }

    /// How many have not answered, and the first of them.
    pub(crate) fn waited_for(&self, most: usize) -> (usize, Vec<ProcAddr>) {
        let state = self.lock();
        let Some(gather) = state.gather.as_ref() else { return (0, Vec::new()) };
        let places = gather.missing_places().take(most);
        (gather.missing(), places.filter_map(|place| gather.target().place(place)).collect())
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
    pub fn tell(&self, reactor: &Reactor, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        self.listen(reactor, Listener::Loop(Arc::clone(waker)), token, seen);
    }

    /// Has a list get `token` when the call progresses; at once if there is nothing to wait for.
    pub fn note(&self, reactor: &Reactor, list: &Arc<Completion>, token: u64, seen: usize) {
        self.listen(reactor, Listener::List(Arc::clone(list)), token, seen);
    }

    fn listen(&self, reactor: &Reactor, listener: Listener, token: u64, seen: usize) {
        let mut state = self.lock();
        if self.is_done() || self.arrived() > seen {
            drop(state);
            listener.tell(reactor, token);
        } else {
            if state.listeners.is_empty() {
                self.waits.listened();
            }
            state.listeners.push((listener, token, seen));
        }
    }

    /// The list is not to be told any longer.
    pub fn forget(&self, list: &Arc<Completion>) {
        self.lock().listeners.retain(|(listener, _, _)| !listener.is(list));
    }

    /// The first rank that was lost, while others have not answered yet.
    pub fn lost(&self) -> Option<(usize, Outcome)> {
        let mut state = self.lock();
        state.looked = true;
        state.lost.clone()
    }

    /// Changes the state; if that completes the call, `finish` runs before anybody can see it.
    fn update(
        &self,
        reactor: &Reactor,
        finish: impl FnOnce(&mut State),
        change: impl FnOnce(&mut State) -> bool,
    ) -> bool {
        let mut state = self.lock();
        let before = state.progress();
        let complete = change(&mut state);
        if complete {
            if let Some(gather) = state.gather.take() {
                state.outcomes = Some(gather.into_outcomes());
            }
            finish(&mut state);
            if self.timed.load(Ordering::Relaxed) {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                self.finished.store(u64::try_from(now.as_nanos()).unwrap_or(0), Ordering::Relaxed);
            }
            self.done.store(true, Ordering::SeqCst);
        }
        let arrived = state.progress();
        self.arrived.store(arrived, Ordering::SeqCst);
        if complete || arrived > before {
            // The waiter for a later outcome of a stream looks, goes on waiting, and must be woken again.
            let waiters = if complete { std::mem::take(&mut state.waiters) } else { state.waiters.clone() };
            let listeners: Vec<_> =
                state.listeners.extract_if(.., |(_, _, seen)| complete || arrived > *seen).collect();
            drop(state);
            for waiter in waiters {
                waiter.notify(reactor);
            }
            for (listener, token, _) in listeners {
                listener.tell(reactor, token);
            }
        }
        complete
    }

    /// From here on one reply, or one failure, completes the call. Must come before it is sent.
    pub(crate) fn mark_reduced(&self, target: Target, actor: ActorId) {
        let _ = self.reduced.set((target, actor));
    }

    /// Who was called, if the replies of this call are combined on the way up.
    pub(crate) fn reduced(&self) -> Option<&(Target, ActorId)> {
        self.reduced.get()
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.stream
    }

    fn on_outcome(&self, reactor: &Reactor, finish: impl FnOnce(&mut State), index: usize, outcome: Outcome) -> bool {
        let (more, port_ended) = match &outcome {
            Outcome::Replied(reply) if self.stream => match reply.meaning() {
                Meaning::Reply(reply) => (reply.answer == Answer::More, false),
                Meaning::Undeliverable(returned) => (false, returned.port_ended),
                _ => (false, false),
            },
            _ => (false, false),
        };
        self.update(reactor, finish, |state| {
            if self.reduced().is_some() {
                if matches!(&outcome, Outcome::Replied(reply) if is_failure(reply)) {
                    self.failed.store(true, Ordering::SeqCst);
                }
                return state.gather.as_mut().is_some_and(|gather| gather.settle(index, outcome));
            }
            if more {
                if state.gather.as_ref().is_some_and(|gather| gather.is_due(index)) {
                    state.order.push((index, outcome));
                }
                return false;
            }
            if port_ended {
                return state.gather.as_mut().is_some_and(|gather| gather.on_outcome(index, Outcome::Cancelled));
            }
            let stream = self.stream.then(|| outcome.clone());
            let ended = match &outcome {
                Outcome::Lost(ended) => Some(ended),
                Outcome::Deserted(lost) => Some(&lost.ended),
                Outcome::Replied(_) | Outcome::Cancelled => None,
            };
            // The death of a rank that has answered is no loss to this call (GTH-1).
            let due = state.gather.as_ref().is_some_and(|gather| gather.is_due(index));
            if due && !self.stream && ended.is_some_and(|ended| !ended.orderly) {
                state.lost.get_or_insert_with(|| (index, outcome.clone()));
            }
            let Some(gather) = &mut state.gather else { return false };
            if matches!(&outcome, Outcome::Replied(reply) if is_failure(reply)) {
                self.failed.store(true, Ordering::SeqCst);
            }
            let missing = gather.missing();
            let complete = gather.on_outcome(index, outcome);
            if let Some(outcome) = stream.filter(|_| gather.missing() < missing) {
                state.order.push((index, outcome));
            }
            complete
        })
    }

    /// A proc has ended. Returns whether the call was waiting for it, and whether this completes the call.
    fn on_down(
        &self,
        reactor: &Reactor,
        finish: impl Fn(&mut State),
        addr: ProcAddr,
        ended: &Arc<Ended>,
    ) -> (bool, bool) {
        let (places, missing) = {
            let state = self.lock();
            let Some(gather) = state.gather.as_ref() else { return (false, false) };
            (gather.target().places_of(addr).collect::<Vec<_>>(), gather.missing())
        };
        if places.is_empty() {
            return (false, false);
        }
        // The last missing place completes it.
        let complete =
            places.into_iter().any(|index| self.on_outcome(reactor, &finish, index, Outcome::Lost(Arc::clone(ended))));
        let waited = complete || self.lock().gather.as_ref().is_some_and(|gather| gather.missing() < missing);
        (waited, complete)
    }

    /// Changes who holds the port of the call at a place. `None` if that place no longer waits.
    fn on_held<T>(
        &self,
        reactor: &Reactor,
        finish: impl FnOnce(&mut State),
        index: usize,
        change: impl FnOnce(&mut Holders) -> T,
    ) -> Option<T> {
        let mut state = self.lock();
        let gather = state.gather.as_ref().filter(|gather| gather.is_due(index))?;
        let callee = gather.target().place(index)?;
        let holders = state.holders.entry(index).or_insert_with(|| Holders::new(callee));
        let said = change(holders);
        let verdict = holders.verdict();
        drop(state);
        match verdict {
            None => {}
            Some(Verdict::Died(lost)) => {
                self.on_outcome(reactor, finish, index, Outcome::Deserted(lost));
            }
            Some(Verdict::LetGo) => {
                self.on_outcome(reactor, finish, index, Outcome::Replied(Arc::new(end_of_port(callee, self.id))));
            }
        }
        Some(said)
    }

    /// Holders of its ports have died. Returns whether it was waiting for one of them.
    fn on_holders_died(&self, reactor: &Reactor, finish: impl Fn(&mut State), died: impl Fn(&mut Holders)) -> bool {
        let places: Vec<usize> = {
            let state = self.lock();
            // Hardly any call has holders.
            if state.holders.is_empty() {
                return false;
            }
            state.holders.keys().copied().collect()
        };
        let missing = || self.lock().gather.as_ref().map_or(0, Gather::missing);
        let before = missing();
        for place in places {
            self.on_held(reactor, &finish, place, &died);
        }
        missing() < before
    }
}

/// All calls of a process that wait.
#[derive(Debug)]
pub(crate) struct Calls {
    next: AtomicU64,
    shards: [Mutex<HashMap<CallId, Arc<Call>>>; SHARDS],
    /// Calls with combined replies that have failed. Their receivers are still to be told.
    fallen: Mutex<Vec<Arc<Call>>>,
    unseen: Unseen,
}

impl Default for Calls {
    fn default() -> Self {
        Self::telling(Unseen::default())
    }
}

impl Calls {
    /// None yet. Failures that nobody looks at go to `unseen`.
    pub(crate) fn telling(unseen: Unseen) -> Self {
        Self { next: AtomicU64::new(1), shards: Default::default(), fallen: Mutex::default(), unseen }
    }

    fn shard(&self, id: CallId) -> MutexGuard<'_, HashMap<CallId, Arc<Call>>> {
        lock(&self.shards[id as usize % SHARDS])
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

    /// A call is complete, or is about to be seen so.
    fn finish(&self, reactor: &Reactor, call: &Arc<Call>, state: &mut State) {
        self.close(call.id);
        if call.has_failed() {
            self.unseen.failed(reactor, call, state);
        }
    }

    /// Gives a call an outcome. Late ones are dropped.
    pub(crate) fn on_outcome(&self, reactor: &Reactor, id: CallId, index: usize, outcome: Outcome) {
        self.offer(reactor, id, index, outcome);
    }

    /// As [`Calls::on_outcome`]; false if nobody waits for the call.
    pub(crate) fn offer(&self, reactor: &Reactor, id: CallId, index: usize, outcome: Outcome) -> bool {
        let Some(call) = self.shard(id).get(&id).cloned() else { return false };
        let failed = call.reduced().is_some() && !matches!(&outcome, Outcome::Replied(reply) if is_value(reply));
        if call.on_outcome(reactor, |state| self.finish(reactor, &call, state), index, outcome) && failed {
            self.fall(&call);
        }
        true
    }

    /// Completes a call to one receiver. If it was complete already, the outcome is dropped, and this is false.
    pub(crate) fn complete(&self, reactor: &Reactor, call: &Call, outcome: Outcome) -> bool {
        call.on_outcome(reactor, |_| self.close(call.id), 0, outcome)
    }

    fn fall(&self, call: &Arc<Call>) {
        lock(&self.fallen).push(Arc::clone(call));
    }

    /// Calls with combined replies that have failed since the last time.
    pub(crate) fn take_fallen(&self) -> Vec<Arc<Call>> {
        std::mem::take(&mut *lock(&self.fallen))
    }

    /// Nobody can look at the call any longer: what still comes for it is dropped.
    pub(crate) fn abandon(&self, call: &Call) {
        self.close(call.id);
        call.close_account();
    }

    /// The account of a stream that is read here, made by `make` if there is none.
    ///
    /// `make` is given the call's own budget, if it has one.
    pub(crate) fn account(&self, id: CallId, make: impl FnOnce(Option<u64>) -> Account) -> Option<Arc<Account>> {
        let call = self.shard(id).get(&id).filter(|call| call.stream).cloned()?;
        let ahead = Some(call.ahead.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0);
        Some(Arc::clone(call.account.get_or_init(|| Arc::new(make(ahead)))))
    }

    /// The same, if there is one.
    pub(crate) fn known_account(&self, id: CallId) -> Option<Arc<Account>> {
        self.shard(id).get(&id).and_then(|call| call.account.get().cloned())
    }

    /// As [`Calls::abandon`], for a call whose failure is still to be reported.
    pub(crate) fn let_go(&self, reactor: &Reactor, call: &Call) {
        let mut state = call.lock();
        state.dropped = true;
        if call.is_done() && call.has_failed() {
            self.unseen.tell(reactor, call, &mut state);
        }
    }

    /// Notices of failed calls that somebody holds and nobody has looked at.
    pub(crate) fn unseen(&self) -> Vec<Message> {
        self.unseen.left()
    }

    /// A proc has ended: every call that waits for it has its answer. Returns how many there were.
    pub(crate) fn on_down(&self, reactor: &Reactor, addr: ProcAddr, ended: &Arc<Ended>) -> usize {
        let mut lost = 0;
        for call in self.all() {
            let finish = |state: &mut State| self.finish(reactor, &call, state);
            let (waited, complete) = call.on_down(reactor, finish, addr, ended);
            let held = call.on_holders_died(reactor, finish, |holders| holders.died(addr, ended));
            lost += usize::from(waited || held);
            if complete && call.reduced().is_some() {
                self.fall(&call);
            }
        }
        lost
    }

    /// Wakes all threads that wait for calls of this process, for another reason than outcomes.
    pub(crate) fn wake_all(&self, reactor: &Reactor) {
        for call in self.all() {
            for waiter in call.lock().waiters.clone() {
                waiter.notify(reactor);
            }
        }
    }

    /// The caller no longer waits. False if the call was complete.
    pub(crate) fn cancel(&self, reactor: &Reactor, call: &Call) -> bool {
        self.shard(call.id).remove(&call.id);
        let mut cancelled = false;
        call.update(
            reactor,
            |_| {},
            |state| {
                cancelled = state.gather.as_mut().is_some_and(Gather::cancel);
                state.looked |= cancelled;
                cancelled
            },
        );
        call.close_account();
        cancelled
    }

    /// Ends every call that waits: the runtime closes.
    pub(crate) fn fail_all(&self, reactor: &Reactor, ended: &Arc<Ended>) {
        for call in self.all() {
            self.close(call.id);
            let len = call.lock().gather.as_ref().map_or(0, |g| g.target().len());
            for index in 0..len {
                call.on_outcome(
                    reactor,
                    |state| self.finish(reactor, &call, state),
                    index,
                    Outcome::Lost(Arc::clone(ended)),
                );
            }
        }
    }

    /// The target of a call that waits.
    pub(crate) fn target_of(&self, id: CallId) -> Option<Target> {
        let call = self.shard(id).get(&id).cloned()?;
        call.lock().gather.as_ref().map(|gather| gather.target().clone())
    }

    /// A whole host has died: every call that waits for somebody there has its answer.
    pub(crate) fn on_host_down(&self, reactor: &Reactor, host: HostNo, ended: &Arc<Ended>) {
        for call in self.all() {
            self.lose_host(reactor, &call, host, ended);
            let finish = |state: &mut State| self.finish(reactor, &call, state);
            call.on_holders_died(reactor, finish, |holders| holders.host_died(host, ended));
        }
    }

    /// The answers that one call expects from a host will not come. Other calls' may.
    pub(crate) fn on_host_missing(&self, reactor: &Reactor, id: CallId, host: HostNo, ended: &Arc<Ended>) {
        let call = self.shard(id).get(&id).cloned();
        if let Some(call) = call {
            self.lose_host(reactor, &call, host, ended);
        }
    }

    fn lose_host(&self, reactor: &Reactor, call: &Call, host: HostNo, ended: &Arc<Ended>) {
        let there: Vec<usize> = {
            let state = call.lock();
            let Some(gather) = state.gather.as_ref() else { return };
            let due = gather.missing_places();
            due.filter(|place| gather.target().place(*place).is_some_and(|addr| addr.host == host)).collect()
        };
        for index in there {
            self.offer(reactor, call.id, index, Outcome::Lost(Arc::clone(ended)));
        }
    }

    /// Changes who holds the port of a call. `None` if nobody waits for it.
    pub(crate) fn on_held<T>(
        &self,
        reactor: &Reactor,
        id: CallId,
        index: usize,
        change: impl FnOnce(&mut Holders) -> T,
    ) -> Option<T> {
        let call = self.shard(id).get(&id).cloned()?;
        call.on_held(reactor, |state| self.finish(reactor, &call, state), index, change)
    }

    /// The calls that somebody waits for: since when, and on behalf of which actor.
    pub(crate) fn awaited(&self) -> Vec<(Instant, ActorId, Arc<Call>)> {
        let all = self.all().into_iter();
        all.filter_map(|call| call.awaited().map(|(by, since)| (since, by, call))).collect()
    }

    /// How many calls wait.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    fn all(&self) -> Vec<Arc<Call>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(lock(shard).values().cloned());
        }
        all
    }
}
