//! Replies on their way to callers that may have stopped reading; the arguments of spawns keep to the same rules.
//!
//! The replier counts the bytes that it has sent to each caller's process and, whenever a quarter of the window has gone,
//! asks that process how far it has read: a question with the count, which travels behind the replies, and which whoever
//! reads there sends back at once. So a caller pays nothing for a small reply, and looking at a reply, in whichever
//! order, has nothing to do with it: a process that reads makes room, one that is stopped does not.
//!
//! ANS-1: a reply goes if, with what its caller has not read, it fits the window, or if less than a quarter of that is
//! unread. Less than a quarter has never been asked about, so a reply that waits waits for an answer that is under way.
//!
//! ANS-2: the replies to one process leave in the order in which they were given.
//!
//! ANS-3: what waits is within the budget; beyond it there is at most one reply of each who waits for its own to leave.
//!
//! ANS-4: a reply that nobody wants any more waits no longer: its call was cancelled, its deadline has passed, or its
//! caller has ended.

use crate::{CallId, INITIAL_WINDOW, ProcAddr};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::time::Duration;

/// How much of the replies of one process another one need not have read.
pub const REPLY_WINDOW: u64 = INITIAL_WINDOW;
const QUARTER: u64 = REPLY_WINDOW / 4;

/// With so many callers those are forgotten that owe no answer.
const MANY: usize = 1024;

/// A reply that has to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept<T> {
    /// Its bytes.
    pub cost: u64,
    /// The call that it answers.
    pub call: CallId,
    /// When nobody wants it any more.
    pub due: Option<Duration>,
    /// The reply.
    pub item: T,
}

/// What is said to a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It goes, and was counted. Behind it goes a question with this count, if there is one.
    Go(Option<u64>),
    /// It has to be kept ([`Answers::keep`]).
    Wait,
}

#[derive(Debug)]
struct Caller<T> {
    /// Bytes of all replies that were sent there.
    sent: u64,
    /// What of them the caller has read, as far as it has said.
    read: u64,
    /// What the last question was about.
    asked: u64,
    waiting: VecDeque<Kept<T>>,
    /// One has waited before.
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

/// All replies of one process that wait, and what their callers have read of those that were sent. See the module.
#[derive(Debug)]
pub struct Answers<T> {
    callers: FxHashMap<ProcAddr, Caller<T>>,
    sweep_at: usize,
    waiting: usize,
    bytes: u64,
    budget: u64,
    /// No later than the first deadline of what waits.
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

    /// Bytes that were sent to a process and that it is not known to have read.
    #[must_use]
    pub fn unread(&self, caller: ProcAddr) -> u64 {
        self.callers.get(&caller).map_or(0, |one| one.sent - one.read)
    }

    /// How many callers are known.
    #[must_use]
    pub fn callers(&self) -> usize {
        self.callers.len()
    }

    /// Whether a reply of so many bytes may go now (ANS-1), behind those that wait already (ANS-2).
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

    /// Keeps a reply that may not go. Says whether it is the first one that ever waits for its caller, whose end is to be
    /// heard of from now on, and whether more waits now than the budget allows: whoever gave it is to wait until it has
    /// left (ANS-3).
    pub fn keep(&mut self, caller: ProcAddr, kept: Kept<T>) -> (bool, bool) {
        self.waiting += 1;
        self.bytes = self.bytes.saturating_add(kept.cost);
        self.next_due = earlier(self.next_due, kept.due);
        let one = self.callers.entry(caller).or_default();
        let first = !std::mem::replace(&mut one.known, true);
        one.waiting.push_back(kept);
        (first, self.bytes > self.budget)
    }

    /// A caller has read so much. Appends what goes because of that to `go`; behind it goes a question, if there is one.
    pub fn on_read(&mut self, caller: ProcAddr, read: u64, go: &mut Vec<T>) -> Option<u64> {
        let one = self.callers.get_mut(&caller)?;
        // No more than there was: whoever was forgotten meanwhile has begun to count anew.
        one.read = one.read.max(read.min(one.sent));
        self.settle(caller, go)
    }

    /// Callers have ended: returns what waited for them (ANS-4).
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

    /// Nobody waits for a call any more: returns its reply, if that waits (ANS-4). What goes in its place is appended to
    /// `go`, and a question returned.
    pub fn cancel(&mut self, caller: ProcAddr, call: CallId, go: &mut Vec<T>) -> (Vec<T>, Option<u64>) {
        let gone = self.take(caller, |kept| kept.call == call);
        (gone, self.settle(caller, go))
    }

    /// When [`Answers::expire`] has something to do.
    #[must_use]
    pub fn next_due(&self) -> Option<Duration> {
        self.next_due
    }

    /// Returns the replies whose deadlines have passed (ANS-4), and the callers that are to be looked at now
    /// ([`Answers::settle`]).
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

    /// Appends what of a caller's may go by now to `go`; behind it goes a question, if there is one.
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

    /// Takes everything out that waits.
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
