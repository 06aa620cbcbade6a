//! The calls whose replies are awaited, and what is held of each.

use super::pending_replies::PendingReplies;
use super::{CALLS_MAX, HOLD};
use crate::{CallId, Header, ProcAddr};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

pub(super) type Key = (ProcAddr, CallId);

/// One call: `awaited` says who has not answered, `sources` whose answers are held.
#[derive(Debug)]
pub(super) struct Entry<W, S> {
    pub(super) awaited: W,
    pub(super) sources: S,
    pub(super) replies: PendingReplies,
    /// Of the frame that holds the first of what is held.
    pub(super) header: Option<Header>,
    age: u64,
    /// When the first of what is held came; which one that was, over all calls.
    held: Option<(u64, Duration)>,
}

#[derive(Debug)]
pub(super) struct PendingCalls<W, S> {
    entries: HashMap<Key, Entry<W, S>>,
    /// The calls that have something held, that which waits longest first.
    held: BTreeMap<u64, Key>,
    /// All calls, the oldest first.
    ages: BTreeMap<u64, Key>,
    counter: u64,
}

impl<W, S> Default for PendingCalls<W, S> {
    fn default() -> Self {
        Self { entries: HashMap::new(), held: BTreeMap::new(), ages: BTreeMap::new(), counter: 0 }
    }
}

impl<W: Default, S: Default> PendingCalls<W, S> {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn holds_nothing(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn get(&mut self, key: &Key) -> Option<&mut Entry<W, S>> {
        self.entries.get_mut(key)
    }

    /// The call, new if need be.
    pub(super) fn place(&mut self, key: Key) -> &mut Entry<W, S> {
        self.entries.entry(key).or_insert_with(|| {
            self.counter += 1;
            self.ages.insert(self.counter, key);
            Entry {
                awaited: W::default(),
                sources: S::default(),
                replies: PendingReplies::default(),
                header: None,
                age: self.counter,
                held: None,
            }
        })
    }

    /// The call that has to go before one more can be awaited.
    pub(super) fn surplus(&self) -> Option<Key> {
        if self.entries.len() < CALLS_MAX { None } else { self.ages.values().next().copied() }
    }

    /// Something of the call is held from now on.
    pub(super) fn hold(&mut self, key: Key, now: Duration) {
        if let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.held.is_none()) {
            self.counter += 1;
            entry.held = Some((self.counter, now));
            self.held.insert(self.counter, key);
        }
    }

    /// Nothing of the call is held any more; the entry, for its replies.
    pub(super) fn release(&mut self, key: &Key) -> Option<&mut Entry<W, S>> {
        let entry = self.entries.get_mut(key)?;
        let (turn, _) = entry.held.take()?;
        self.held.remove(&turn);
        Some(entry)
    }

    pub(super) fn forget(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.ages.remove(&entry.age);
            if let Some((turn, _)) = entry.held {
                self.held.remove(&turn);
            }
        }
    }

    /// The calls with something held that `wanted` agrees to, that which waits longest first.
    pub(super) fn held(&self, mut wanted: impl FnMut(&Key, &Entry<W, S>) -> bool) -> Vec<Key> {
        if self.held.is_empty() {
            return Vec::new();
        }
        self.held
            .values()
            .filter(|key| self.entries.get(key).is_some_and(|entry| wanted(key, entry)))
            .copied()
            .collect()
    }

    /// The call and those that have waited longer and that `wanted` agrees to, that which waits longest first; none if
    /// nothing of the call is held.
    pub(super) fn held_until(&self, key: &Key, mut wanted: impl FnMut(&Key, &Entry<W, S>) -> bool) -> Vec<Key> {
        let Some((turn, _)) = self.entries.get(key).and_then(|entry| entry.held) else { return Vec::new() };
        let earlier = self.held.range(..turn).map(|(_, key)| key);
        let mut keys: Vec<Key> =
            earlier.filter(|key| self.entries.get(key).is_some_and(|entry| wanted(key, entry))).copied().collect();
        keys.push(*key);
        keys
    }

    /// The last call that `wanted` agrees to, if what it holds came after the first of what is held of `key`: what is
    /// added to `key` now would overtake it.
    pub(super) fn held_after(&self, key: &Key, mut wanted: impl FnMut(&Key, &Entry<W, S>) -> bool) -> Option<Key> {
        let (turn, _) = self.entries.get(key)?.held?;
        let mut later = self.held.range(turn + 1..).map(|(_, later)| later).rev();
        later.find(|later| self.entries.get(later).is_some_and(|entry| wanted(later, entry))).copied()
    }

    /// All calls that `wanted` agrees to, the oldest first.
    pub(super) fn all(&self, mut wanted: impl FnMut(&Key) -> bool) -> Vec<Key> {
        self.ages.values().filter(|key| wanted(key)).copied().collect()
    }

    /// When the first of what is held has been held long enough.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let first = self.held.values().next()?;
        self.entries.get(first)?.held.map(|(_, since)| since + HOLD)
    }

    /// The first call whose hold is over.
    pub(super) fn due(&self, now: Duration) -> Option<Key> {
        self.held.values().next().copied().filter(|_| self.next_deadline().is_some_and(|at| at <= now))
    }
}
