//! One call: who has answered it, who waits for it, and how it ended.

use crate::completion::{Completion, Listener};
use crate::locks::lock;
use crate::logs::Looks;
use crate::loop_waker::LoopWaker;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use crate::waits::{Waiting, Waits};
use mesh_proto::control::Undeliverable;
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::{Answer, Meaning, Reply};
use mesh_proto::{ActorId, CallId, Ended, Gather, Header, Holders, HostNo, ProcAddr, Target, Undelivered, Verdict};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The outcome of a call at one rank.
pub type Outcome = mesh_proto::Outcome<Arc<Message>>;

/// What was called, in words for people.
#[derive(Debug)]
pub struct Callee {
    /// The actor's number.
    pub id: ActorId,
    /// The actor's name.
    pub actor: String,
    /// The endpoint's name.
    pub endpoint: String,
    /// The procs that it is called on.
    pub target: Arc<Target>,
}

/// Whether a reply is a failure that is reported only to the caller.
pub(crate) fn is_failure(reply: &Message) -> bool {
    match reply.meaning() {
        Meaning::Reply(reply) => reply.answer == Answer::Raised,
        Meaning::Undeliverable(_) => true,
        _ => false,
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) gather: Option<Gather<Arc<Message>>>,
    pub(crate) outcomes: Option<Vec<Outcome>>,
    /// Somebody has looked at an outcome or has given up the call, so a failure need not be reported (UNS-1).
    pub(crate) looked: bool,
    /// Nobody can look at the outcomes any longer.
    pub(crate) dropped: bool,
    /// Places in the order in which their outcomes came; only for streams.
    order: Vec<(usize, Outcome)>,
    /// The first rank whose proc died, except in streams. The waiter need not wait for the others.
    lost: Option<(usize, Outcome)>,
    /// The hosts whose processes have printed something before they answered, or may have before they ended.
    printed: HostSet,
    /// By place: the holders of a port that was handed on.
    holders: BTreeMap<usize, Holders>,
    pub(crate) waiters: Vec<Arc<Waiter>>,
    /// Each with a token, and how many outcomes it has seen. They are told of more.
    listeners: Vec<(Listener, u64, usize)>,
}

impl State {
    /// Counts what may wake a waiter before all outcomes are there: a stream's outcomes, or a loss.
    fn progress(&self) -> usize {
        self.order.len() + usize::from(self.lost.is_some())
    }
}

/// Who gave an outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) addr: ProcAddr,
    /// Its host has reported that it had printed something.
    pub(crate) printed: bool,
    /// The outcome is quiet (LOG-9).
    pub(crate) quiet: bool,
}

/// Whether a frame has the values of all that were called.
pub(crate) fn is_combined(header: &Header) -> bool {
    Reply::read(header).is_ok_and(|reply| reply.answer == Answer::Combined)
}

pub(crate) fn is_value(reply: &Message) -> bool {
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
    pub(crate) stream: bool,
    /// The target, if the replies are combined on the way up.
    reduced: OnceLock<(Target, ActorId)>,
    /// The callee, if a failure that nobody looks at must be reported.
    pub(crate) callee: OnceLock<Arc<Callee>>,
    done: AtomicBool,
    /// One of the outcomes is a failure that nobody else is told of.
    failed: AtomicBool,
    /// Outcomes that a stream can hand out so far.
    arrived: AtomicUsize,
    /// Whether to note when the call completes, and when it did, in nanoseconds since the epoch.
    timed: AtomicBool,
    finished: AtomicU64,
    /// How many bytes the senders of a stream may be ahead of its reader; 0 for the process's default.
    pub(crate) ahead: AtomicU64,
    /// The account with the senders of a stream, made for the first value that they count.
    pub(crate) account: OnceLock<Arc<Account>>,
    /// How many looks for lines had begun when it was complete.
    looks: AtomicU64,
    /// An outcome is not quiet (LOG-9).
    loud: AtomicBool,
    /// There may be hosts in [`State::printed`].
    printed: AtomicBool,
    waits: Waits,
    state: Mutex<State>,
}

impl Call {
    pub(crate) fn new(id: CallId, target: Target, stream: bool) -> Self {
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
            looks: AtomicU64::new(u64::MAX),
            loud: AtomicBool::new(false),
            printed: AtomicBool::new(false),
            waits: Waits::default(),
            state: Mutex::new(State {
                gather: (!empty).then_some(gather),
                outcomes: empty.then(Vec::new),
                looked: false,
                dropped: false,
                order: Vec::new(),
                lost: None,
                printed: HostSet::default(),
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

    /// Sets who was called, so that a failure that nobody looks at is reported.
    pub fn describe(&self, callee: &Arc<Callee>) {
        let _ = self.callee.set(Arc::clone(callee));
    }

    /// The waiter was interrupted: no failure of the call is reported.
    pub fn look_away(&self) {
        self.lock().looked = true;
    }

    /// How many outcomes a stream has so far.
    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    /// Makes the call note when it completes.
    pub fn keep_time(&self) {
        // It has been sent, and may have been answered since: then it completed just now.
        let _state = self.lock();
        self.timed.store(true, Ordering::Relaxed);
        if self.done.load(Ordering::SeqCst) {
            self.note_time();
        }
    }

    fn note_time(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.finished.store(u64::try_from(now.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }

    /// When it completed, if [`Call::keep_time`] was called before.
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

    /// The reader of a stream reached its `n`th outcome: the sender may send as much again, even before a look at it.
    pub fn hand_out(&self, n: usize) {
        let outcome = self.lock().order.get(n).map(|(_, outcome)| outcome.clone());
        if let Some(outcome) = outcome {
            handed_out(&outcome);
        }
    }

    /// Lets a stream's senders be this many bytes ahead of its reader, unless 0. Call before their first value comes.
    pub fn limit_ahead(&self, bytes: u64) {
        self.ahead.store(bytes, Ordering::Relaxed);
    }

    /// The stream is no longer read: its senders need not wait.
    pub(crate) fn close_account(&self) {
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

    fn note_printed(&self, state: &mut State, index: usize, outcome: &Outcome) {
        if !matches!(outcome, Outcome::Replied(reply) if reply.header().is_quiet()) {
            self.loud.store(true, Ordering::SeqCst);
        }
        let called = state.gather.as_ref().map(Gather::target);
        let hosts = match outcome {
            Outcome::Replied(reply) if !reply.header().has_printed() => None,
            // Some of those whose values are in it have printed something.
            Outcome::Replied(reply) if is_combined(reply.header()) => called.map(Target::hosts),
            Outcome::Replied(reply) => Some(HostSet::one(reply.header().src.host)),
            Outcome::Lost(_) => called.and_then(|called| Some(HostSet::one(called.place(index)?.host))),
            Outcome::Deserted(_) | Outcome::Cancelled => None,
        };
        if let Some(hosts) = hosts {
            state.printed.extend_by(&hosts);
            self.printed.store(true, Ordering::SeqCst);
        }
    }

    /// The hosts whose processes have printed something before they answered, other than `here`.
    pub(crate) fn printed(&self, here: Option<HostNo>) -> HostSet {
        let mut hosts = self.lock().printed.clone();
        if let Some(here) = here {
            hosts.remove(here);
        }
        hosts
    }

    /// Whether there are such hosts.
    pub(crate) fn has_printed(&self, here: Option<HostNo>) -> bool {
        self.printed.load(Ordering::SeqCst) && self.lock().printed.iter().any(|host| Some(host) != here)
    }

    /// Whether all its outcomes are quiet (LOG-9).
    pub(crate) fn is_quiet(&self) -> bool {
        !self.loud.load(Ordering::SeqCst)
    }

    /// It is complete, after so many looks for lines had begun. Comes before anybody can see that.
    pub(crate) fn note_looks(&self, begun: u64) {
        self.looks.store(begun, Ordering::SeqCst);
    }

    /// Whether there was a look for lines since it is complete, which found nothing.
    pub(crate) fn was_looked_after(&self, looks: &Looks) -> bool {
        looks.have_served(self.looks.load(Ordering::SeqCst))
    }

    /// Who gave the `n`th outcome of a stream, or the only one, if it is a reply.
    pub(crate) fn answered(&self, n: Option<usize>) -> Option<Origin> {
        let state = self.lock();
        let outcome = match n {
            Some(n) => state.order.get(n).map(|(_, outcome)| outcome),
            None => state.outcomes.as_ref().and_then(|all| all.first()),
        };
        match outcome? {
            Outcome::Replied(reply) => {
                let header = reply.header();
                Some(Origin { addr: header.src, printed: header.has_printed(), quiet: header.is_quiet() })
            }
            _ => None,
        }
    }

    /// Sets which actor is about to wait for it.
    pub fn asked_by(&self, actor: ActorId) {
        self.waits.asked_by(actor);
    }

    /// Notes that the calling thread waits, until it drops the result (WTS-1).
    pub fn block(&self) -> Waiting<'_> {
        self.waits.block()
    }

    /// Which actor waits for it, and since when, if any does.
    pub(crate) fn awaited(&self) -> Option<(ActorId, Instant)> {
        let listens = !self.lock().listeners.is_empty();
        self.waits.look(listens)
    }

    /// How many have not answered, and up to `most` of them.
    pub(crate) fn waited_for(&self, most: usize) -> (usize, Vec<ProcAddr>) {
        let state = self.lock();
        let Some(gather) = state.gather.as_ref() else { return (0, Vec::new()) };
        let places = gather.missing_places().take(most);
        (gather.missing(), places.filter_map(|place| gather.target().place(place)).collect())
    }

    /// Makes progress of the call wake the calling thread.
    pub(crate) fn expect(&self) {
        let me = Waiter::current();
        let mut state = self.lock();
        if !state.waiters.iter().any(|w| Arc::ptr_eq(w, &me)) {
            state.waiters.push(me);
        }
    }

    /// Makes progress of the call notify an event loop; at once if there is nothing to wait for.
    pub fn tell(&self, reactor: &Reactor, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        self.listen(reactor, Listener::Loop(Arc::clone(waker)), token, seen);
    }

    /// Makes progress of the call add `token` to a list; at once if there is nothing to wait for.
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

    /// Stops telling a list.
    pub fn forget(&self, list: &Arc<Completion>) {
        self.lock().listeners.retain(|(listener, _, _)| !listener.is(list));
    }

    /// The first rank that was lost, while others have not answered yet.
    pub fn lost(&self) -> Option<(usize, Outcome)> {
        let mut state = self.lock();
        state.looked = true;
        state.lost.clone()
    }

    /// Changes the state. If that completes the call, `finish` runs before anybody can see it.
    pub(crate) fn update(
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
                self.note_time();
            }
            self.done.store(true, Ordering::SeqCst);
        }
        let arrived = state.progress();
        self.arrived.store(arrived, Ordering::SeqCst);
        if complete || arrived > before {
            // The waiter for a later outcome of a stream looks, continues to wait, and must be woken again.
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

    /// The target, if the replies of this call are combined on the way up.
    pub(crate) fn reduced(&self) -> Option<&(Target, ActorId)> {
        self.reduced.get()
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.stream
    }

    pub(crate) fn on_outcome(
        &self,
        reactor: &Reactor,
        finish: impl FnOnce(&mut State),
        index: usize,
        outcome: Outcome,
    ) -> bool {
        let (more, port_ended) = match &outcome {
            Outcome::Replied(reply) if self.stream => match reply.meaning() {
                Meaning::Reply(reply) => (reply.answer == Answer::More, false),
                Meaning::Undeliverable(returned) => (false, returned.port_ended),
                _ => (false, false),
            },
            _ => (false, false),
        };
        self.update(reactor, finish, |state| {
            self.note_printed(state, index, &outcome);
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
    pub(crate) fn on_down(
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

    /// Changes the holders of the call's port at a place. `None` if that place no longer waits.
    pub(crate) fn on_held<T>(
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

    /// Holders of its ports died. Returns whether it was waiting for one of them.
    pub(crate) fn on_holders_died(
        &self,
        reactor: &Reactor,
        finish: impl Fn(&mut State),
        died: impl Fn(&mut Holders),
    ) -> bool {
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
