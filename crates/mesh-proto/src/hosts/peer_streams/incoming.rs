//! The receiving half of a peer stream.

use super::cargo::ACK_COST;
use super::cargo::ACK_DELAY;
use super::cargo::Arrival;
use crate::HostNo;
use crate::hosts::packet::Gap;
use crate::hosts::{HostSet, Short};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a gap is tolerated: packets of one peer stream may take paths of different lengths.
const GAP_DELAY: Duration = Duration::from_millis(100);
const GAP_DELAY_AT_MOST: Duration = Duration::from_secs(2);
/// How many gaps one nack reports.
const GAPS: usize = 32;

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Deliver it: it is the next one.
    Now,
    /// Hold it until those before it are here.
    Early,
    /// Drop it: it was here before, or there is no room to hold it.
    Never,
}

/// A packet that came early.
#[derive(Clone, Debug)]
pub(super) enum Held {
    Piece { message: u32, offset: u64, total: u64, body: Short<Bytes> },
    Merged(Short<Bytes>),
}

/// The receiving half of the peer stream from each host of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Incoming {
    /// The highest number delivered.
    delivered: u64,
    held: BTreeMap<u64, (u64, Held)>,
    pub(super) held_cost: u64,
    /// The cost of what was delivered since the last ack.
    unsaid: u64,
    /// When an ack is due.
    pub(super) ack_at: Option<Duration>,
    /// When a nack is due, and how long to wait after it.
    gap_at: Option<Duration>,
    gap_delay: Duration,
}

impl Incoming {
    /// Judges a packet that arrived. If it is the next one it counts as delivered.
    pub(super) fn judge(&mut self, seq: u64, cost: u64, window: u64, now: Duration) -> Verdict {
        let next = self.delivered + 1;
        if seq < next {
            // The ack was lost, or the packet was resent too early: acknowledge again.
            self.ack_at = Some(now);
            return Verdict::Never;
        }
        if seq > next {
            if self.held.contains_key(&seq) {
                return Verdict::Never;
            }
            if self.gap_at.is_none() {
                self.gap_delay = GAP_DELAY;
                self.gap_at = Some(now + GAP_DELAY);
            }
            let room = self.held.is_empty() || self.held_cost + cost <= window;
            return if room { Verdict::Early } else { Verdict::Never };
        }
        self.delivered = seq;
        self.count(cost, now);
        Verdict::Now
    }

    /// Whether a packet is new.
    pub(super) fn is_new(&self, seq: u64) -> bool {
        seq > self.delivered && !self.held.contains_key(&seq)
    }

    fn count(&mut self, cost: u64, now: Duration) {
        self.unsaid += cost;
        if self.unsaid >= ACK_COST {
            self.ack_at = Some(now);
        } else if self.ack_at.is_none() {
            self.ack_at = Some(now + ACK_DELAY);
        }
    }

    pub(super) fn hold(&mut self, seq: u64, cost: u64, held: Held) {
        self.held_cost += cost;
        self.held.insert(seq, (cost, held));
    }

    /// Delivers the held packets that now follow, from the `count` hosts from `origin` on.
    pub(super) fn release(&mut self, origin: HostNo, count: u32, out: &mut Vec<Arrival>) {
        if self.held.is_empty() {
            return;
        }
        while let Some((cost, held)) = self.held.remove(&(self.delivered + 1)) {
            self.delivered += 1;
            self.held_cost -= cost;
            self.unsaid += cost;
            out.push(match held {
                Held::Piece { message, offset, total, body } => Arrival::Piece { origin, message, offset, total, body },
                Held::Merged(body) => Arrival::Merged { origins: HostSet::range(origin, count), body },
            });
        }
        if self.held.is_empty() {
            self.gap_at = None;
        }
    }

    /// The number to acknowledge, which counts as said.
    pub(super) fn say(&mut self) -> u64 {
        self.unsaid = 0;
        self.ack_at = None;
        self.delivered
    }

    /// The gaps, if it is time to report them.
    pub(super) fn gaps(&mut self, now: Duration) -> Option<Vec<Gap>> {
        if self.gap_at.is_none_or(|at| at > now) {
            return None;
        }
        self.gap_delay = (self.gap_delay * 2).min(GAP_DELAY_AT_MOST);
        self.gap_at = Some(now + self.gap_delay);
        let mut next = self.delivered + 1;
        let mut gaps = Vec::new();
        for seq in self.held.keys() {
            if *seq > next {
                gaps.push(Gap { first: next, count: seq - next });
                if gaps.len() == GAPS {
                    break;
                }
            }
            // Such a number comes from no honest sender; saturating keeps it harmless.
            next = seq.saturating_add(1);
        }
        Some(gaps)
    }

    /// Whether the same has been received, ignoring times.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.delivered == other.delivered
            && self.held.is_empty()
            && other.held.is_empty()
            && self.ack_at.is_some() == other.ack_at.is_some()
    }

    /// Absorbs another that is alike.
    pub(super) fn join(&mut self, other: &Self) {
        self.unsaid = self.unsaid.max(other.unsaid);
        self.ack_at = self.ack_at.min(other.ack_at);
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        [self.ack_at, self.gap_at].into_iter().flatten().min()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.ack_at.is_none()
    }
}
