//! Flow control at both ends: the sender's meters and the receiver's mailboxes around `mesh_proto`'s state machines.
//!
//! A sender has one [`Meter`] for each mailbox that it sends to, through whatever endpoints and slices. A mailbox keeps
//! one ledger. Each message that waits in it or is being handled holds a [`Charge`], which gives its bytes back when it
//! is dropped, for whatever reason.

use crate::locks::lock;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use crate::waits::{Blocked, InRoom};
use mesh_proto::{ActorId, Admission, Credit, Ledger, Place, ProcAddr};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

const SHARDS: usize = 8;
/// A shard with fewer meters than this is not swept.
const MANY: usize = 256;

#[derive(Debug, Default)]
struct State {
    flow: mesh_proto::Meter,
    waiters: Vec<Arc<Waiter>>,
    /// A message of the backlog waits for the next change (BKL-3).
    marked: bool,
}

/// What this process has under way to one mailbox.
#[derive(Debug)]
pub struct Meter {
    addr: ProcAddr,
    mailbox: ActorId,
    state: Mutex<State>,
    pub(crate) blocked: Blocked,
}

impl Meter {
    /// True if a message of the backlog was waiting for this.
    fn change(&self, reactor: &Reactor, change: impl FnOnce(&mut mesh_proto::Meter)) -> bool {
        let mut state = lock(&self.state);
        change(&mut state.flow);
        let waiters = std::mem::take(&mut state.waiters);
        let marked = std::mem::take(&mut state.marked);
        drop(state);
        for waiter in waiters {
            waiter.notify(reactor);
        }
        marked
    }

    /// Makes the next change notify the backlog. False if a message of `cost` bytes would now be let through.
    pub(crate) fn mark(&self, cost: u64) -> bool {
        let mut state = lock(&self.state);
        let full = !state.flow.has_room(cost);
        state.marked |= full;
        full
    }

    /// The process that the mailbox is in.
    pub fn addr(&self) -> ProcAddr {
        self.addr
    }

    /// The mailbox's id there.
    pub(crate) fn mailbox(&self) -> ActorId {
        self.mailbox
    }

    /// If a message of `cost` bytes would not be let through: the bytes sent and not given back, and how many may be.
    pub fn full(&self, cost: u64) -> Option<(u64, u64)> {
        let flow = lock(&self.state).flow;
        (!flow.has_room(cost)).then(|| (flow.outstanding(), flow.window()))
    }

    /// The bytes sent and not given back, and how many may be.
    pub fn level(&self) -> (u64, u64) {
        let flow = lock(&self.state).flow;
        (flow.outstanding(), flow.window())
    }

    #[cfg(test)]
    pub(crate) fn outstanding(&self) -> u64 {
        lock(&self.state).flow.outstanding()
    }

    /// Whether a message of `cost` bytes would be let through.
    pub fn has_room(&self, cost: u64) -> bool {
        lock(&self.state).flow.has_room(cost)
    }

    /// Notes that a thread waits for room on behalf of an actor (0 for none), until the result is dropped.
    pub fn block(&self, actor: ActorId) -> InRoom<'_> {
        self.blocked.block(actor)
    }

    pub(crate) fn admit(&self, cost: u64) -> Admission {
        lock(&self.state).flow.admit(cost)
    }

    /// Makes any change wake the calling thread.
    pub(crate) fn expect(&self) {
        let me = Waiter::current();
        let mut state = lock(&self.state);
        if !state.waiters.iter().any(|waiter| Arc::ptr_eq(waiter, &me)) {
            state.waiters.push(me);
        }
    }
}

type Shard = HashMap<(ProcAddr, ActorId), Arc<Meter>>;

/// All meters of a process.
#[derive(Debug)]
pub(crate) struct Meters {
    reactor: Arc<Reactor>,
    shards: [Mutex<Shard>; SHARDS],
    /// The size at which each shard is swept.
    sweep_at: [AtomicUsize; SHARDS],
    /// Changed meters that messages of the backlog wait for.
    changed: Mutex<Vec<Place>>,
}

impl Meters {
    pub(crate) fn new(reactor: &Arc<Reactor>) -> Self {
        let sweep_at = std::array::from_fn(|_| AtomicUsize::new(MANY));
        Self { reactor: Arc::clone(reactor), shards: Default::default(), sweep_at, changed: Mutex::default() }
    }

    fn shard(&self, addr: ProcAddr, mailbox: ActorId) -> (usize, MutexGuard<'_, Shard>) {
        let index = (addr.rank as usize ^ mailbox as usize) % SHARDS;
        (index, lock(&self.shards[index]))
    }

    /// The meter of a mailbox, and unused meters whose mailboxes should be asked for what they have not given back, so
    /// that these meters can be forgotten.
    pub(crate) fn of(&self, addr: ProcAddr, mailbox: ActorId) -> (Arc<Meter>, Vec<Arc<Meter>>) {
        let (index, mut shard) = self.shard(addr, mailbox);
        let mut ask = Vec::new();
        let sweep_at = &self.sweep_at[index];
        if shard.len() >= sweep_at.load(Ordering::Relaxed) {
            shard.retain(|_, meter| {
                if Arc::strong_count(meter) > 1 {
                    return true;
                }
                let flow = lock(&meter.state).flow;
                // A new meter begins with the small window, so the mailbox must have that too.
                let settled = flow.outstanding() == 0 && flow.window() <= mesh_proto::INITIAL_WINDOW;
                if !settled && !flow.has_ended() {
                    ask.push(Arc::clone(meter));
                }
                !settled && !flow.has_ended()
            });
            sweep_at.store(MANY.max(2 * shard.len()), Ordering::Relaxed);
        }
        let meter = shard
            .entry((addr, mailbox))
            .or_insert_with(|| Arc::new(Meter { addr, mailbox, state: Mutex::default(), blocked: Blocked::default() }));
        (Arc::clone(meter), ask)
    }

    fn change(&self, meter: &Meter, change: impl FnOnce(&mut mesh_proto::Meter)) {
        if meter.change(&self.reactor, change) {
            lock(&self.changed).push((meter.addr, meter.mailbox));
            self.reactor.ring_io();
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Meter>> {
        self.shards.iter().flat_map(|shard| lock(shard).values().cloned().collect::<Vec<_>>()).collect()
    }

    /// The meters changed since the last call, for which messages of the backlog wait.
    pub(crate) fn take_changed(&self) -> Vec<Place> {
        std::mem::take(&mut *lock(&self.changed))
    }

    /// Lets a message of `cost` bytes through to all of these mailboxes, or to none. True if the message is counted.
    ///
    /// # Errors
    /// The index of a meter that is full.
    pub(crate) fn admit_all(&self, meters: &[Arc<Meter>], cost: u64) -> Result<bool, usize> {
        let mut counted = false;
        for (index, meter) in meters.iter().enumerate() {
            match meter.admit(cost) {
                Admission::Counted => counted = true,
                Admission::Free => {}
                Admission::Full => {
                    // Two senders that each keep what they have and wait for what the other has would wait forever.
                    self.refund_all(&meters[..index], cost);
                    return Err(index);
                }
            }
        }
        Ok(counted)
    }

    /// Gives back what these have counted for a message that is not sent after all.
    pub(crate) fn refund_all(&self, meters: &[Arc<Meter>], cost: u64) {
        for meter in meters {
            self.change(meter, |flow| flow.refund(cost));
        }
    }

    /// Nothing more is sent there. The meter is kept if something waits for it.
    pub(crate) fn forget(&self, addr: ProcAddr, mailbox: ActorId) {
        let (_, mut shard) = self.shard(addr, mailbox);
        if shard.get(&(addr, mailbox)).is_some_and(|meter| !lock(&meter.state).marked) {
            shard.remove(&(addr, mailbox));
        }
    }

    /// A mailbox gives back what it has handled, or ends.
    pub(crate) fn on_credit(&self, addr: ProcAddr, mailbox: ActorId, credit: Credit) {
        let (_, mut shard) = self.shard(addr, mailbox);
        let meter = if credit.last { shard.remove(&(addr, mailbox)) } else { shard.get(&(addr, mailbox)).cloned() };
        drop(shard);
        if let Some(meter) = meter {
            self.change(&meter, |flow| flow.on_credit(credit));
        }
    }

    /// Processes have ended, and their mailboxes with them.
    pub(crate) fn end(&self, hit: impl Fn(ProcAddr) -> bool) {
        for shard in &self.shards {
            let mut ended = Vec::new();
            lock(shard).retain(|(at, _), meter| {
                let ends = hit(*at);
                if ends {
                    ended.push(Arc::clone(meter));
                }
                !ends
            });
            for meter in ended {
                self.change(&meter, mesh_proto::Meter::end);
            }
        }
    }

    /// The number of meters.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }
}

/// Delivers credits to senders.
pub(crate) trait CreditPost: std::fmt::Debug + Send + Sync {
    fn send_credit(&self, mailbox: ActorId, sender: ProcAddr, credit: Credit);
}

/// The receiver's half: one mailbox's ledger, and what delivers its credits to senders.
#[derive(Debug)]
pub(crate) struct MailboxCredits {
    id: ActorId,
    ledger: Mutex<Ledger>,
    /// None for a mailbox whose messages are not counted.
    post: Option<Weak<dyn CreditPost>>,
}

impl MailboxCredits {
    pub(crate) fn new(id: ActorId, budget: u64, post: Option<Weak<dyn CreditPost>>) -> Self {
        Self { id, ledger: Mutex::new(Ledger::new(budget)), post }
    }

    pub(crate) fn id(&self) -> ActorId {
        self.id
    }

    /// Credits are sent under the ledger's lock: they must arrive in the order in which it gave them.
    fn tell(&self) -> impl FnMut(ProcAddr, Credit) {
        |sender, credit| {
            if let Some(post) = self.post.as_ref().and_then(Weak::upgrade) {
                post.send_credit(self.id, sender, credit);
            }
        }
    }

    /// Accounts for an arrived message until the returned value is dropped.
    pub(crate) fn charge(self: &Arc<Self>, sender: ProcAddr, cost: u64) -> Charge {
        lock(&self.ledger).on_arrived(sender, cost, self.tell());
        Charge { mailbox: Arc::clone(self), sender, cost }
    }

    pub(crate) fn on_question(&self, sender: ProcAddr) {
        lock(&self.ledger).on_question(sender, self.tell());
    }

    pub(crate) fn close(&self) {
        lock(&self.ledger).close(self.tell());
    }
}

/// The bytes of one message in its mailbox; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    mailbox: Arc<MailboxCredits>,
    sender: ProcAddr,
    cost: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        lock(&self.mailbox.ledger).on_handled(self.sender, self.cost, self.mailbox.tell());
    }
}
