//! The other hosts, as runs of neighbours in the same state.
//!
//! A cast to ten thousand hosts, and the merged replies and acks of ten thousand, take a handful of operations as long
//! as the hosts' peer streams are at the same numbers. A host that is treated separately gets its own run, and runs
//! that become alike are joined again.

use super::incoming::Incoming;
use super::outgoing::Outgoing;
use crate::HostNo;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

/// The state of each host in a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Peer {
    pub(super) out: Outgoing,
    pub(super) inc: Incoming,
    /// The earliest time in the heap of alarms for this run.
    pub(super) alarm: Option<Duration>,
}

/// Times at which something is due, with a host of the run. An entry that differs from its run's `alarm` is stale.
pub(super) type Alarms = BinaryHeap<Reverse<(Duration, HostNo)>>;

impl Peer {
    /// Makes sure that what is due at `at` is looked at; `host` is one of the run.
    pub(super) fn arm(&mut self, alarms: &mut Alarms, host: HostNo, at: Duration) {
        if self.alarm.is_none_or(|alarm| at < alarm) {
            self.alarm = Some(at);
            alarms.push(Reverse((at, host)));
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        self.out.is_like(&other.out) && self.inc.is_like(&other.inc)
    }
}

/// All other hosts.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// By first host: the number of hosts and their state. Runs do not overlap.
    runs: BTreeMap<HostNo, (u32, Peer)>,
    pub(super) alarms: Alarms,
}

impl Peers {
    /// The state of the run that contains `host`.
    pub(super) fn get(&self, host: HostNo) -> Option<&Peer> {
        let (first, (count, peer)) = self.runs.range(..=host).next_back()?;
        (host - first < *count).then_some(peer)
    }

    /// All runs.
    pub(super) fn iter(&self) -> impl Iterator<Item = (HostNo, u32, &Peer)> {
        self.runs.iter().map(|(first, (count, peer))| (*first, *count, peer))
    }

    /// The runs that overlap the `count` hosts from `first` on, limited to these hosts.
    pub(super) fn among(&self, first: HostNo, count: u32) -> impl Iterator<Item = (HostNo, u32, &Peer)> {
        let end = first + count;
        let before = self.runs.range(..first).next_back();
        let before = before.filter(|(at, (len, _))| **at + *len > first);
        before.into_iter().chain(self.runs.range(first..end)).map(move |(at, (len, peer))| {
            let (low, high) = ((*at).max(first), (at + len).min(end));
            (low, high - low, peer)
        })
    }

    /// The state of one host, in its own run.
    pub(super) fn one(&mut self, host: HostNo) -> Option<(&mut Peer, &mut Alarms)> {
        let (first, (count, _)) = self.runs.range(..=host).next_back()?;
        let (first, count) = (*first, *count);
        if host - first >= count {
            return None;
        }
        if count > 1 {
            self.cut_out(host, 1);
        }
        let Self { runs, alarms } = self;
        runs.get_mut(&host).map(|(_, peer)| (peer, alarms))
    }

    /// Like [`Peers::one`], but creates an unknown host.
    pub(super) fn one_or_new(&mut self, host: HostNo) -> (&mut Peer, &mut Alarms) {
        if self.run(host).is_some_and(|(_, count, _)| count > 1) {
            self.cut_out(host, 1);
        }
        let Self { runs, alarms } = self;
        (&mut runs.entry(host).or_insert_with(|| (1, Peer::default())).1, alarms)
    }

    /// The states of those of the `count` hosts from `first` on that are known, cut out of their runs.
    pub(super) fn range(&mut self, first: HostNo, count: u32) -> impl Iterator<Item = (HostNo, u32, &mut Peer)> {
        self.cut_out(first, count);
        self.runs.range_mut(first..first + count).map(|(first, (count, peer))| (*first, *count, peer))
    }

    /// Like [`Peers::range`], with the alarms.
    pub(super) fn range_and_alarms(
        &mut self,
        first: HostNo,
        count: u32,
    ) -> (impl Iterator<Item = (HostNo, u32, &mut Peer)>, &mut Alarms) {
        self.cut_out(first, count);
        let runs = self.runs.range_mut(first..first + count);
        (runs.map(|(first, (count, peer))| (*first, *count, peer)), &mut self.alarms)
    }

    /// The run that contains `host`: first host, count and state.
    pub(super) fn run(&self, host: HostNo) -> Option<(HostNo, u32, &Peer)> {
        let (first, (count, peer)) = self.runs.range(..=host).next_back()?;
        (host - first < *count).then_some((*first, *count, peer))
    }

    /// Creates those of the hosts that are unknown.
    pub(super) fn make(&mut self, first: HostNo, count: u32) {
        if self.run(first).is_some_and(|(at, len, _)| at + len >= first + count) {
            return;
        }
        let mut missing = Vec::new();
        let mut next = first;
        for (at, len, _) in self.among(first, count) {
            if at > next {
                missing.push((next, at - next));
            }
            next = at + len;
        }
        if next < first + count {
            missing.push((next, first + count - next));
        }
        for (first, count) in missing {
            self.runs.insert(first, (count, Peer::default()));
        }
    }

    /// Forgets a host.
    pub(super) fn remove(&mut self, host: HostNo) -> Option<Peer> {
        self.one(host)?;
        self.runs.remove(&host).map(|(_, peer)| peer)
    }

    /// Cuts runs at the first of the `count` hosts from `first` on, and after the last.
    fn cut_out(&mut self, first: HostNo, count: u32) {
        if self.runs.get(&first).is_none_or(|(len, _)| *len != count) {
            self.cut(first);
            self.cut(first + count);
        }
    }

    /// If `host` is inside a run, makes a run begin at it.
    fn cut(&mut self, host: HostNo) {
        let Some((first, (count, peer))) = self.runs.range_mut(..host).next_back() else { return };
        let before = host - first;
        if before >= *count {
            return;
        }
        let after = (*count - before, peer.clone());
        *count = before;
        if let Some(at) = peer.alarm {
            // The heap's entry may be for either part.
            self.alarms.push(Reverse((at, *first)));
            self.alarms.push(Reverse((at, host)));
        }
        self.runs.insert(host, after);
    }

    /// Joins runs that have become alike, among and next to the `count` hosts from `first` on.
    pub(super) fn join(&mut self, first: HostNo, count: u32) {
        let mut at = match self.runs.range(..first).next_back() {
            Some((before, _)) => *before,
            None => first,
        };
        // Including the run after the range.
        let end = first + count;
        while at < end {
            let Some((len, _)) = self.runs.get(&at) else { break };
            let next = at + len;
            let Some((_, other)) = self.runs.get(&next) else {
                match self.runs.range(next..).next() {
                    Some((further, _)) => at = *further,
                    None => break,
                }
                continue;
            };
            // Compare before removing anything: most neighbours differ.
            let alike = self.runs.get(&at).is_some_and(|(_, peer)| peer.is_like(other));
            if !alike {
                at = next;
                continue;
            }
            let Some((more, other)) = self.runs.remove(&next) else { break };
            if let Some((len, peer)) = self.runs.get_mut(&at) {
                peer.out.join(&other.out);
                peer.inc.join(&other.inc);
                *len += more;
                if let Some(alarm) = other.alarm
                    && peer.alarm.is_none_or(|mine| alarm < mine)
                {
                    peer.alarm = Some(alarm);
                }
            }
        }
    }
}
