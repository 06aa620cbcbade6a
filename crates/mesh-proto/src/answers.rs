//! Replies on their way to callers that may have stopped reading; arguments of spawns follow the same rules.
//!
//! The replier counts the bytes that it has sent to each caller's process. After every quarter of the window it asks
//! that process how far it has read: a question with the count follows the replies, and the reader sends it back at
//! once. So a caller pays nothing for a small reply, and it makes no difference when, or in which order, a program
//! looks at its replies: a process that reads makes room, and a stopped one does not.
//!
//! ANS-1: a reply goes if it fits the window together with what its caller has not read, or if less than a quarter of
//! the window is unread. Less than a quarter is never asked about, so a waiting reply always waits for an answer that
//! is in flight.
//!
//! ANS-2: the replies to one process leave in the order in which they were given.
//!
//! ANS-3: what waits is within the budget, plus at most one reply from each sender that waits for its own to leave.
//!
//! ANS-4: a reply stops waiting once nobody wants it: its call was cancelled, its deadline has passed, or its caller
//! has ended.

use crate::{CallId, INITIAL_WINDOW, ProcAddr};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::time::Duration;

/// Bytes of replies to one process that it may leave unread.
pub const REPLY_WINDOW: u64 = INITIAL_WINDOW;
const QUARTER: u64 = REPLY_WINDOW / 4;

/// With this many callers, those that owe no answer are forgotten.
const MANY: usize = 1024;

/// A reply that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept<T> {
    /// Its bytes.
    pub cost: u64,
    /// The call that it answers.
    pub call: CallId,
    /// When nobody wants it any longer.
    pub due: Option<Duration>,
    /// The reply.
    pub item: T,
}

/// Whether a reply may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It goes, and was counted. A question with this count follows it, if there is one.
    Go(Option<u64>),
    /// It must be kept ([`Answers::keep`]).
    Wait,
}

#[derive(Debug)]
struct Caller<T> {
    /// Bytes of all replies sent there.
    sent: u64,
    /// How many of them the caller is known to have read.
    read: u64,
    /// The count in the last question.
    asked: u64,
    waiting: VecDeque<Kept<T>>,
    /// A reply to it has waited before.
    known: bool,
}

impl<T> Default for Caller<T> {
    fn default() -> Self {
        Self { sent: 0, read: 0, asked: 0, waiting: VecDeque::new(), known: false }
    }
}

impl<T> Caller<T> {
    fn has_room(&self, cost: u64) -> bool {
        let unread = self.sent - self.read;
        unread < QUARTER || unread.saturating_add(cost) <= REPLY_WINDOW
    }

    fn count(&mut self, cost: u64) {
        self.sent = self.sent.saturating_add(cost);
    }

    fn question(&mut self) -> Option<u64> {
        let due = self.sent - self.asked >= QUARTER;
        due.then(|| {
            self.asked = self.sent;
            self.asked
        })
    }
}

/// All waiting replies of one process, and what callers have read of those that were sent. See the module.
#[derive(Debug)]
pub struct Answers<T> {
    callers: FxHashMap<ProcAddr, Caller<T>>,
    sweep_at: usize,
    waiting: usize,
    bytes: u64,
    budget: u64,
    /// At or before the first deadline of a waiting reply.
    next_due: Option<Duration>,
}

impl<T> Answers<T> {
    /// Nothing sent yet; `budget` bytes may wait.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self { callers: FxHashMap::default(), sweep_at: MANY, waiting: 0, bytes: 0, budget, next_due: None }
    }

    /// How many replies wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Bytes of the replies that wait.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes sent to a process that it is not known to have read.
    #[must_use]
    pub fn unread(&self, caller: ProcAddr) -> u64 {
        self.callers.get(&caller).map_or(0, |one| one.sent - one.read)
    }

    /// How many callers are known.
    #[must_use]
    pub fn callers(&self) -> usize {
        self.callers.len()
    }

    /// Whether a reply of `cost` bytes may go now (ANS-1), after those that already wait (ANS-2).
    pub fn admit(&mut self, caller: ProcAddr, cost: u64) -> Answer {
        if self.callers.len() >= self.sweep_at {
            self.callers.retain(|_, one| !one.waiting.is_empty() || one.asked > one.read);
            self.sweep_at = MANY.max(2 * self.callers.len());
        }
        let one = self.callers.entry(caller).or_default();
        if !one.waiting.is_empty() || !one.has_room(cost) {
            return Answer::Wait;
        }
        one.count(cost);
        Answer::Go(one.question())
    }

    /// Keeps a reply that may not go. Returns whether it is the first one ever to wait for its caller, whose end must
    /// be watched from now on, and whether more waits now than the budget allows, so that the replier must wait until
    /// this reply has left (ANS-3).
    pub fn keep(&mut self, caller: ProcAddr, kept: Kept<T>) -> (bool, bool) {
        self.waiting += 1;
        self.bytes = self.bytes.saturating_add(kept.cost);
        self.next_due = earlier(self.next_due, kept.due);
        let one = self.callers.entry(caller).or_default();
        let first = !std::mem::replace(&mut one.known, true);
        one.waiting.push_back(kept);
        (first, self.bytes > self.budget)
    }

    /// A caller has read up to `read`. Appends what may go now to `go`; the returned question follows it, if there is
    /// one.
    pub fn on_read(&mut self, caller: ProcAddr, read: u64, go: &mut Vec<T>) -> Option<u64> {
        let one = self.callers.get_mut(&caller)?;
        // No more than was sent: the count of a caller that was forgotten meanwhile has restarted at 0.
        one.read = one.read.max(read.min(one.sent));
        self.settle(caller, go)
    }

    /// Callers have ended: returns the replies that waited for them (ANS-4).
    pub fn on_ends(&mut self, ended: impl Fn(ProcAddr) -> bool) -> Vec<T> {
        let mut gone = Vec::new();
        self.callers.retain(|addr, one| {
            let ends = ended(*addr);
            if ends {
                gone.extend(one.waiting.drain(..));
            }
            !ends
        });
        self.drop_all(gone)
    }

    /// Nobody waits for a call any longer: returns its reply, if that waits (ANS-4), and a question. Appends what goes
    /// in its place to `go`.
    pub fn cancel(&mut self, caller: ProcAddr, call: CallId, go: &mut Vec<T>) -> (Vec<T>, Option<u64>) {
        let gone = self.take(caller, |kept| kept.call == call);
        (gone, self.settle(caller, go))
    }

    /// When [`Answers::expire`] has something to do.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.next_due
    }

    /// Returns the replies whose deadlines have passed (ANS-4), and the callers to settle now ([`Answers::settle`]).
    pub fn expire(&mut self, now: Duration) -> (Vec<T>, Vec<ProcAddr>) {
        if self.next_due.is_none_or(|due| due > now) {
            return (Vec::new(), Vec::new());
        }
        let late = |kept: &Kept<T>| kept.due.is_some_and(|due| due <= now);
        let who: Vec<ProcAddr> =
            self.callers.iter().filter(|(_, one)| one.waiting.iter().any(late)).map(|(addr, _)| *addr).collect();
        let gone = who.iter().flat_map(|caller| self.take(*caller, late)).collect();
        let left = self.callers.values().flat_map(|one| &one.waiting).filter_map(|kept| kept.due);
        self.next_due = left.min();
        (gone, who)
    }

    /// Appends a caller's replies that may go now to `go`; the returned question follows them, if there is one.
    pub fn settle(&mut self, caller: ProcAddr, go: &mut Vec<T>) -> Option<u64> {
        let one = self.callers.get_mut(&caller)?;
        while one.waiting.front().is_some_and(|kept| one.has_room(kept.cost))
            && let Some(kept) = one.waiting.pop_front()
        {
            one.count(kept.cost);
            self.waiting -= 1;
            self.bytes = self.bytes.saturating_sub(kept.cost);
            go.push(kept.item);
        }
        one.question()
    }

    /// Takes out everything that waits.
    pub fn clear(&mut self) -> Vec<T> {
        self.on_ends(|_| true)
    }

    fn take(&mut self, caller: ProcAddr, gone: impl Fn(&Kept<T>) -> bool) -> Vec<T> {
        let Some(one) = self.callers.get_mut(&caller) else { return Vec::new() };
        let (out, left) = std::mem::take(&mut one.waiting).into_iter().partition(|kept| gone(kept));
        one.waiting = left;
        self.drop_all(out.into())
    }

    fn drop_all(&mut self, gone: Vec<Kept<T>>) -> Vec<T> {
        self.waiting -= gone.len();
        self.bytes = self.bytes.saturating_sub(gone.iter().map(|kept| kept.cost).sum());
        gone.into_iter().map(|kept| kept.item).collect()
    }
}

fn earlier(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
