//! What will happen, in its order.

use mesh_proto::hosts::{Packet, Standing};
use mesh_proto::{CallId, HostNo};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Something that happens at a host.
#[derive(Debug)]
pub(crate) enum Event {
    /// The last bit of a packet would be there, were the network card idle.
    Arrive(Box<Packet>),
    /// A packet whose connection was not up is sent.
    Depart(HostNo, Box<Packet>),
    /// A proc has replied.
    Replied { call: CallId, index: u32 },
    /// A state machine has something to do.
    Tick,
    /// The connection to another host has ended.
    Closed(HostNo),
    /// A host that cannot be connected to any more, or is silent, is reported.
    Report(HostNo, Standing),
    /// The connection to a host that has fallen silent is looked at.
    Beat(HostNo),
    /// A host connects to another.
    Dial(HostNo),
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    turn: u64,
    host: HostNo,
    event: Event,
}

impl Ord for Entry {
    /// The earliest is the greatest; of two at one time, that which was put in first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.turn).cmp(&(self.at, self.turn))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    heap: BinaryHeap<Entry>,
    turns: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Duration, host: HostNo, event: Event) {
        self.turns += 1;
        self.heap.push(Entry { at, turn: self.turns, host, event });
    }

    pub(crate) fn pop(&mut self) -> Option<(Duration, HostNo, Event)> {
        self.heap.pop().map(|entry| (entry.at, entry.host, entry.event))
    }
}
