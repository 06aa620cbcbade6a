//! Others' acks on their way through a relay.

use crate::HostNo;
use crate::hosts::packet::Share;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

/// Acks by the host that they are for: when they go on, and what they say. They are kept for a moment so that those of
/// many hosts go on as one.
#[derive(Debug, Default)]
pub(super) struct Passing {
    acks: BTreeMap<HostNo, (Duration, Vec<Share>)>,
}

impl Passing {
    pub(super) fn is_empty(&self) -> bool {
        self.acks.is_empty()
    }

    /// Adds acks for `dest` that go on at `at`, or earlier with others.
    pub(super) fn add(&mut self, dest: HostNo, shares: &[Share], at: Duration) {
        let (_, kept) = self.acks.entry(dest).or_insert_with(|| (at, Vec::new()));
        kept.extend_from_slice(shares);
        if kept.len() > 64 && kept.len().is_power_of_two() {
            // A host that sends acks without end does not fill memory.
            *kept = merge(std::mem::take(kept));
        }
    }

    /// Adds this host's own ack to others for `dest`. False if there are none.
    pub(super) fn add_own(&mut self, dest: HostNo, share: Share) -> bool {
        self.acks.get_mut(&dest).map(|(_, kept)| kept.push(share)).is_some()
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.acks.values().map(|(at, _)| *at).min()
    }

    /// The next host whose acks are due, and the acks.
    pub(super) fn next_due(&mut self, now: Duration) -> Option<(HostNo, Vec<Share>)> {
        let dest = self.acks.iter().find(|(_, (at, _))| *at <= now).map(|(dest, _)| *dest)?;
        let (_, kept) = self.acks.remove(&dest)?;
        Some((dest, merge(kept)))
    }

    pub(super) fn forget(&mut self, host: HostNo) {
        self.acks.remove(&host);
    }
}

/// Each host once, with the highest number that it has acknowledged; equal neighbours form one run. Takes time
/// proportional to the runs, however many hosts they claim.
fn merge(mut shares: Vec<Share>) -> Vec<Share> {
    shares.sort_unstable_by_key(|share| share.first);
    let overlap = shares.windows(2).any(|pair| pair[0].first + pair[0].count > pair[1].first);
    if overlap {
        shares = apart(&shares);
    }
    let mut out: Vec<Share> = Vec::with_capacity(shares.len());
    for share in shares {
        match out.last_mut() {
            Some(last) if last.first + last.count == share.first && last.ack == share.ack => last.count += share.count,
            _ => out.push(Share { seq: 0, ..share }),
        }
    }
    out
}

/// Cuts shares, sorted by first host, wherever one begins or ends, and keeps the highest number on each stretch.
fn apart(shares: &[Share]) -> Vec<Share> {
    let mut cuts: Vec<HostNo> = shares.iter().flat_map(|share| [share.first, share.first + share.count]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut rest = shares.iter().peekable();
    // The shares that have begun, highest number first, with their ends.
    let mut open: BinaryHeap<(u64, HostNo)> = BinaryHeap::new();
    let mut out = Vec::with_capacity(cuts.len());
    for pair in cuts.windows(2) {
        let (first, end) = (pair[0], pair[1]);
        while let Some(share) = rest.next_if(|share| share.first == first) {
            open.push((share.ack, share.first + share.count));
        }
        while open.peek().is_some_and(|(_, ends)| *ends <= first) {
            open.pop();
        }
        if let Some((ack, _)) = open.peek() {
            out.push(Share { first, count: end - first, seq: 0, ack: *ack });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_the_highest_number_that_was_said_of_it() {
        let mut seed = 5_u64;
        let mut dice = |sides: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from((seed >> 33) % sides).unwrap()
        };
        for _ in 0..5_000 {
            let shares: Vec<Share> = (0..dice(8))
                .map(|_| Share { first: dice(30), count: 1 + dice(9), seq: 3, ack: u64::from(dice(4)) })
                .collect();
            let mut model: BTreeMap<HostNo, u64> = BTreeMap::new();
            for share in &shares {
                for host in share.hosts() {
                    let ack = model.entry(host).or_default();
                    *ack = share.ack.max(*ack);
                }
            }
            let merged = merge(shares);
            let said: Vec<(HostNo, u64)> =
                merged.iter().flat_map(|share| share.hosts().map(|host| (host, share.ack))).collect();
            assert_eq!(said, model.into_iter().collect::<Vec<_>>());
            let alike = |pair: &[Share]| pair[0].first + pair[0].count == pair[1].first && pair[0].ack == pair[1].ack;
            assert!(!merged.windows(2).any(alike), "equal neighbours are one run");
        }
    }
}
