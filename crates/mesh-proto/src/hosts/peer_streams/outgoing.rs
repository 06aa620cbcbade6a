//! The sending half of a peer stream, and the sent packets that peer streams share.

use super::cargo::Lane;
use super::cargo::Lost;
use crate::HostNo;
use crate::hosts::Short;
use crate::hosts::packet::{Gap, Packet, PacketKind};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// After this time without progress, the first unacknowledged packet is sent again.
const RESEND_AFTER: Duration = Duration::from_secs(2);
/// Nothing is late sooner than this: acks are held back for a moment, twice.
const RESEND_AFTER_AT_LEAST: Duration = Duration::from_millis(100);
/// At most this many packets follow one ack while it is unclear what was lost.
const BURST: u64 = 64;

/// How long a host may be silent before what is under way to it is sent again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// The first time.
    pub(super) first: Duration,
    /// It doubles each time, up to this.
    pub(super) most: Duration,
}

impl Patience {
    /// For hosts that are dead after `window`: what is lost behind a relay is sent again while they live.
    pub(super) fn within(window: Duration) -> Self {
        let first = (window / 4).clamp(RESEND_AFTER_AT_LEAST, RESEND_AFTER);
        Self { first, most: 4 * first }
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self { first: RESEND_AFTER, most: 4 * RESEND_AFTER }
    }
}

/// A sent packet, kept once for all hosts that have not acknowledged it.
#[derive(Debug)]
pub(super) struct Sent {
    /// Increases with every packet, and so do the numbers in every peer stream.
    pub(super) order: u64,
    pub(super) refs: u32,
    pub(super) message: u32,
    pub(super) offset: u64,
    pub(super) total: u64,
    pub(super) cost: u64,
    pub(super) body: Short<Bytes>,
    /// The frame of which this is a segment.
    pub(super) whole: Option<Arc<Short<Bytes>>>,
    pub(super) lane: Lane,
}

impl Sent {
    /// As a packet without destinations.
    pub(super) fn packet(&self, me: HostNo) -> Packet {
        let mut packet = Packet::new(PacketKind::Data, me);
        packet.message = self.message;
        packet.offset = self.offset;
        packet.total = self.total;
        packet.body = self.body.clone();
        packet
    }

    pub(super) fn lost(&self) -> Lost {
        let frame = self.whole.as_deref().unwrap_or(&self.body).clone();
        Lost { frame, lane: self.lane }
    }
}

/// Packets under way, in reusable slots.
#[derive(Debug, Default)]
pub(super) struct Log {
    slots: Vec<Option<Sent>>,
    free: Vec<u32>,
    orders: u64,
}

impl Log {
    /// Keeps a packet and sets its order.
    pub(super) fn insert(&mut self, mut sent: Sent) -> u32 {
        self.orders += 1;
        sent.order = self.orders;
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = Some(sent);
            return index;
        }
        self.slots.push(Some(sent));
        (self.slots.len() - 1) as u32
    }

    pub(super) fn get(&self, index: u32) -> Option<&Sent> {
        self.slots.get(index as usize)?.as_ref()
    }

    pub(super) fn set_refs(&mut self, index: u32, refs: u32) {
        if let Some(Some(sent)) = self.slots.get_mut(index as usize) {
            sent.refs = refs;
        }
    }

    /// Drops the references of `hosts` hosts. Returns the packet's cost for each.
    pub(super) fn release(&mut self, index: u32, hosts: u32) -> u64 {
        let Some(place @ Some(_)) = self.slots.get_mut(index as usize) else { return 0 };
        let Some(sent) = place else { return 0 };
        let cost = sent.cost;
        sent.refs -= hosts;
        if sent.refs == 0 {
            *place = None;
            self.free.push(index);
        }
        cost
    }
}

/// A packet on its way to one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flight {
    pub(super) sent: u32,
    /// The next hop that it last went by.
    pub(super) via: HostNo,
}

/// The sending half of the peer stream to each host of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Outgoing {
    /// The highest number acknowledged.
    acked: u64,
    /// The packets after it, by number.
    flights: VecDeque<Flight>,
    pub(super) outstanding: u64,
    /// The next hop last used.
    pub(super) path: HostNo,
    /// Lanes that wait for room in this window, by next hop.
    pub(super) blocked: Vec<(HostNo, Lane)>,
    /// When the last ack came, or the first packet that awaits one was sent.
    progress: Duration,
    patience: Duration,
    /// After a time without progress: up to where packets may be lost, up to where they were sent again, and how many
    /// follow the next ack.
    recover: u64,
    resent: u64,
    burst: u64,
}

impl Outgoing {
    pub(super) fn next_seq(&self) -> u64 {
        self.acked + self.flights.len() as u64 + 1
    }

    /// Whether this much more may be under way (STR-4).
    pub(super) fn has_room(&self, cost: u64, window: u64) -> bool {
        self.outstanding == 0 || self.outstanding + cost <= window
    }

    /// Gives the packet the next number. Returns whether nothing was under way before.
    pub(super) fn take(&mut self, sent: u32, via: HostNo, cost: u64, now: Duration, patience: Patience) -> bool {
        let first = self.flights.is_empty();
        if first {
            self.progress = now;
            self.patience = patience.first;
        }
        self.flights.push_back(Flight { sent, via });
        self.outstanding += cost;
        self.path = via;
        first
    }

    /// The packet with a number, if it is not acknowledged.
    pub(super) fn flight(&self, seq: u64) -> Option<Flight> {
        let at = seq.checked_sub(self.acked + 1)?;
        self.flights.get(usize::try_from(at).ok()?).copied()
    }

    /// Notes that the packet with a number goes by another next hop.
    pub(super) fn goes(&mut self, seq: u64, via: HostNo) {
        if let Some(at) = seq.checked_sub(self.acked + 1)
            && let Some(flight) = usize::try_from(at).ok().and_then(|at| self.flights.get_mut(at))
        {
            flight.via = via;
        }
    }

    /// Whether an ack up to that number is news. Acks of what was never sent are not believed.
    pub(super) fn is_news(&self, ack: u64) -> bool {
        ack > self.acked && ack < self.next_seq()
    }

    /// Notes that everything up to `ack`, which is news, has arrived at `hosts` hosts. Returns what to send again.
    pub(super) fn acknowledge(
        &mut self,
        ack: u64,
        hosts: u32,
        log: &mut Log,
        now: Duration,
        patience: Patience,
    ) -> Vec<u64> {
        for _ in self.acked..ack {
            let Some(flight) = self.flights.pop_front() else { break };
            self.outstanding = self.outstanding.saturating_sub(log.release(flight.sent, hosts));
        }
        self.acked = ack;
        self.progress = now;
        self.patience = patience.first;
        if ack >= self.recover {
            return Vec::new();
        }
        self.burst = (self.burst * 2).min(BURST);
        let from = self.resent.max(self.acked) + 1;
        let to = (from + self.burst - 1).min(self.recover);
        self.resent = self.resent.max(to);
        (from..=to).collect()
    }

    /// The numbers of everything that is not acknowledged.
    pub(super) fn all(&mut self) -> Vec<u64> {
        self.recover = 0;
        self.resent = 0;
        (self.acked + 1..self.next_seq()).collect()
    }

    /// Appends the numbers of a gap that are under way.
    pub(super) fn within(&self, gap: Gap, out: &mut Vec<u64>) {
        let end = gap.first.saturating_add(gap.count).min(self.next_seq());
        out.extend(gap.first.max(self.acked + 1)..end);
    }

    /// Whether the same is under way in the same state, ignoring times.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let settled = |one: &Self| one.blocked.is_empty() && one.recover <= one.acked;
        self.acked == other.acked
            && self.flights.len() == other.flights.len()
            && settled(self)
            && settled(other)
            && self.flights == other.flights
            && (self.flights.is_empty() || self.path == other.path)
    }

    /// Absorbs another that is alike.
    pub(super) fn join(&mut self, other: &Self) {
        self.progress = self.progress.max(other.progress);
        self.patience = self.patience.max(other.patience);
    }

    pub(super) fn goes_by(&self, via: HostNo) -> bool {
        self.flights.iter().any(|flight| flight.via == via)
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        (!self.flights.is_empty()).then(|| self.progress + self.patience)
    }

    /// What to send again after too long a silence: the first packet, as a probe.
    pub(super) fn on_tick(&mut self, now: Duration, patience: Patience) -> Vec<u64> {
        if self.deadline().is_none_or(|at| at > now) {
            return Vec::new();
        }
        self.progress = now;
        self.patience = (self.patience * 2).min(patience.most);
        self.recover = self.next_seq() - 1;
        self.resent = self.acked + 1;
        self.burst = 1;
        vec![self.acked + 1]
    }

    /// Gives up all packets.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = u32> + '_ {
        self.flights.drain(..).map(|flight| flight.sent)
    }
}
