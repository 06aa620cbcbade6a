//! When to look at which of the other hosts.
//!
//! The cost of a tick depends on how much is due, not on the number of hosts.

use crate::HostNo;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

/// One deadline for each host, and the hosts that every tick looks at.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Earliest first. An entry that `deadlines` does not confirm is out of date.
    heap: BinaryHeap<Reverse<(Duration, HostNo)>>,
    deadlines: FxHashMap<HostNo, Duration>,
    watched: BTreeSet<HostNo>,
}

impl Schedule {
    /// Sets a host's deadline, replacing the previous one.
    pub(super) fn set(&mut self, host: HostNo, deadline: Option<Duration>) {
        match deadline {
            None => {
                self.deadlines.remove(&host);
            }
            Some(at) if self.deadlines.insert(host, at) != Some(at) => self.heap.push(Reverse((at, host))),
            Some(_) => {}
        }
    }

    /// Starts or stops looking at a host at every tick.
    pub(super) fn watch(&mut self, host: HostNo, watched: bool) {
        if watched {
            self.watched.insert(host);
        } else {
            self.watched.remove(&host);
        }
    }

    /// The earliest deadline.
    pub(super) fn next(&mut self) -> Option<Duration> {
        while let Some(Reverse((at, host))) = self.heap.peek() {
            if self.deadlines.get(host) == Some(at) {
                return Some(*at);
            }
            self.heap.pop();
        }
        None
    }

    /// The hosts to look at now, ascending. Their deadlines are used up.
    pub(super) fn take_due(&mut self, now: Duration) -> Vec<HostNo> {
        let mut due: Vec<HostNo> = self.watched.iter().copied().collect();
        while self.next().is_some_and(|at| at <= now) {
            if let Some(Reverse((_, host))) = self.heap.pop() {
                self.deadlines.remove(&host);
                due.push(host);
            }
        }
        due.sort_unstable();
        due.dedup();
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn the_last_deadline_that_was_set_counts() {
        let mut schedule = Schedule::default();
        schedule.set(1, Some(MS(10)));
        schedule.set(2, Some(MS(20)));
        schedule.set(1, Some(MS(30)));
        assert_eq!(schedule.next(), Some(MS(20)));
        assert_eq!(schedule.take_due(MS(25)), [2]);
        schedule.set(1, Some(MS(28)));
        assert_eq!(schedule.take_due(MS(40)), [1]);
        assert_eq!(schedule.next(), None, "each deadline is used up once");
        schedule.set(3, Some(MS(50)));
        schedule.set(3, None);
        assert_eq!((schedule.next(), schedule.take_due(MS(60))), (None, vec![]));
    }

    #[test]
    fn who_is_watched_is_due_at_every_tick_and_once() {
        let mut schedule = Schedule::default();
        schedule.watch(7, true);
        schedule.set(7, Some(MS(1)));
        schedule.set(3, Some(MS(1)));
        assert_eq!(schedule.take_due(MS(1)), [3, 7]);
        assert_eq!(schedule.take_due(MS(2)), [7]);
        schedule.watch(7, false);
        assert_eq!(schedule.take_due(MS(3)), []);
    }
}
