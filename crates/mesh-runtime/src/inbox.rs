//! What waits for an actor, and how an event loop is told.
//!
//! TAK-1: a task is here until the actor comes to it, and until then its caller can take it back: it has begun, or
//! never will.
//! TAK-2: a task that was sent ahead begins only once the actor's replies before it have left this process. So if the
//! process dies, a caller without the reply to the previous task knows that this one has not begun.

use crate::gauge::Gauge;
use crate::loop_waker::LoopWaker;
use crate::message::Message;
use crate::meter::MailboxCredits;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use mesh_proto::messages::Task;
use mesh_proto::{ActorId, CallId, Kind, ProcAddr};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many bytes of messages to take at once, unless a single message has more.
const MOST_TAKEN: u64 = 256 * 1024;

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Message>,
    waiter: Option<Arc<Waiter>>,
    waker: Option<(Arc<LoopWaker>, u64)>,
    /// The loop was told and has not emptied the queue since.
    told: bool,
    /// Messages received so far, and their bytes.
    received: u64,
    bytes: u64,
    /// Callers that may not have the reply to the last task that they know of: no task of theirs begins ahead of it.
    held_up: Vec<ProcAddr>,
    /// The thread woken for the last task: if that is taken back it finds nothing, and must be woken again.
    woken: Option<Arc<Waiter>>,
}

/// What became of a message that was put into an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    /// The inbox is closed; the message is dropped.
    Closed,
    /// It was sent ahead and may not begin (TAK-2); it is dropped.
    NotAhead,
}

/// The messages that wait for one actor, in order.
#[derive(Debug)]
pub struct Inbox {
    /// The actor's number; 0 for the process itself.
    pub actor: ActorId,
    queue: Mutex<Queue>,
    len: AtomicUsize,
    /// Messages lent to an executor that has not come to them, and their bytes.
    lent: AtomicUsize,
    lent_bytes: AtomicU64,
    closed: AtomicBool,
    /// Its actor has failed: another may be made under the same id, with a new inbox.
    retired: AtomicBool,
    /// What the actor does and has done, for outside observers.
    pub gauge: Gauge,
    mailbox: Arc<MailboxCredits>,
}

impl Inbox {
    /// An inbox whose messages count against no budget.
    pub(crate) fn new(actor: ActorId, gauge: Gauge) -> Self {
        Self::of(MailboxCredits::new(actor, u64::MAX, None), gauge)
    }

    /// The inbox of a mailbox.
    pub(crate) fn of(mailbox: MailboxCredits, gauge: Gauge) -> Self {
        Self {
            actor: mailbox.id(),
            queue: Mutex::default(),
            len: AtomicUsize::new(0),
            lent: AtomicUsize::new(0),
            lent_bytes: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            gauge,
            mailbox: Arc::new(mailbox),
        }
    }

    /// How many messages have not begun and their bytes, then how many were received and their bytes.
    pub(crate) fn flow(&self) -> (usize, u64, u64, u64) {
        let queue = self.lock();
        // Under the lock, so that what is lent just now is counted once.
        let (lent, lent_bytes) = (self.lent.load(Ordering::Relaxed), self.lent_bytes.load(Ordering::Relaxed));
        let waiting: u64 = queue.messages.iter().map(|message| message.header().body_len).sum();
        (queue.messages.len() + lent, waiting + lent_bytes, queue.received, queue.bytes)
    }

    /// Its account with its senders.
    pub(crate) fn mailbox(&self) -> &MailboxCredits {
        &self.mailbox
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many messages wait.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::SeqCst)
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The actor has failed.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
    }

    /// Whether another actor may take its place.
    pub(crate) fn is_free(&self) -> bool {
        self.is_closed() || self.retired.load(Ordering::SeqCst)
    }

    /// Whether the inbox takes no more.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Appends a message. False, and the message is dropped, if the inbox is closed.
    pub(crate) fn push(&self, reactor: &Reactor, message: Message) -> bool {
        self.put(reactor, message, false) == Put::Done
    }

    /// Puts a message before all others.
    pub(crate) fn push_first(&self, reactor: &Reactor, message: Message) -> bool {
        self.put(reactor, message, true) == Put::Done
    }

    /// Appends a message, or with `first` puts it before all others.
    pub(crate) fn put(&self, reactor: &Reactor, mut message: Message, first: bool) -> Put {
        message.charge_to(&self.mailbox);
        let mut queue = self.lock();
        if self.is_closed() {
            return Put::Closed;
        }
        let task = message.task();
        match task {
            None => {}
            Some((_, Task::Next)) => {
                let caller = message.header().src;
                queue.held_up.retain(|one| *one != caller);
            }
            Some((_, Task::Ahead)) if queue.held_up.contains(&message.header().src) => return Put::NotAhead,
            Some((_, Task::Ahead)) => {}
        }
        queue.received += 1;
        queue.bytes += message.header().body_len;
        if first {
            queue.messages.push_front(message);
        } else {
            queue.messages.push_back(message);
        }
        self.len.store(queue.messages.len(), Ordering::SeqCst);
        // The waiter may be stale, so the loop is told too.
        let waiter = queue.waiter.take();
        if task.is_some() && waiter.is_some() {
            queue.woken.clone_from(&waiter);
        }
        let waker = if queue.told { None } else { queue.waker.clone() };
        queue.told |= waker.is_some();
        drop(queue);
        if let Some(waiter) = waiter {
            waiter.notify(reactor);
        }
        if let Some((waker, token)) = waker {
            waker.push(reactor, token);
        }
        Put::Done
    }

    /// The next messages, at most `max`, and not many large ones at once: their senders hear of them when the whole
    /// burst was handled. Empty if nothing waits.
    pub fn take(&self, max: usize) -> Vec<Message> {
        self.take_from(&mut self.lock(), max)
    }

    /// Like [`Inbox::take`], for an executor that comes to one after the other: until it [begins](Self::begun) with a
    /// call or a tell, that counts as waiting.
    pub fn lend(&self, max: usize) -> Vec<Message> {
        let mut queue = self.lock();
        let burst = self.take_from(&mut queue, max);
        for message in burst.iter().filter(|message| Self::counts(message)) {
            self.lent.fetch_add(1, Ordering::Relaxed);
            self.lent_bytes.fetch_add(message.header().body_len, Ordering::Relaxed);
        }
        burst
    }

    /// Whether a message that was lent counts as waiting.
    pub fn counts(message: &Message) -> bool {
        matches!(message.header().kind, Kind::Call | Kind::Tell)
    }

    /// An executor has begun with a lent message that counts, or drops it. Call once for each.
    pub fn begun(&self, message: &Message) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
        self.lent_bytes.fetch_sub(message.header().body_len, Ordering::Relaxed);
    }

    fn take_from(&self, queue: &mut Queue, max: usize) -> Vec<Message> {
        let (mut bytes, mut first) = (0_u64, true);
        let fits = |message: &&Message| {
            let before = bytes;
            bytes = bytes.saturating_add(message.cost());
            // As far as its caller can know, whatever is taken has begun (TAK-1).
            before < MOST_TAKEN && (std::mem::take(&mut first) || message.task().is_none())
        };
        let n = queue.messages.iter().take(max).take_while(fits).count();
        let burst: Vec<Message> = queue.messages.drain(..n).collect();
        self.len.store(queue.messages.len(), Ordering::SeqCst);
        if queue.messages.is_empty() {
            queue.told = false;
        }
        burst
    }

    /// Takes back a task that the actor has not come to.
    pub(crate) fn take_back(&self, caller: ProcAddr, call: CallId) -> Option<Message> {
        self.take_out(|message, id, _| message.header().src == caller && id == call).pop()
    }

    /// A reply to this caller's task has not left this process: no task that it sends ahead begins until it sends one
    /// that is not. Returns those that wait.
    pub(crate) fn hold_up(&self, caller: ProcAddr) -> Vec<Message> {
        let mut queue = self.lock();
        if !queue.held_up.contains(&caller) {
            queue.held_up.push(caller);
        }
        drop(queue);
        self.take_out(|message, _, task| message.header().src == caller && task == Task::Ahead)
    }

    fn take_out(&self, which: impl Fn(&Message, CallId, Task) -> bool) -> Vec<Message> {
        let mut queue = self.lock();
        let mut out = Vec::new();
        let mut at = 0;
        while let Some(message) = queue.messages.get(at) {
            if message.task().is_some_and(|(call, task)| which(message, call, task)) {
                out.extend(queue.messages.remove(at));
            } else {
                at += 1;
            }
        }
        self.len.store(queue.messages.len(), Ordering::SeqCst);
        if !out.is_empty() && queue.waiter.is_none() {
            queue.waiter = queue.woken.take();
        }
        out
    }

    /// Makes messages notify a loop from now on, with this token.
    pub fn attach(&self, reactor: &Reactor, waker: Arc<LoopWaker>, token: u64) {
        let mut queue = self.lock();
        let waiting = !queue.messages.is_empty();
        queue.told = waiting;
        queue.waker = Some((Arc::clone(&waker), token));
        drop(queue);
        if waiting {
            waker.push(reactor, token);
        }
    }

    /// Stops telling a loop.
    pub fn detach(&self) {
        let mut queue = self.lock();
        queue.waker = None;
        queue.told = false;
    }

    /// The calling thread is about to wait for the next message.
    pub(crate) fn expect(&self) {
        self.lock().waiter = Some(Waiter::current());
    }

    /// Blocks until there are messages or the inbox is closed, without ever reading the links, so that the thread
    /// delays nobody.
    pub fn wait_apart(&self) {
        let ready = || !self.is_empty() || self.is_closed();
        while !ready() {
            self.expect();
            Waiter::current().park(None, &ready);
        }
    }

    /// Takes no more, and returns what still waits. Wakes a waiting thread.
    pub(crate) fn close(&self, reactor: &Reactor) -> Vec<Message> {
        let mut queue = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        self.mailbox.close();
        self.len.store(0, Ordering::SeqCst);
        let left = queue.messages.drain(..).collect();
        if let Some(waiter) = queue.waiter.take() {
            drop(queue);
            waiter.notify(reactor);
        }
        left
    }

    /// Takes no more; what already waits can still be taken.
    pub(crate) fn seal(&self, reactor: &Reactor) {
        let mut queue = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        if let Some(waiter) = queue.waiter.take() {
            drop(queue);
            waiter.notify(reactor);
        }
    }
}
