//! Ports: where values for one receiver arrive, and what their senders hold.
//!
//! PRT-1: a value that has arrived is handed out once, in the order of arrival; one that nobody looked at, because the
//! receive was given up, is the next one again.
//! PRT-2: a sender whose receiver is gone hears of it: at once where that is known, else with the answer to what it sent.
//! PRT-3: whoever sends the port of a call on tells the caller to whom, and whoever lets go of one that came tells that.
//! PRT-4: values that have come and that nobody has asked for are within the port's budget: their senders count them, and
//! hear of each once a receive has it. What receives have been given is their maker's.

use crate::calls::{Call, Calls, Outcome};
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::reactor::Reactor;
use crate::runtime::{Runtime, STREAM};
use mesh_proto::control::{Closed, PortAddr};
use mesh_proto::{ActorId, CallId, HostNo, PortEnd, ProcAddr, Target, Ticket};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One wait for one value.
#[derive(Debug)]
pub struct Receive {
    /// Completes with the value; cancelled where none can come any more.
    pub call: Arc<Call>,
    /// The value's place in the order of arrival, once it is there.
    place: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    /// Values that nobody waits for, by their place in the order of arrival.
    values: BTreeMap<u64, Arc<Message>>,
    waiting: VecDeque<Arc<Receive>>,
    next: u64,
    /// No more is taken in; what is there can still be had.
    shut: bool,
}

/// What became of a value at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is in.
    In,
    /// It is in, and the port takes no more.
    Last,
    /// The port takes no more.
    Refused,
}

/// The receiving end of a port, as the runtime finds it.
#[derive(Debug)]
pub(crate) struct Inlet {
    pub(crate) id: u64,
    once: bool,
    queue: Mutex<Queue>,
    /// The account with its senders.
    pub(crate) account: Arc<Account>,
}

impl Inlet {
    pub(crate) fn new(once: bool, account: Account) -> Self {
        Self { id: account.id(), once, queue: Mutex::default(), account: Arc::new(account) }
    }

    /// Takes a value in, or drops it where it takes no more.
    pub(crate) fn push(&self, reactor: &Reactor, calls: &Calls, mut message: Message) -> Taken {
        message.charge_to(&self.account);
        let mut queue = lock(&self.queue);
        if queue.shut {
            return Taken::Refused;
        }
        let place = queue.next;
        queue.next += 1;
        queue.values.insert(place, Arc::new(message));
        queue.shut = self.once;
        settle(queue, reactor, calls);
        if self.once { Taken::Last } else { Taken::In }
    }

    /// Has `receive` completed by the next value.
    pub(crate) fn receive(&self, reactor: &Reactor, calls: &Calls, receive: &Arc<Receive>) {
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(Arc::clone(receive));
        settle(queue, reactor, calls);
    }

    /// Nobody waits for `receive` any more. The value, if it had come, is the next one again (PRT-1).
    fn give_up(&self, reactor: &Reactor, calls: &Calls, receive: &Arc<Receive>) {
        calls.cancel(reactor, &receive.call);
        let mut queue = lock(&self.queue);
        queue.waiting.retain(|one| !Arc::ptr_eq(one, receive));
        if let Some(Outcome::Replied(message)) = receive.call.take_outcomes().and_then(|all| all.into_iter().next()) {
            queue.values.insert(receive.place.load(Ordering::SeqCst), message);
            settle(queue, reactor, calls);
        }
    }

    /// Takes no more in; what nobody has received comes back.
    pub(crate) fn close(&self, reactor: &Reactor, calls: &Calls) -> Vec<Arc<Message>> {
        let mut queue = lock(&self.queue);
        queue.shut = true;
        let left = std::mem::take(&mut queue.values).into_values().collect();
        settle(queue, reactor, calls);
        left
    }

    fn is_over(&self) -> bool {
        let queue = lock(&self.queue);
        queue.shut && queue.values.is_empty()
    }

    fn len(&self) -> usize {
        lock(&self.queue).values.len()
    }
}

/// Hands values to those who wait, and tells their senders (PRT-4).
fn settle(mut queue: MutexGuard<'_, Queue>, reactor: &Reactor, calls: &Calls) {
    let given = match_up(&mut queue, reactor, calls);
    drop(queue);
    given.iter().for_each(|message| message.done());
}

/// Hands values to those who wait. Under the queue's lock, so that both keep their order. Returns what was handed out.
fn match_up(queue: &mut Queue, reactor: &Reactor, calls: &Calls) -> Vec<Arc<Message>> {
    let mut given = Vec::new();
    while let Some(receive) = queue.waiting.pop_front() {
        if receive.call.is_done() {
            continue; // Given up meanwhile.
        }
        let Some((place, message)) = queue.values.pop_first() else {
            if queue.shut {
                calls.cancel(reactor, &receive.call);
                continue;
            }
            queue.waiting.push_front(receive);
            break;
        };
        receive.place.store(place, Ordering::SeqCst);
        if calls.complete(reactor, &receive.call, Outcome::Replied(Arc::clone(&message))) {
            given.push(message);
        } else {
            // Given up just now.
            queue.values.insert(place, message);
        }
    }
    given
}

/// One port, for all who send to it in this process.
#[derive(Debug, Default)]
pub(crate) struct Known {
    closed: OnceLock<PortEnd>,
    /// A port for one message has had it.
    pub(crate) used: AtomicBool,
    /// How often it was sent on: somebody else may answer too.
    pub(crate) handed_on: AtomicUsize,
    /// Of the port of a call: under what it came here, each once however often it is unpickled.
    tickets: Mutex<Vec<Ticket>>,
    /// Its end has been told.
    pub(crate) ended: AtomicBool,
}

impl Known {
    pub(crate) fn hold(&self, ticket: Ticket) {
        let mut tickets = lock(&self.tickets);
        if !tickets.contains(&ticket) {
            tickets.push(ticket);
        }
    }

    fn close(&self, why: PortEnd) {
        // The first reason counts.
        let _ = self.closed.set(why);
    }

    pub(crate) fn closed(&self) -> Option<PortEnd> {
        self.closed.get().copied()
    }
}

/// All ports of a process: those it receives at, and those it sends to.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    inlets: Mutex<HashMap<u64, Arc<Inlet>>>,
    outlets: Mutex<HashMap<PortAddr, Weak<Known>>>,
}

impl Ports {
    pub(crate) fn len(&self) -> usize {
        let inlets = lock(&self.inlets).len();
        inlets + lock(&self.outlets).len()
    }

    pub(crate) fn open(&self, inlet: &Arc<Inlet>) {
        lock(&self.inlets).insert(inlet.id, Arc::clone(inlet));
    }

    pub(crate) fn inlet(&self, id: u64) -> Option<Arc<Inlet>> {
        lock(&self.inlets).get(&id).cloned()
    }

    pub(crate) fn shut(&self, id: u64) {
        lock(&self.inlets).remove(&id);
    }

    pub(crate) fn known(&self, address: PortAddr) -> Arc<Known> {
        let mut outlets = lock(&self.outlets);
        if let Some(known) = outlets.get(&address).and_then(Weak::upgrade) {
            return known;
        }
        let known = Arc::new(Known::default());
        outlets.insert(address, Arc::downgrade(&known));
        known
    }

    /// One sender lets go of a port. If it was the last here: under what it had come.
    fn let_go(&self, address: &PortAddr, known: &Arc<Known>) -> Vec<Ticket> {
        let mut outlets = lock(&self.outlets);
        // Under the lock nobody else can get hold of it meanwhile.
        if Arc::strong_count(known) > 1 {
            return Vec::new();
        }
        outlets.remove(address);
        std::mem::take(&mut *lock(&known.tickets))
    }

    pub(crate) fn on_closed(&self, closed: Closed) {
        let known = lock(&self.outlets).get(&closed.port).and_then(Weak::upgrade);
        if let Some(known) = known {
            known.close(closed.why);
        }
    }

    /// A process has ended, and with it whoever received there.
    pub(crate) fn on_down(&self, addr: ProcAddr) {
        self.close_those(|owner| owner == addr);
    }

    /// A whole host has ended.
    pub(crate) fn on_host_down(&self, host: HostNo) {
        self.close_those(|owner| owner.host == host);
    }

    fn close_those(&self, hit: impl Fn(ProcAddr) -> bool) {
        let hit: Vec<Arc<Known>> = lock(&self.outlets)
            .iter()
            .filter(|(address, _)| hit(address.owner))
            .filter_map(|(_, known)| known.upgrade())
            .collect();
        for known in hit {
            known.close(PortEnd::ReceiverEnded);
        }
    }
}

/// The receiving end of a port. With the last reference to it the port is closed.
#[derive(Debug)]
pub struct Mailbox {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) inlet: Arc<Inlet>,
}

impl Mailbox {
    /// The port's id.
    pub fn id(&self) -> u64 {
        self.inlet.id
    }

    /// Begins to wait for the next value.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn receive(&self) -> Result<Arc<Receive>, crate::RuntimeError> {
        let call = self.runtime.open_receive()?;
        let receive = Arc::new(Receive { call, place: AtomicU64::new(0) });
        self.inlet.receive(&self.runtime.reactor, &self.runtime.calls, &receive);
        Ok(receive)
    }

    /// Ends the wait; false if the value had come.
    pub fn cancel(&self, receive: &Receive) -> bool {
        self.runtime.calls.cancel(&self.runtime.reactor, &receive.call)
    }

    /// Nobody is going to look at `receive` any more.
    pub fn give_up(&self, receive: &Arc<Receive>) {
        self.inlet.give_up(&self.runtime.reactor, &self.runtime.calls, receive);
    }

    /// Takes no more in, and drops what nobody has received.
    pub fn close(&self) {
        self.runtime.close_port(&self.inlet);
    }

    /// Whether nothing can be received any more.
    pub fn is_over(&self) -> bool {
        self.inlet.is_over()
    }

    /// Values that have come and were not received.
    pub fn len(&self) -> usize {
        self.inlet.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.close();
    }
}

/// Where a port leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To a channel's receiver.
    Channel {
        /// The port's id.
        id: u64,
        /// Whether it takes one message only.
        once: bool,
    },
    /// To whoever waits for a call; 0 for nobody.
    Response {
        /// The caller's number of the call.
        call: CallId,
        /// The actor that was called.
        actor: ActorId,
        /// The answering rank's place in the target.
        index: u32,
        /// Whether the caller takes as many values as come.
        stream: bool,
    },
}

/// The sending end of a port.
#[derive(Debug)]
pub struct Outlet {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) owner: ProcAddr,
    pub(crate) way: Way,
    pub(crate) known: Arc<Known>,
    /// Made for the endpoint itself: should nobody else have got it, its end is the end of the call.
    pub(crate) first: bool,
}

impl Outlet {
    /// Who receives.
    pub fn owner(&self) -> ProcAddr {
        self.owner
    }

    /// Where it leads.
    pub fn way(&self) -> Way {
        self.way
    }

    /// Whether it takes one message only.
    pub(crate) fn is_single(&self) -> bool {
        match self.way {
            Way::Channel { once, .. } => once,
            Way::Response { stream, .. } => !stream,
        }
    }

    pub(crate) fn address(&self) -> PortAddr {
        match self.way {
            Way::Channel { id, .. } => PortAddr { owner: self.owner, id, place: 0, response: false },
            Way::Response { call, index, .. } => PortAddr { owner: self.owner, id: call, place: index, response: true },
        }
    }

    /// It goes where nobody can follow it: somebody in another process may send too from now on.
    pub fn hand_on(&self) {
        self.known.handed_on.fetch_add(1, Ordering::SeqCst);
        self.runtime.tell_loose(self);
    }

    /// Under what id the receiver's process counts what comes, if it does: where many values may come.
    pub fn counted(&self) -> Option<ActorId> {
        match self.way {
            Way::Channel { id, once: false } => Some(id),
            Way::Response { call, stream: true, .. } if call != 0 => Some(call | STREAM),
            _ => None,
        }
    }

    /// The process's runtime.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Has somebody wait until the queue towards the receiver is within budget; what is sent there meanwhile waits behind.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn turn(&self, place: ActorId) -> Result<crate::Deferral, crate::RuntimeError> {
        self.runtime.turn(&Arc::new(Target::One(self.owner)), place, None, 0)
    }

    /// What tells one handing on from all others.
    pub fn new_ticket(&self) -> Ticket {
        self.runtime.new_id()
    }

    /// The port is about to be part of a message.
    pub fn packed(&self) -> Packed {
        Packed { outlet: self.runtime.outlet(self.owner, self.way, false), ticket: self.new_ticket() }
    }

    /// Whether the receiver may still wait for what comes this way.
    pub(crate) fn is_awaited(&self) -> bool {
        let answered = self.is_single() && self.known.used.load(Ordering::SeqCst);
        !answered && !self.known.ended.load(Ordering::SeqCst) && self.known.closed().is_none()
    }

    /// Bytes that may wait for the receiver before its senders do.
    pub fn budget(&self) -> usize {
        self.runtime.link_budget()
    }

    /// Waits a moment for the queue towards the receiver to be within budget; true once it is.
    pub fn wait_room(&self, limit: Duration) -> bool {
        self.runtime.wait_room(&Target::One(self.owner), limit)
    }

    /// Whether a message would still be sent.
    pub fn is_open(&self) -> bool {
        self.known.closed().is_none() && !(self.is_single() && self.known.used.load(Ordering::SeqCst))
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        if self.first && self.known.handed_on.load(Ordering::SeqCst) == 0 {
            self.end();
        }
        let tickets = self.runtime.ports.let_go(&self.address(), &self.known);
        if !tickets.is_empty() && self.is_awaited() {
            self.runtime.tell_let_go(self, &tickets);
        }
        // A stream has one meter for each call: it is not to be kept for long.
        if let (Way::Response { .. }, Some(place)) = (self.way, self.counted())
            && Arc::strong_count(&self.known) == 1
            && self.runtime.behind(&Target::One(self.owner), place).is_none()
        {
            self.runtime.meters.forget(self.owner, place);
        }
    }
}

/// The port of a call in a message that is about to be sent.
#[derive(Debug)]
pub struct Packed {
    outlet: Outlet,
    ticket: Ticket,
}

impl Packed {
    /// Whether it is that port.
    pub fn is_of(&self, outlet: &Outlet) -> bool {
        Arc::ptr_eq(&self.outlet.known, &outlet.known)
    }

    /// Under what it travels.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The message is being sent: from here on the end of this process's port is not the end of all.
    pub fn begin(&self) {
        self.outlet.known.handed_on.fetch_add(1, Ordering::SeqCst);
    }

    /// The message was not sent.
    pub fn unsent(&self) {
        self.outlet.known.handed_on.fetch_sub(1, Ordering::SeqCst);
    }

    /// The message was sent to `to`; `who` is what people call them.
    pub fn sent(&self, to: &Target, who: &str) {
        self.outlet.runtime.tell_given(&self.outlet, self.ticket, to, who);
    }
}
