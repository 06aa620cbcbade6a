//! Any set of ranks.

use std::fmt;
use std::ops::Range;

/// A set of ranks as sorted runs that neither touch nor overlap.
///
/// What two views have in common is not a view again in general, but it is always a set.
///
/// ```
/// # use mesh_topology::RankSet;
/// let set: RankSet = [5, 1, 2, 3].into_iter().collect();
/// assert_eq!(set.runs(), [1..4, 5..6]);
/// assert_eq!(set.len(), 4);
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct RankSet {
    runs: Vec<Range<usize>>,
}

impl RankSet {
    /// The empty set.
    pub const fn new() -> Self {
        Self { runs: Vec::new() }
    }

    /// The runs in rising order.
    pub fn runs(&self) -> &[Range<usize>] {
        &self.runs
    }

    /// The number of ranks.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Whether it holds no rank.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether it holds this rank.
    pub fn contains(&self, rank: usize) -> bool {
        let next = self.runs.partition_point(|run| run.end <= rank);
        self.runs.get(next).is_some_and(|run| run.start <= rank)
    }

    /// The ranks in rising order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.runs.iter().cloned().flatten()
    }

    /// The ranks in either.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all: Vec<_> = self.runs.iter().chain(&other.runs).cloned().collect();
        all.sort_unstable_by_key(|run| run.start);
        let mut set = Self::new();
        all.into_iter().for_each(|run| set.push_run(run));
        set
    }

    /// The ranks in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut set = Self::new();
        let (mut a, mut b) = (self.runs.iter().peekable(), other.runs.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            set.push_run(x.start.max(y.start)..x.end.min(y.end));
            if x.end <= y.end {
                a.next()
            } else {
                b.next()
            };
        }
        set
    }

    /// The ranks in this set and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut set = Self::new();
        let mut holes = other.runs.iter().peekable();
        for run in &self.runs {
            let mut start = run.start;
            while let Some(hole) = holes.peek() {
                if hole.start >= run.end {
                    break;
                }
                set.push_run(start..hole.start);
                start = start.max(hole.end);
                if hole.end > run.end {
                    // It may cut the next run too.
                    break;
                }
                holes.next();
            }
            set.push_run(start..run.end);
        }
        set
    }

    /// Whether every rank of this set is in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.difference(other).is_empty()
    }

    /// Adds a run that begins no earlier than the last one; empty ones are left out, touching ones merged.
    pub(crate) fn push_run(&mut self, run: Range<usize>) {
        if run.is_empty() {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => self.runs.push(run),
        }
    }
}

impl FromIterator<usize> for RankSet {
    fn from_iter<I: IntoIterator<Item = usize>>(ranks: I) -> Self {
        let mut ranks: Vec<usize> = ranks.into_iter().collect();
        ranks.sort_unstable();
        let mut set = Self::new();
        // `usize::MAX` cannot be the start of a half-open run; no mesh has such a rank (TOP-2).
        ranks.into_iter().filter(|&rank| rank < usize::MAX).for_each(|rank| set.push_run(rank..rank + 1));
        set
    }
}

impl fmt::Debug for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(&self.runs).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranks: &[usize]) -> RankSet {
        ranks.iter().copied().collect()
    }

    #[test]
    fn membership_looks_between_runs_too() {
        let some = set(&[1, 2, 5]);
        let members: Vec<_> = (0..8).filter(|&r| some.contains(r)).collect();
        assert_eq!(members, [1, 2, 5]);
    }

    #[test]
    fn a_hole_may_cut_two_runs() {
        let runs = set(&[0, 1, 2, 5, 6, 7]);
        assert_eq!(runs.difference(&set(&[2, 3, 4, 5])).runs(), [0..2, 6..8]);
        assert_eq!(runs.intersection(&set(&[2, 3, 4, 5])).runs(), [2..3, 5..6]);
    }

    #[test]
    fn touching_runs_become_one() {
        assert_eq!(set(&[0, 1]).union(&set(&[2, 3])).runs(), [Range { start: 0, end: 4 }]);
    }
}
