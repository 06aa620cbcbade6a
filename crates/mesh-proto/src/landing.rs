//! Messages whose large parts are still on their way by another route, and later messages from the same senders.
//!
//! LND-1: a sender's messages are let through once each, in the order in which they came.
//! LND-2: a sender that waits for nothing costs nothing, and no sender waits for another.
//! LND-3: only one caller at a time lets through a sender's messages: the caller that delivers a message delivers those
//! after it.

use crate::ProcAddr;
use std::collections::{HashMap, VecDeque};

/// See the module. `M` is a message.
#[derive(Debug)]
pub struct Landing<M> {
    lines: HashMap<ProcAddr, Line<M>>,
    next: u64,
}

impl<M> Default for Landing<M> {
    fn default() -> Self {
        Self { lines: HashMap::new(), next: 1 }
    }
}

#[derive(Debug)]
struct Line<M> {
    waiting: VecDeque<Slot<M>>,
    /// Somebody is letting through what landed.
    passing: bool,
}

#[derive(Debug)]
enum Slot<M> {
    /// Ready to be let through; `None` for a message that was dropped.
    Landed(Option<M>),
    /// The number of a message that has not landed yet.
    Open(u64),
}

impl<M> Landing<M> {
    /// Whether no sender has anything waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// A message came that has yet to land. Returns the number of its place in its sender's line.
    pub fn open(&mut self, sender: ProcAddr) -> u64 {
        let number = self.next;
        self.next += 1;
        self.line(sender).waiting.push_back(Slot::Open(number));
        number
    }

    /// Whether a message has yet to land. False if its sender was given up.
    #[must_use]
    pub fn is_open(&self, sender: ProcAddr, number: u64) -> bool {
        let line = self.lines.get(&sender);
        line.is_some_and(|line| line.waiting.iter().any(|slot| matches!(slot, Slot::Open(open) if *open == number)))
    }

    /// A whole message came. Returns it if nothing of its sender waits; otherwise it waits too.
    pub fn arrive(&mut self, sender: ProcAddr, message: M) -> Option<M> {
        match self.lines.get_mut(&sender) {
            Some(line) => {
                line.waiting.push_back(Slot::Landed(Some(message)));
                None
            }
            None => Some(message),
        }
    }

    /// A message landed, or was dropped. True if the caller must let through what [`Landing::next`] returns, until it
    /// returns `None`; false if nothing can go yet, somebody else does so, or the sender was given up.
    pub fn land(&mut self, sender: ProcAddr, number: u64, message: Option<M>) -> bool {
        let Some(line) = self.lines.get_mut(&sender) else { return false };
        let found = line.waiting.iter_mut().find(|slot| matches!(slot, Slot::Open(open) if *open == number));
        let Some(slot) = found else { return false };
        *slot = Slot::Landed(message);
        let is_next = matches!(line.waiting.front(), Some(Slot::Landed(_)));
        is_next && !std::mem::replace(&mut line.passing, true)
    }

    /// The next message of a sender to let through; `None` if there is none for now.
    pub fn next(&mut self, sender: ProcAddr) -> Option<M> {
        let line = self.lines.get_mut(&sender)?;
        while let Some(Slot::Landed(_)) = line.waiting.front() {
            if let Some(Slot::Landed(Some(message))) = line.waiting.pop_front() {
                return Some(message);
            }
        }
        line.passing = false;
        if line.waiting.is_empty() {
            self.lines.remove(&sender);
        }
        None
    }

    /// Senders are gone, and this process was told of their ends. Returns their waiting messages.
    pub fn give_up(&mut self, gone: impl Fn(ProcAddr) -> bool) -> Vec<M> {
        let lines = self.lines.extract_if(|sender, _| gone(*sender));
        let slots = lines.flat_map(|(_, line)| line.waiting);
        slots.filter_map(|slot| if let Slot::Landed(message) = slot { message } else { None }).collect()
    }

    fn line(&mut self, sender: ProcAddr) -> &mut Line<M> {
        self.lines.entry(sender).or_insert_with(|| Line { waiting: VecDeque::new(), passing: false })
    }
}
