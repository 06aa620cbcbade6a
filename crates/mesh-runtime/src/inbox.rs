//! What waits for an actor, and how an event loop is told.
//!
//! TAK-1: a task is here until the actor comes to it, and until then its caller can take it back: it has begun, or
//! never will.
//! TAK-2: a task that was sent ahead begins only once the actor's replies before it have left this process. So if the
//! process dies, a caller without the reply to the previous task knows that this one has not begun.
//! TURN-1: of an actor with a thread and an event loop, one of the two has the turn. It takes only its own messages, and
//! until it comes back for more, the other gets none.

use crate::gauge::Gauge;
use crate::loop_waker::LoopWaker;
use crate::message::Message;
use crate::meter::MailboxCredits;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use mesh_proto::messages::{Name, Task};
use mesh_proto::{ActorId, CallId, Kind, ProcAddr};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many bytes of messages to take at once, unless a single message has more.
const MOST_TAKEN: u64 = 256 * 1024;

/// What handles an actor's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// A thread of the actor's own.
    Thread,
    /// An event loop.
    Loop,
}

/// How the messages of an actor with both are divided.
#[derive(Debug)]
struct Division {
    /// The names of the endpoints that run on the loop: few, and compared faster than hashed.
    on_loop: Vec<Box<[u8]>>,
    /// All messages are the loop's: the thread is gone, or does not come back in time.
    threadless: bool,
    /// Which of them handles messages now, if any does (TURN-1).
    turn: Option<Side>,
}

impl Division {
    fn side(&self, message: &Message) -> Side {
        let named = || {
            let name = Name::what(message.name());
            Inbox::counts(message) && self.on_loop.iter().any(|one| **one == *name)
        };
        if self.threadless || named() { Side::Loop } else { Side::Thread }
    }
}

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
    /// The thread woken for a task, by whichever change made that the first: if it is taken back the thread finds nothing, and
    /// must be woken again.
    woken: Option<Arc<Waiter>>,
    /// None if one executor handles all messages.
    division: Option<Division>,
}

impl Queue {
    /// Who may take the first message now.
    #[inline]
    fn next(&self) -> Next {
        match (self.messages.front(), &self.division) {
            (None, _) => Next::Nobody,
            (Some(_), None) => Next::Anybody,
            (Some(_), Some(Division { turn: Some(Side::Loop), .. })) => Next::Nobody,
            (Some(first), Some(division)) => match division.side(first) {
                Side::Thread => Next::Only(Side::Thread),
                Side::Loop if division.turn.is_none() => Next::Only(Side::Loop),
                Side::Loop => Next::Nobody,
            },
        }
    }
}

/// Who may take the first message of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nobody,
    /// The only executor.
    Anybody,
    Only(Side),
}

impl Next {
    fn is(self, side: Side) -> bool {
        self == Self::Anybody || self == Self::Only(side)
    }
}

/// Whom to wake, once the queue is unlocked.
#[must_use]
#[derive(Debug, Default)]
struct Wake {
    waiter: Option<Arc<Waiter>>,
    waker: Option<(Arc<LoopWaker>, u64)>,
}

impl Wake {
    fn go(self, reactor: &Reactor) {
        if let Some(waiter) = self.waiter {
            waiter.notify(reactor);
        }
        if let Some((waker, token)) = self.waker {
            waker.push(reactor, token);
        }
    }
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
    /// A thread that waits may take the first message.
    due: AtomicBool,
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
            due: AtomicBool::new(false),
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

    /// Whether a thread that waits for messages can take one now.
    pub fn is_due(&self) -> bool {
        self.due.load(Ordering::Acquire)
    }

    /// Notes a change of the queue. Returns whom to wake for its first message.
    #[inline]
    fn changed(&self, queue: &mut Queue) -> Wake {
        let next = queue.next();
        // Whoever waits for these is woken by an exchange, which orders them.
        self.len.store(queue.messages.len(), Ordering::Release);
        self.due.store(next.is(Side::Thread), Ordering::Release);
        let mut wake = Wake::default();
        if next.is(Side::Thread) {
            wake.waiter = queue.waiter.take();
            if wake.waiter.is_some() && queue.messages.front().is_some_and(|first| first.task().is_some()) {
                queue.woken.clone_from(&wake.waiter);
            }
        }
        // The waiter may be stale, so if there is only one executor, the loop is told too.
        if next.is(Side::Loop) && !queue.told {
            wake.waker.clone_from(&queue.waker);
            queue.told = wake.waker.is_some();
        }
        wake
    }

    // An actor with a thread and a loop.

    /// Divides the messages from now on, and makes more of them notify a loop: those of these names, beside those named
    /// before. All others are for the thread. That calls this, or has not begun, and has the turn.
    pub fn divide(&self, on_loop: impl IntoIterator<Item = Vec<u8>>, waker: Arc<LoopWaker>, token: u64) {
        let mut queue = self.lock();
        let begun = || Division { on_loop: Vec::new(), threadless: false, turn: Some(Side::Thread) };
        let division = queue.division.get_or_insert_with(begun);
        for name in on_loop.into_iter().map(Vec::into_boxed_slice) {
            if !division.on_loop.contains(&name) {
                division.on_loop.push(name);
            }
        }
        queue.waker = Some((waker, token));
        self.due.store(queue.next().is(Side::Thread), Ordering::Release);
    }

    /// Leaves all messages to a loop. A thread that still waits gets nothing any more.
    pub fn leave_to_loop(&self, reactor: &Reactor) {
        let mut queue = self.lock();
        queue.division = Some(Division { on_loop: Vec::new(), threadless: true, turn: None });
        let wake = self.changed(&mut queue);
        drop(queue);
        wake.go(reactor);
    }

    /// Whether the loop must run before a message that is put here now is handled, even if that is not for the loop.
    pub fn is_behind_loop(&self) -> bool {
        let queue = self.lock();
        queue.division.as_ref().is_some_and(|division| {
            division.turn == Some(Side::Loop)
                || queue.messages.iter().any(|message| division.side(message) == Side::Loop)
        })
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
        let wake = self.changed(&mut queue);
        drop(queue);
        wake.go(reactor);
        Put::Done
    }

    /// The next messages, at most `max`, and not many large ones at once: their senders hear of them when the whole
    /// burst was handled. Empty if nothing waits, or the first message or the turn is the other's (TURN-1).
    ///
    /// The executor comes to one after the other: until it [begins](Self::begun) with a call or a tell, that counts as
    /// waiting.
    pub fn lend(&self, reactor: &Reactor, max: usize, side: Side) -> Vec<Message> {
        let mut queue = self.lock();
        let (burst, wake) = self.take_from(&mut queue, max, side);
        // Under the lock, so that what is lent just now is counted once.
        for message in burst.iter().filter(|message| Self::counts(message)) {
            self.lent.fetch_add(1, Ordering::Relaxed);
            self.lent_bytes.fetch_add(message.header().body_len, Ordering::Relaxed);
        }
        drop(queue);
        wake.go(reactor);
        burst
    }

    /// Like [`Inbox::lend`], for the only executor; what it takes no longer counts as waiting.
    #[cfg(test)]
    pub(crate) fn take(&self, max: usize) -> Vec<Message> {
        self.take_from(&mut self.lock(), max, Side::Loop).0
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

    fn take_from(&self, queue: &mut Queue, max: usize, side: Side) -> (Vec<Message>, Wake) {
        let mut mine = true;
        if let Some(division) = &mut queue.division {
            if division.turn == Some(side) {
                division.turn = None;
            }
            mine = queue.next().is(side);
        }
        let n = if mine { Self::burst(queue, max, side) } else { 0 };
        let burst: Vec<Message> = queue.messages.drain(..n).collect();
        if n > 0
            && let Some(division) = &mut queue.division
        {
            division.turn = Some(side);
        }
        // A loop looks again until there is nothing for it.
        if queue.messages.is_empty() || (n == 0 && side == Side::Loop) {
            queue.told = false;
        }
        let wake = self.changed(queue);
        (burst, wake)
    }

    /// How many messages to take at once.
    fn burst(queue: &Queue, max: usize, side: Side) -> usize {
        let (mut bytes, mut first) = (0_u64, true);
        let fits = |message: &&Message| {
            let before = bytes;
            bytes = bytes.saturating_add(message.cost());
            // As far as its caller can know, whatever is taken has begun (TAK-1).
            before < MOST_TAKEN
                && (std::mem::take(&mut first) || message.task().is_none())
                && queue.division.as_ref().is_none_or(|division| division.side(message) == side)
        };
        queue.messages.iter().take(max).take_while(fits).count()
    }

    /// Takes back a task that the actor has not come to.
    pub(crate) fn take_back(&self, reactor: &Reactor, caller: ProcAddr, call: CallId) -> Option<Message> {
        self.take_out(reactor, |message, id, _| message.header().src == caller && id == call).pop()
    }

    /// A reply to this caller's task has not left this process: no task that it sends ahead begins until it sends one
    /// that is not. Returns those that wait.
    pub(crate) fn hold_up(&self, reactor: &Reactor, caller: ProcAddr) -> Vec<Message> {
        let mut queue = self.lock();
        if !queue.held_up.contains(&caller) {
            queue.held_up.push(caller);
        }
        drop(queue);
        self.take_out(reactor, |message, _, task| message.header().src == caller && task == Task::Ahead)
    }

    fn take_out(&self, reactor: &Reactor, which: impl Fn(&Message, CallId, Task) -> bool) -> Vec<Message> {
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
        if !out.is_empty() && queue.waiter.is_none() {
            queue.waiter = queue.woken.take();
        }
        let wake = self.changed(&mut queue);
        drop(queue);
        wake.go(reactor);
        out
    }

    /// Makes messages notify a loop from now on, with this token.
    pub fn attach(&self, reactor: &Reactor, waker: Arc<LoopWaker>, token: u64) {
        let mut queue = self.lock();
        queue.told = false;
        queue.waker = Some((waker, token));
        let wake = self.changed(&mut queue);
        drop(queue);
        wake.go(reactor);
    }

    /// The calling thread is about to wait for the next message, and gives up its turn.
    pub(crate) fn expect(&self, reactor: &Reactor) {
        let mut queue = self.lock();
        let mut wake = Wake::default();
        if let Some(division) = &mut queue.division
            && division.turn == Some(Side::Thread)
        {
            division.turn = None;
            wake = self.changed(&mut queue);
        }
        queue.waiter = Some(Waiter::current());
        drop(queue);
        wake.go(reactor);
    }

    /// Blocks until there are messages or the inbox is closed, without ever reading the links, so that the thread
    /// delays nobody.
    pub fn wait_apart(&self, reactor: &Reactor) {
        let ready = || self.is_due() || self.is_closed();
        while !ready() {
            self.expect(reactor);
            Waiter::current().park(None, &ready);
        }
    }

    /// Takes no more, and returns what still waits. Wakes a waiting thread.
    pub(crate) fn close(&self, reactor: &Reactor) -> Vec<Message> {
        let mut queue = self.lock();
        self.closed.store(true, Ordering::SeqCst);
        self.mailbox.close();
        self.len.store(0, Ordering::SeqCst);
        self.due.store(false, Ordering::Release);
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
