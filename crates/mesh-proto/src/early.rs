//! Messages that arrive before the thing that they are for.
//!
//! What one process sends to another keeps its order (ORD-1). But an actor in one process may spawn in a second and tell a
//! third, whose message reaches the second sooner, through another connection or a direct link. Such a message waits for
//! the spawn for a while.
//!
//! ERL-1: messages that wait for the same thing are handed over in the order in which they came.
//! ERL-2: nothing waits longer than allowed, and no more than a fixed number of bytes wait, from all senders together.
//! These include the overhead of keeping a message, since a flood of empty ones fills memory too.
//! ERL-3: nothing waits for a thing that existed once and ended.

use crate::MESSAGE_COST;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

/// How many things that came are remembered. A message for an older one waits in vain.
const REMEMBERED: usize = 1 << 16;

#[derive(Debug)]
struct Kept<T> {
    number: u64,
    until: Duration,
    cost: usize,
    item: T,
}

/// The state machine; see the module.
#[derive(Debug)]
pub struct Early<K, T> {
    within: Duration,
    limit: usize,
    bytes: usize,
    made: u64,
    waiting: HashMap<K, VecDeque<Kept<T>>>,
    /// The waiting messages, by the time until which they wait.
    due: BTreeMap<(Duration, u64), K>,
    known: HashSet<K>,
    /// The things that came, the oldest first.
    order: VecDeque<K>,
}

impl<K: Copy + Eq + Hash, T> Early<K, T> {
    /// An empty machine, in which nothing waits longer than `within`, and no more than `limit` bytes wait.
    #[must_use]
    pub fn new(within: Duration, limit: usize) -> Self {
        Self {
            within,
            limit,
            bytes: 0,
            made: 0,
            waiting: HashMap::new(),
            due: BTreeMap::new(),
            known: HashSet::new(),
            order: VecDeque::new(),
        }
    }

    /// Keeps an item of `cost` bytes (and [`MESSAGE_COST`]) for something that has not come yet, at most for `within`
    /// if given. Returns the item if it must not wait: what it is for has already come, or there is no room.
    ///
    /// # Errors
    /// The item.
    pub fn keep(&mut self, key: K, item: T, cost: usize, within: Option<Duration>, now: Duration) -> Result<(), T> {
        let cost = cost.saturating_add(MESSAGE_COST as usize);
        if self.known.contains(&key) || self.bytes.saturating_add(cost) > self.limit {
            return Err(item);
        }
        let until = now.saturating_add(within.map_or(self.within, |within| within.min(self.within)));
        let number = self.made;
        self.made += 1;
        self.bytes += cost;
        self.due.insert((until, number), key);
        self.waiting.entry(key).or_default().push_back(Kept { number, until, cost, item });
        Ok(())
    }

    /// `key` came. Returns the items that waited for it.
    pub fn come(&mut self, key: K) -> Vec<T> {
        if self.known.insert(key) {
            self.order.push_back(key);
            if self.order.len() > REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.known.remove(&oldest);
            }
        }
        let kept = self.waiting.remove(&key).unwrap_or_default();
        for one in &kept {
            self.bytes -= one.cost;
            self.due.remove(&(one.until, one.number));
        }
        kept.into_iter().map(|one| one.item).collect()
    }

    /// Returns the items that have waited long enough.
    pub fn on_tick(&mut self, now: Duration) -> Vec<T> {
        let mut late = Vec::new();
        while let Some(entry) = self.due.first_entry().filter(|entry| entry.key().0 <= now) {
            let ((_, number), key) = entry.remove_entry();
            let Some(kept) = self.waiting.get_mut(&key) else { continue };
            if let Ok(at) = kept.binary_search_by_key(&number, |one| one.number)
                && let Some(one) = kept.remove(at)
            {
                self.bytes -= one.cost;
                late.push(one.item);
            }
            if kept.is_empty() {
                self.waiting.remove(&key);
            }
        }
        late
    }

    /// When [`Early::on_tick`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.due.first_key_value().map(|((until, _), _)| *until)
    }

    /// How many bytes wait.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
