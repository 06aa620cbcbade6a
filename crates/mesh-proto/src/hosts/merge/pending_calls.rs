//! The calls whose replies are awaited, and the replies held for each.

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
    /// The header of the first held frame.
    pub(super) header: Option<Header>,
    age: u64,
    /// When the first held reply arrived, and its turn among all calls.
    held: Option<(u64, Duration)>,
}

#[derive(Debug)]
pub(super) struct PendingCalls<W, S> {
    entries: HashMap<Key, Entry<W, S>>,
    /// The calls with held replies, longest wait first.
    held: BTreeMap<u64, Key>,
    /// All calls, oldest first.
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

    /// The call, created if necessary.
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

    /// The call to drop before another can be awaited.
    pub(super) fn surplus(&self) -> Option<Key> {
        if self.entries.len() < CALLS_MAX { None } else { self.ages.values().next().copied() }
    }

    /// Notes that something of the call is held.
    pub(super) fn hold(&mut self, key: Key, now: Duration) {
        if let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.held.is_none()) {
            self.counter += 1;
            entry.held = Some((self.counter, now));
            self.held.insert(self.counter, key);
        }
    }

    /// Notes that nothing of the call is held any more. Returns its entry, for the replies.
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

    /// The calls with held replies that `wanted` accepts, longest wait first.
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

    /// The call, after those with a longer wait that `wanted` accepts, longest wait first; none if nothing of the call
    /// is held.
    pub(super) fn held_until(&self, key: &Key, mut wanted: impl FnMut(&Key, &Entry<W, S>) -> bool) -> Vec<Key> {
        let Some((turn, _)) = self.entries.get(key).and_then(|entry| entry.held) else { return Vec::new() };
        let earlier = self.held.range(..turn).map(|(_, key)| key);
        let mut keys: Vec<Key> =
            earlier.filter(|key| self.entries.get(key).is_some_and(|entry| wanted(key, entry))).copied().collect();
        keys.push(*key);
        keys
    }

    /// The last call that `wanted` accepts and that began to hold after `key` did: anything added to `key` now would
    /// overtake it.
    pub(super) fn held_after(&self, key: &Key, mut wanted: impl FnMut(&Key, &Entry<W, S>) -> bool) -> Option<Key> {
        let (turn, _) = self.entries.get(key)?.held?;
        let mut later = self.held.range(turn + 1..).map(|(_, later)| later).rev();
        later.find(|later| self.entries.get(later).is_some_and(|entry| wanted(later, entry))).copied()
    }

    /// All calls that `wanted` accepts, oldest first.
    pub(super) fn all(&self, mut wanted: impl FnMut(&Key) -> bool) -> Vec<Key> {
        self.ages.values().filter(|key| wanted(key)).copied().collect()
    }

    /// When the hold of the longest-waiting call ends.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let first = self.held.values().next()?;
        self.entries.get(first)?.held.map(|(_, since)| since + HOLD)
    }

    /// The longest-waiting call, if its hold is over.
    pub(super) fn due(&self, now: Duration) -> Option<Key> {
        self.held.values().next().copied().filter(|_| self.next_deadline().is_some_and(|at| at <= now))
    }
}
