//! What sets of hosts have in common, and what not; the work goes with the runs, never with the hosts.

use super::HostSet;
use crate::HostNo;

impl HostSet {
    /// The hosts of all the runs, which may overlap and come in any order.
    #[must_use]
    pub fn from_runs(mut runs: Vec<(HostNo, u32)>) -> Self {
        runs.retain(|(_, len)| *len > 0);
        // Nearly always one or two lists that are in order: then this is a merge.
        runs.sort();
        let mut set = Self { runs: Vec::with_capacity(runs.len()) };
        for (first, len) in runs {
            set.append(u64::from(first), end(first, len));
        }
        set
    }

    /// The hosts that are in one of the two, or in both.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::from_runs(self.runs.iter().chain(&other.runs).copied().collect())
    }

    /// Adds the hosts of another set; a few runs to many cost little.
    pub fn extend_by(&mut self, other: &Self) {
        if other.runs.len() > 4 {
            *self = self.union(other);
            return;
        }
        for &(first, len) in &other.runs {
            // The runs that it overlaps or touches become one with it.
            let from = self.runs.partition_point(|(at, count)| end(*at, *count) < u64::from(first));
            let to = from + self.runs[from..].partition_point(|(at, _)| u64::from(*at) <= end(first, len));
            let (mut low, mut high) = (first, end(first, len));
            if let [(at, _), ..] = self.runs[from..to] {
                low = low.min(at);
            }
            if let [.., (at, count)] = self.runs[from..to] {
                high = high.max(end(at, count));
            }
            self.runs.splice(from..to, [(low, narrow(high - u64::from(low)))]);
        }
    }

    /// Takes out the hosts of another set; a few runs of many cost little.
    pub fn reduce_by(&mut self, other: &Self) {
        if other.runs.len() > 4 {
            *self = self.difference(other);
            return;
        }
        for &(first, len) in &other.runs {
            let from = self.runs.partition_point(|(at, count)| end(*at, *count) <= u64::from(first));
            let to = from + self.runs[from..].partition_point(|(at, _)| u64::from(*at) < end(first, len));
            if from < to {
                let rest = Self { runs: self.runs[from..to].to_vec() }.difference(&Self { runs: vec![(first, len)] });
                self.runs.splice(from..to, rest.runs);
            }
        }
    }

    /// Whether any host is in both.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (few, many) = if self.runs.len() < other.runs.len() { (self, other) } else { (other, self) };
        few.runs.iter().any(|&(first, len)| {
            let at = many.runs.partition_point(|(at, count)| end(*at, *count) <= u64::from(first));
            many.runs.get(at).is_some_and(|(at, _)| u64::from(*at) < end(first, len))
        })
    }

    /// The hosts that are in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut set = Self::default();
        let (mut a, mut b) = (0, 0);
        // From far down a long list to a short one: nothing before the short one's beginning counts.
        if let (Some(mine), Some(theirs)) = (self.first(), other.first()) {
            a = self.runs.partition_point(|(first, len)| end(*first, *len) <= u64::from(theirs));
            b = other.runs.partition_point(|(first, len)| end(*first, *len) <= u64::from(mine));
        }
        while let (Some(&(first, len)), Some(&(others, count))) = (self.runs.get(a), other.runs.get(b)) {
            let (ends, theirs) = (end(first, len), end(others, count));
            set.append(u64::from(first.max(others)), ends.min(theirs));
            if ends <= theirs {
                a += 1;
            } else {
                b += 1;
            }
        }
        set
    }

    /// The hosts of this set that are not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut set = Self::default();
        let mut b = 0;
        for &(first, len) in &self.runs {
            let (mut at, ends) = (u64::from(first), end(first, len));
            while let Some(&(others, count)) = other.runs.get(b) {
                if u64::from(others) >= ends {
                    break;
                }
                set.append(at, u64::from(others));
                at = at.max(end(others, count));
                if end(others, count) > ends {
                    break;
                }
                b += 1;
            }
            set.append(at, ends);
        }
        set
    }

    /// Cuts the set into at most `pieces` of nearly equal size, in ascending order; none of them empty.
    #[must_use]
    pub fn split(&self, pieces: usize) -> Vec<Self> {
        let total = self.len();
        let pieces = pieces.min(total);
        let mut out = Vec::with_capacity(pieces);
        let mut runs = self.runs.iter().copied();
        let mut rest = runs.next();
        for i in 0..pieces {
            let mut wanted = total / pieces + usize::from(i < total % pieces);
            let mut piece = Self::default();
            while let Some((first, len)) = rest.filter(|_| wanted > 0) {
                let taken = len.min(u32::try_from(wanted).unwrap_or(u32::MAX));
                piece.append(u64::from(first), end(first, taken));
                wanted -= taken as usize;
                rest = if taken < len { Some((first + taken, len - taken)) } else { runs.next() };
            }
            out.push(piece);
        }
        out
    }

    /// Puts `from..to` behind what is there, which ends no later than `to` and begins no later than `from`.
    fn append(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let from = match self.runs.last_mut() {
            Some((first, len)) if end(*first, *len) >= from => {
                if end(*first, *len) < to {
                    *len = narrow(to - u64::from(*first));
                }
                return;
            }
            _ => from,
        };
        self.runs.push((narrow(from), narrow(to - from)));
    }
}

/// The first number behind a run; one more than a host number can be, at most.
fn end(first: HostNo, len: u32) -> u64 {
    u64::from(first) + u64::from(len)
}

/// Of a number or a length within the numbers of hosts.
fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Numbers from a seed, the same with every run.
    fn dice(seed: &mut u64) -> u32 {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(*seed >> 33).unwrap()
    }

    fn some(seed: &mut u64) -> (HostSet, BTreeSet<HostNo>) {
        let runs: Vec<(HostNo, u32)> = (0..dice(seed) % 6).map(|_| (dice(seed) % 40, dice(seed) % 8)).collect();
        let model = runs.iter().flat_map(|(first, len)| *first..first + len).collect();
        (HostSet::from_runs(runs), model)
    }

    #[test]
    fn operations_agree_with_those_on_plain_sets() {
        let mut seed = 7;
        for _ in 0..20_000 {
            let (a, model_a) = some(&mut seed);
            let (b, model_b) = some(&mut seed);
            assert_eq!(a, HostSet::from_iter(model_a.iter().copied()));
            assert_eq!(a.union(&b), HostSet::from_iter(model_a.union(&model_b).copied()));
            assert_eq!(a.intersection(&b), HostSet::from_iter(model_a.intersection(&model_b).copied()));
            assert_eq!(a.overlaps(&b), !model_a.is_disjoint(&model_b));
            let (mut more, mut less) = (a.clone(), a.clone());
            more.extend_by(&b);
            less.reduce_by(&b);
            assert_eq!((more, less), (a.union(&b), a.difference(&b)));
            assert_eq!(a.difference(&b), HostSet::from_iter(model_a.difference(&model_b).copied()));
            let pieces = 1 + dice(&mut seed) as usize % 9;
            let parts = a.split(pieces);
            assert_eq!(parts.len(), pieces.min(a.len()));
            assert!(parts.iter().all(|part| !part.is_empty() && part.len() <= a.len().div_ceil(pieces)));
            assert_eq!(parts.iter().flat_map(HostSet::iter).collect::<Vec<_>>(), a.iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_highest_number_is_a_host_like_any_other() {
        let top = HostSet::from_runs(vec![(HostNo::MAX, 1), (HostNo::MAX - 1, 1)]);
        assert_eq!(top.runs(), [(HostNo::MAX - 1, 2)]);
        assert_eq!(top.difference(&HostSet::one(HostNo::MAX)).runs(), [(HostNo::MAX - 1, 1)]);
        assert_eq!(top.intersection(&HostSet::one(HostNo::MAX)).runs(), [(HostNo::MAX, 1)]);
    }
}
