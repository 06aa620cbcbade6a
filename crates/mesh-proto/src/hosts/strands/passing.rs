//! Others' acks on their way through a relay.

use crate::HostNo;
use crate::hosts::packet::Share;
use std::collections::BTreeMap;
use std::time::Duration;

/// Acks by the host that they are for: when they go on, and what they say. Kept for a moment, so that those of many
/// hosts go on as one.
#[derive(Debug, Default)]
pub(super) struct Passing {
    acks: BTreeMap<HostNo, (Duration, Vec<Share>)>,
}

impl Passing {
    pub(super) fn is_empty(&self) -> bool {
        self.acks.is_empty()
    }

    /// Acks for `dest` that go on at `at`, or with others before.
    pub(super) fn add(&mut self, dest: HostNo, shares: &[Share], at: Duration) {
        let (_, kept) = self.acks.entry(dest).or_insert_with(|| (at, Vec::new()));
        kept.extend_from_slice(shares);
        if kept.len() > 64 && kept.len().is_power_of_two() {
            // Whoever sends acks without end does not fill memory.
            *kept = merge(std::mem::take(kept));
        }
    }

    /// This host's own ack joins others for `dest`, if there are any.
    pub(super) fn add_own(&mut self, dest: HostNo, share: Share) -> bool {
        self.acks.get_mut(&dest).map(|(_, kept)| kept.push(share)).is_some()
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.acks.values().map(|(at, _)| *at).min()
    }

    /// The next host that acks go on to now.
    pub(super) fn next_due(&mut self, now: Duration) -> Option<(HostNo, Vec<Share>)> {
        let dest = self.acks.iter().find(|(_, (at, _))| *at <= now).map(|(dest, _)| *dest)?;
        let (_, kept) = self.acks.remove(&dest)?;
        Some((dest, merge(kept)))
    }

    pub(super) fn forget(&mut self, host: HostNo) {
        self.acks.remove(&host);
    }
}

/// Every host once, with the highest number that it has acknowledged; equal neighbours as one run.
fn merge(mut shares: Vec<Share>) -> Vec<Share> {
    shares.sort_unstable_by_key(|share| share.first);
    let overlap = shares.windows(2).any(|pair| pair[0].first + pair[0].count > pair[1].first);
    if overlap {
        let mut acks: BTreeMap<HostNo, u64> = BTreeMap::new();
        for share in &shares {
            for host in share.hosts() {
                let ack = acks.entry(host).or_default();
                *ack = share.ack.max(*ack);
            }
        }
        shares = acks.into_iter().map(|(host, ack)| Share::one(host, 0, ack)).collect();
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
