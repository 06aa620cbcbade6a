//! Any set of ranks.

use std::fmt;
use std::ops::Range;

/// A set of ranks as sorted runs that neither touch nor overlap.
///
/// What two views have in common is not a view again in general, but it is always a set.
///
/// ```
/// # use mesh_topology::Slice;
/// let set = Slice::new(1, &[2, 2], &[4, 1])?.to_set();
/// assert_eq!(set.runs(), [1..3, 5..7]);
/// assert_eq!(set.len(), 4);
/// # Ok::<(), mesh_topology::TopologyError>(())
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

    /// The ranks in rising order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.runs.iter().cloned().flatten()
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

impl fmt::Debug for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(&self.runs).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranks: &[usize]) -> RankSet {
        let mut set = RankSet::new();
        ranks.iter().for_each(|&rank| set.push_run(rank..rank + 1));
        set
    }

    #[test]
    fn a_hole_may_cut_two_runs() {
        let runs = set(&[0, 1, 2, 5, 6, 7]);
        assert_eq!(runs.difference(&set(&[2, 3, 4, 5])).runs(), [0..2, 6..8]);
        assert_eq!(runs.intersection(&set(&[2, 3, 4, 5])).runs(), [2..3, 5..6]);
    }

    #[test]
    fn touching_runs_become_one() {
        assert_eq!(set(&[0, 1, 2, 3]).runs(), [Range { start: 0, end: 4 }]);
    }
}
