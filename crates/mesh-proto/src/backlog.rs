//! Messages that wait in their sender's process until their receivers have room, while their senders continue.
//!
//! A message for several mailboxes goes to all of them at once, so it waits until all have room.
//!
//! BKL-1: messages for one mailbox leave in the order in which they came: a message may leave once it is first in the
//! queue of each of its mailboxes. A message joins all its queues in one step, so the oldest message is first
//! everywhere, and two messages never wait for each other.
//!
//! BKL-2: what waits is within the budget, or is a single message, plus at most one message from each sender that waits
//! for its own to leave. Room is reserved before a message is made.

use crate::{ActorId, ProcAddr};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// A mailbox: its process and its id there.
pub type Place = (ProcAddr, ActorId);

#[derive(Debug)]
struct Waiting<T> {
    to: Box<[Place]>,
    /// The number of its queues in which others are before it.
    behind: usize,
    cost: u64,
    item: T,
}

/// The messages that wait in one process. See the module.
#[derive(Debug)]
pub struct Backlog<T> {
    waiting: FxHashMap<u64, Waiting<T>>,
    queues: FxHashMap<Place, VecDeque<u64>>,
    next: u64,
    bytes: u64,
    budget: u64,
}

impl<T> Backlog<T> {
    /// An empty backlog for `budget` bytes.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self { waiting: FxHashMap::default(), queues: FxHashMap::default(), next: 0, bytes: 0, budget }
    }

    /// How many messages wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Bytes that wait or are reserved.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many bytes may wait.
    #[must_use]
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// The index of the first of these mailboxes that has waiting messages: anything else sent there must wait after
    /// them.
    #[must_use]
    pub fn blocks(&self, to: impl IntoIterator<Item = Place>) -> Option<usize> {
        if self.queues.is_empty() {
            return None;
        }
        to.into_iter().position(|place| self.queues.contains_key(&place))
    }

    /// Reserves room for a message of `cost` bytes; false if there is none (BKL-2). With `surely` it always succeeds:
    /// for a sender that sends nothing else until this message has left.
    #[must_use]
    pub fn reserve(&mut self, cost: u64, surely: bool) -> bool {
        let sum = self.bytes.saturating_add(cost);
        let room = surely || self.bytes == 0 || sum <= self.budget;
        if room {
            self.bytes = sum;
        }
        room
    }

    /// A reservation is not needed after all.
    pub fn release(&mut self, cost: u64) {
        self.bytes = self.bytes.saturating_sub(cost);
    }

    /// Adds a message whose `cost` bytes were reserved. Returns its number.
    pub fn push(&mut self, to: Box<[Place]>, cost: u64, item: T) -> u64 {
        let number = self.next;
        self.next += 1;
        let mut behind = 0;
        for place in &to {
            let queue = self.queues.entry(*place).or_default();
            behind += usize::from(!queue.is_empty());
            queue.push_back(number);
        }
        self.waiting.insert(number, Waiting { to, behind, cost, item });
        number
    }

    /// The next message to a mailbox, if it is first in all its other queues too (BKL-1).
    #[must_use]
    pub fn first(&self, to: Place) -> Option<u64> {
        let number = *self.queues.get(&to)?.front()?;
        self.ready(number).map(|_| number)
    }

    /// A message, if no other is before it (BKL-1).
    #[must_use]
    pub fn ready(&self, number: u64) -> Option<&T> {
        self.waiting.get(&number).filter(|one| one.behind == 0).map(|one| &one.item)
    }

    /// Takes a message out, because its turn has come or its sender gives up. Appends the messages that may go next as
    /// a result to `freed`.
    pub fn remove(&mut self, number: u64, freed: &mut Vec<u64>) -> Option<T> {
        let gone = self.waiting.remove(&number)?;
        self.bytes = self.bytes.saturating_sub(gone.cost);
        for place in &gone.to {
            let Some(queue) = self.queues.get_mut(place) else { continue };
            if queue.front() != Some(&number) {
                queue.retain(|one| *one != number);
                continue;
            }
            queue.pop_front();
            match queue.front() {
                None => {
                    self.queues.remove(place);
                }
                Some(next) => {
                    if let Some(next_one) = self.waiting.get_mut(next) {
                        next_one.behind -= 1;
                        if next_one.behind == 0 {
                            freed.push(*next);
                        }
                    }
                }
            }
        }
        Some(gone.item)
    }

    /// Takes everything out, in the order in which it came.
    pub fn clear(&mut self) -> Vec<T> {
        self.queues.clear();
        self.bytes = 0;
        let mut all: Vec<_> = self.waiting.drain().collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, one)| one.item).collect()
    }
}
