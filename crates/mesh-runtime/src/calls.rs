//! Calls that wait for their replies.

use crate::call::{Call, Outcome, State, is_value};
use crate::locks::lock;
use crate::logs::Looks;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::reactor::Reactor;
use crate::unseen::Unseen;
use mesh_proto::{ActorId, CallId, EndReason, Ended, Gather, Holders, HostNo, ProcAddr, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

const SHARDS: usize = 8;

/// The outcome of a call to a process that is gone, or never existed.
pub(crate) fn lost(reason: EndReason) -> Outcome {
    Outcome::Lost(Arc::new(Ended { orderly: true, ..Ended::unmade(reason) }))
}

/// All waiting calls of a process.
#[derive(Debug)]
pub(crate) struct Calls {
    next: AtomicU64,
    shards: [Mutex<HashMap<CallId, Arc<Call>>>; SHARDS],
    /// Failed calls with combined replies, whose receivers are still to be told.
    fallen: Mutex<Vec<Arc<Call>>>,
    unseen: Unseen,
    looks: Looks,
}

impl Default for Calls {
    fn default() -> Self {
        Self::telling(Unseen::default())
    }
}

impl Calls {
    /// No calls. Failures that nobody looks at go to `unseen`.
    pub(crate) fn telling(unseen: Unseen) -> Self {
        Self {
            next: AtomicU64::new(1),
            shards: Default::default(),
            fallen: Mutex::default(),
            unseen,
            looks: Looks::default(),
        }
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

    /// The looks for lines of processes whose calls these are (LOG-8).
    pub(crate) fn looks(&self) -> &Looks {
        &self.looks
    }

    /// A call is complete, or is about to be seen as such.
    fn finish(&self, reactor: &Reactor, call: &Arc<Call>, state: &mut State) {
        self.close(call.id);
        call.note_looks(self.looks.begun());
        if call.has_failed() {
            self.unseen.failed(reactor, call, state);
        }
    }

    /// Gives a call an outcome. Late ones are dropped.
    pub(crate) fn on_outcome(&self, reactor: &Reactor, id: CallId, index: usize, outcome: Outcome) {
        self.offer(reactor, id, index, outcome);
    }

    /// Like [`Calls::on_outcome`]. False if nobody waits for the call.
    pub(crate) fn offer(&self, reactor: &Reactor, id: CallId, index: usize, outcome: Outcome) -> bool {
        let Some(call) = self.shard(id).get(&id).cloned() else { return false };
        let failed = call.reduced().is_some() && !matches!(&outcome, Outcome::Replied(reply) if is_value(reply));
        if call.on_outcome(reactor, |state| self.finish(reactor, &call, state), index, outcome) && failed {
            self.fall(&call);
        }
        true
    }

    /// Completes a call to one receiver. False if it was already complete; then the outcome is dropped.
    pub(crate) fn complete(&self, reactor: &Reactor, call: &Call, outcome: Outcome) -> bool {
        let finish = |_: &mut State| {
            self.close(call.id);
            call.note_looks(self.looks.begun());
        };
        call.on_outcome(reactor, finish, 0, outcome)
    }

    fn fall(&self, call: &Arc<Call>) {
        lock(&self.fallen).push(Arc::clone(call));
    }

    /// Calls with combined replies that have failed since the last call of this.
    pub(crate) fn take_fallen(&self) -> Vec<Arc<Call>> {
        std::mem::take(&mut *lock(&self.fallen))
    }

    /// Nobody can look at the call any longer: what still comes for it is dropped.
    pub(crate) fn abandon(&self, call: &Call) {
        self.close(call.id);
        call.close_account();
    }

    /// The account of a stream that is read here, made by `make` if there is none yet.
    ///
    /// `make` gets the call's own budget, if it has one.
    pub(crate) fn account(&self, id: CallId, make: impl FnOnce(Option<u64>) -> Account) -> Option<Arc<Account>> {
        let call = self.shard(id).get(&id).filter(|call| call.stream).cloned()?;
        let ahead = Some(call.ahead.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0);
        Some(Arc::clone(call.account.get_or_init(|| Arc::new(make(ahead)))))
    }

    /// Like [`Calls::account`], without making one.
    pub(crate) fn known_account(&self, id: CallId) -> Option<Arc<Account>> {
        self.shard(id).get(&id).and_then(|call| call.account.get().cloned())
    }

    /// Like [`Calls::abandon`], for a call whose failure is still to be reported.
    pub(crate) fn let_go(&self, reactor: &Reactor, call: &Call) {
        let mut state = call.lock();
        state.dropped = true;
        if call.is_done() && call.has_failed() {
            self.unseen.tell(reactor, call, &mut state);
        }
    }

    /// Notices of failed calls that are still held, and that nobody has looked at.
    pub(crate) fn unseen(&self) -> Vec<Message> {
        self.unseen.left()
    }

    /// A proc has ended, which answers every call that waits for it. Returns how many did.
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

    /// Wakes all threads that wait for calls of this process, for a reason other than outcomes.
    pub(crate) fn wake_all(&self, reactor: &Reactor) {
        for call in self.all() {
            let waiters = call.lock().waiters.clone();
            for waiter in waiters {
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

    /// Ends every waiting call: the runtime is closing.
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

    /// The target of a waiting call.
    pub(crate) fn target_of(&self, id: CallId) -> Option<Target> {
        let call = self.shard(id).get(&id).cloned()?;
        call.lock().gather.as_ref().map(|gather| gather.target().clone())
    }

    /// A whole host has died, which answers every call that waits for someone there.
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

    /// Changes the holders of a call's port. `None` if nobody waits for it.
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
