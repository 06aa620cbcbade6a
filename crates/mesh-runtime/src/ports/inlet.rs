//! The receiving end of a port: values and receives meet here.

use crate::call::Call;
use crate::call::Outcome;
use crate::calls::Calls;
use crate::locks::lock;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::reactor::Reactor;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A wait for one value.
#[derive(Debug)]
pub struct Receive {
    /// Completes with the value. It is cancelled if no more can come.
    pub call: Arc<Call>,
    /// The value's place in order of arrival, once it is here.
    place: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    /// Values that nobody waits for, by their place in order of arrival.
    values: BTreeMap<u64, Arc<Message>>,
    waiting: VecDeque<Arc<Receive>>,
    next: u64,
    /// No more is taken in. Values already here can still be received.
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

    /// Takes a value in, or drops it if the port takes no more.
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

    /// Makes the next value complete `call`.
    pub(crate) fn receive(&self, reactor: &Reactor, calls: &Calls, call: Arc<Call>) -> Arc<Receive> {
        let receive = Arc::new(Receive { call, place: AtomicU64::new(0) });
        let mut queue = lock(&self.queue);
        queue.waiting.push_back(Arc::clone(&receive));
        settle(queue, reactor, calls);
        receive
    }

    /// Gives up `receive`. If its value had come, that is the next one again (PRT-1).
    pub(crate) fn give_up(&self, reactor: &Reactor, calls: &Calls, receive: &Arc<Receive>) {
        calls.cancel(reactor, &receive.call);
        let mut queue = lock(&self.queue);
        queue.waiting.retain(|one| !Arc::ptr_eq(one, receive));
        if let Some(Outcome::Replied(message)) = receive.call.take_outcomes().and_then(|all| all.into_iter().next()) {
            queue.values.insert(receive.place.load(Ordering::SeqCst), message);
            settle(queue, reactor, calls);
        }
    }

    /// Takes no more in. Returns the values that nobody has received.
    pub(crate) fn close(&self, reactor: &Reactor, calls: &Calls) -> Vec<Arc<Message>> {
        let mut queue = lock(&self.queue);
        queue.shut = true;
        let left = std::mem::take(&mut queue.values).into_values().collect();
        settle(queue, reactor, calls);
        left
    }

    /// Whether nothing can be received any more.
    pub(crate) fn is_over(&self) -> bool {
        let queue = lock(&self.queue);
        queue.shut && queue.values.is_empty()
    }

    /// How many values have arrived that nobody has received.
    pub(crate) fn len(&self) -> usize {
        lock(&self.queue).values.len()
    }
}

/// Hands values to those who wait, and tells their senders (PRT-4).
fn settle(mut queue: MutexGuard<'_, Queue>, reactor: &Reactor, calls: &Calls) {
    let given = match_up(&mut queue, reactor, calls);
    drop(queue);
    given.iter().for_each(|message| message.done());
}

/// Hands values to those who wait, and returns them. The queue's lock is held, so both sides keep their order.
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
