//! Messages whose large parts are still on their way by another road, and what their senders have sent since.
//!
//! LND-1: what one sender has sent is let through in the order in which it has come, each once.
//! LND-2: a sender that waits for nothing costs nothing, and no sender waits for another.
//! LND-3: one caller at a time lets through what a sender has sent: who delivers a message delivers those behind it.

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
    /// Somebody is letting through what has landed.
    passing: bool,
}

#[derive(Debug)]
enum Slot<M> {
    /// To be let through; none of a message that is dropped.
    Landed(Option<M>),
    /// The number of one that has not landed yet.
    Open(u64),
}

impl<M> Landing<M> {
    /// Whether no sender has anything waiting.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// A message has come that has yet to land: the number of its place in the line of its sender.
    pub fn open(&mut self, sender: ProcAddr) -> u64 {
        let number = self.next;
        self.next += 1;
        self.line(sender).waiting.push_back(Slot::Open(number));
        number
    }

    /// Whether a message has yet to land. One of a sender that was given up has not.
    #[must_use]
    pub fn is_open(&self, sender: ProcAddr, number: u64) -> bool {
        let line = self.lines.get(&sender);
        line.is_some_and(|line| line.waiting.iter().any(|slot| matches!(slot, Slot::Open(open) if *open == number)))
    }

    /// A whole message has come. It is given back if nothing of its sender waits; else it waits too.
    pub fn arrive(&mut self, sender: ProcAddr, message: M) -> Option<M> {
        match self.lines.get_mut(&sender) {
            Some(line) => {
                line.waiting.push_back(Slot::Landed(Some(message)));
                None
            }
            None => Some(message),
        }
    }

    /// A message has landed, or is dropped. True if the caller is to let through what [`Landing::next`] gives, until it gives
    /// nothing. Of a sender that was given up this says no.
    pub fn land(&mut self, sender: ProcAddr, number: u64, message: Option<M>) -> bool {
        let Some(line) = self.lines.get_mut(&sender) else { return false };
        let found = line.waiting.iter_mut().find(|slot| matches!(slot, Slot::Open(open) if *open == number));
        let Some(slot) = found else { return false };
        *slot = Slot::Landed(message);
        let is_next = matches!(line.waiting.front(), Some(Slot::Landed(_)));
        is_next && !std::mem::replace(&mut line.passing, true)
    }

    /// What is to be let through next of a sender; none if that is all for now.
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

    /// Senders are gone, and their end was heard of: returns what waited of them.
    pub fn give_up(&mut self, gone: impl Fn(ProcAddr) -> bool) -> Vec<M> {
        let lines = self.lines.extract_if(|sender, _| gone(*sender));
        let slots = lines.flat_map(|(_, line)| line.waiting);
        slots.filter_map(|slot| if let Slot::Landed(message) = slot { message } else { None }).collect()
    }

    fn line(&mut self, sender: ProcAddr) -> &mut Line<M> {
        self.lines.entry(sender).or_insert_with(|| Line { waiting: VecDeque::new(), passing: false })
    }
}
