//! Future events, in order.

use crate::node::End;
use mesh_proto::hosts::{Packet, PacketKind};
use mesh_proto::{CallId, HostNo};
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Something that happens at a host.
#[derive(Debug)]
pub(crate) enum Event {
    /// The last bit of a packet would arrive, if the network card were idle.
    Arrive(HostNo, Box<Packet>),
    /// A proc has replied.
    Replied { call: CallId, index: u32 },
    /// The gateway has something to do; if not `busy`, it only checks whether others live.
    Tick { busy: bool },
    /// A connection to another host has ended.
    Closed(End),
    /// An attempt to connect has reached the other host.
    Connected(HostNo),
    /// An attempt to connect failed; for good if the other side said so.
    Missed(HostNo, bool),
}

impl Event {
    /// Whether it is only a sign of life: such events never end.
    fn is_idle(&self) -> bool {
        match self {
            Self::Tick { busy } => !busy,
            Self::Arrive(_, packet) => matches!(packet.kind, PacketKind::Ping | PacketKind::Pong),
            _ => false,
        }
    }
}

#[derive(Debug)]
struct Entry {
    at: Duration,
    turn: u64,
    host: HostNo,
    event: Event,
}

impl Ord for Entry {
    /// The earliest is the greatest; among simultaneous events, the one pushed first.
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
    /// How many of the remaining events are not idle.
    busy: usize,
}

impl Queue {
    pub(crate) fn push(&mut self, at: Duration, host: HostNo, event: Event) {
        self.turns += 1;
        self.busy += usize::from(!event.is_idle());
        self.heap.push(Entry { at, turn: self.turns, host, event });
    }

    pub(crate) fn pop(&mut self) -> Option<(Duration, HostNo, Event)> {
        let entry = self.heap.pop()?;
        self.busy -= usize::from(!entry.event.is_idle());
        Some((entry.at, entry.host, entry.event))
    }

    /// Whether nothing is left but signs of life.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy == 0
    }
}
