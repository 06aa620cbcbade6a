//! A set of hosts, kept as runs of neighbouring numbers.

use crate::HostNo;

mod ops;

/// Host numbers in ascending order, without duplicates; a run of neighbours takes one entry.
///
/// ```
/// # use mesh_proto::hosts::HostSet;
/// let hosts = HostSet::from_iter([3, 1, 2, 7]);
/// assert_eq!(hosts.runs(), [(1, 3), (7, 1)]);
/// assert!(hosts.contains(2) && !hosts.contains(4));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostSet {
    /// First number and length of each run; neither overlapping nor touching.
    runs: Vec<(HostNo, u32)>,
}

impl HostSet {
    /// One host.
    #[must_use]
    pub fn one(host: HostNo) -> Self {
        Self { runs: vec![(host, 1)] }
    }

    /// `count` hosts from `first` on.
    #[must_use]
    pub fn range(first: HostNo, count: u32) -> Self {
        Self { runs: if count == 0 { Vec::new() } else { vec![(first, count)] } }
    }

    /// Adds a host that is above, or the same as, the highest so far.
    ///
    /// # Panics
    /// If it is below.
    pub fn push(&mut self, host: HostNo) {
        match self.runs.last_mut() {
            Some((first, len)) if host == *first + *len => *len += 1,
            Some((first, len)) => {
                assert!(host >= *first + *len - 1, "hosts are pushed in ascending order");
                if host >= *first + *len {
                    self.runs.push((host, 1));
                }
            }
            None => self.runs.push((host, 1)),
        }
    }

    /// Adds `count` hosts from `first` on, all of them above the highest so far.
    ///
    /// # Panics
    /// If one is not.
    pub fn push_run(&mut self, first: HostNo, count: u32) {
        match self.runs.last_mut() {
            _ if count == 0 => {}
            Some((last, len)) if first == *last + *len => *len += count,
            Some((last, len)) => {
                assert!(first > *last + *len, "hosts are pushed in ascending order");
                self.runs.push((first, count));
            }
            None => self.runs.push((first, count)),
        }
    }

    /// The runs: first number and length.
    #[must_use]
    pub fn runs(&self) -> &[(HostNo, u32)] {
        &self.runs
    }

    /// How many hosts there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.iter().map(|(_, len)| *len as usize).sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The lowest.
    #[must_use]
    pub fn first(&self) -> Option<HostNo> {
        self.runs.first().map(|(first, _)| *first)
    }

    /// Whether `host` is one of them.
    #[must_use]
    pub fn contains(&self, host: HostNo) -> bool {
        let at = self.runs.partition_point(|(first, _)| *first <= host);
        at > 0 && host - self.runs[at - 1].0 < self.runs[at - 1].1
    }

    /// Takes `host` out; whether it was there.
    pub fn remove(&mut self, host: HostNo) -> bool {
        let at = self.runs.partition_point(|(first, _)| *first <= host);
        let Some((first, len)) = at.checked_sub(1).map(|at| self.runs[at]) else { return false };
        if host - first >= len {
            return false;
        }
        let (before, after) = (host - first, len - (host - first) - 1);
        let parts = [(first, before), (host + 1, after)];
        self.runs.splice(at - 1..at, parts.into_iter().filter(|(_, len)| *len > 0));
        true
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = HostNo> + '_ {
        self.runs.iter().flat_map(|(first, len)| *first..*first + *len)
    }
}

impl FromIterator<HostNo> for HostSet {
    fn from_iter<I: IntoIterator<Item = HostNo>>(hosts: I) -> Self {
        let mut all: Vec<HostNo> = hosts.into_iter().collect();
        all.sort_unstable();
        let mut set = Self::default();
        all.into_iter().for_each(|host| set.push(host));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_removed_is_gone_and_nothing_else() {
        for gone in 0..20 {
            let mut set = HostSet::from_iter([1, 2, 3, 4, 8, 10, 11]);
            let mut model: Vec<HostNo> = set.iter().collect();
            let was = model.contains(&gone);
            model.retain(|host| *host != gone);
            assert_eq!(set.remove(gone), was);
            assert_eq!(set.iter().collect::<Vec<_>>(), model);
            assert_eq!(set.len(), model.len());
            assert!((0..20).all(|host| set.contains(host) == model.contains(&host)));
            assert_eq!(set, HostSet::from_iter(model));
        }
    }

    #[test]
    fn the_same_host_twice_counts_once() {
        assert_eq!(HostSet::from_iter([5, 5, 6, 6]).runs(), [(5, 2)]);
    }
}
