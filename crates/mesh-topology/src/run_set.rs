//! A set of numbers, stored as runs of neighbours.

/// An unsigned number that a [`RunSet`] holds.
///
/// Ends of runs are computed in 64 bits, so the highest number of a narrower type needs no special case.
pub trait RunNumber: Copy + Ord {
    /// The number in 64 bits.
    fn widen(self) -> u64;

    /// A number or a count that is known to fit.
    fn narrow(wide: u64) -> Self;

    /// The `count` numbers from `self` on, the last of which must exist.
    fn run(self, count: Self) -> impl Iterator<Item = Self>;
}

macro_rules! run_number {
    ($($number:ty),*) => {$(
        impl RunNumber for $number {
            #[inline]
            fn widen(self) -> u64 {
                self as u64
            }

            #[inline]
            fn narrow(wide: u64) -> Self {
                debug_assert!(Self::try_from(wide).is_ok());
                wide as Self
            }

            #[inline]
            fn run(self, count: Self) -> impl Iterator<Item = Self> {
                (0..count).map(move |at| self + at)
            }
        }
    )*};
}

run_number!(u32, usize);

/// A set of ranks. The intersection of two views is not always a view, but it is always a set.
///
/// ```
/// # use mesh_topology::Slice;
/// let set = Slice::new(1, &[2, 2], &[4, 1])?.to_set();
/// assert_eq!(set.runs(), [(1, 2), (5, 2)]);
/// assert_eq!(set.len(), 4);
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
pub type RankSet = RunSet<usize>;

/// Numbers in ascending order, without duplicates. A run of neighbours takes one entry, and set operations cost as much
/// as there are runs, however many numbers they contain. No run ends above `u64::MAX`.
///
/// ```
/// # use mesh_topology::RunSet;
/// let set = RunSet::from_iter([3_u32, 1, 2, 7]);
/// assert_eq!(set.runs(), [(1, 3), (7, 1)]);
/// assert!(set.contains(2) && !set.contains(4));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RunSet<N> {
    /// First number and length of each run; runs neither overlap nor touch, and none is empty.
    runs: Vec<(N, N)>,
}

/// The first number after a run.
fn end<N: RunNumber>((first, len): (N, N)) -> u64 {
    first.widen() + len.widen()
}

/// The run of the numbers in `from..to`.
fn run<N: RunNumber>(from: u64, to: u64) -> (N, N) {
    (N::narrow(from), N::narrow(to - from))
}

impl<N: RunNumber> RunSet<N> {
    /// The empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { runs: Vec::new() }
    }

    /// A set of one number.
    #[must_use]
    pub fn one(number: N) -> Self {
        Self { runs: vec![(number, N::narrow(1))] }
    }

    /// `count` numbers from `first` on.
    #[must_use]
    pub fn range(first: N, count: N) -> Self {
        Self { runs: if count.widen() == 0 { Vec::new() } else { vec![(first, count)] } }
    }

    /// The numbers of all the runs, which may overlap and be in any order.
    #[must_use]
    pub fn from_runs(mut runs: Vec<(N, N)>) -> Self {
        // Nearly always one or two sorted lists, which makes this a merge.
        runs.sort();
        let mut set = Self { runs: Vec::with_capacity(runs.len()) };
        runs.into_iter().for_each(|run| set.append(run.0.widen(), end(run)));
        set
    }

    /// Adds a number that is above all others, or equal to the highest.
    ///
    /// # Panics
    /// If it is lower.
    pub fn push(&mut self, number: N) {
        if self.last() != Some(number) {
            self.push_run(number, N::narrow(1));
        }
    }

    /// Adds `count` numbers from `first` on, all above the existing ones.
    ///
    /// # Panics
    /// If one is not above them.
    pub fn push_run(&mut self, first: N, count: N) {
        assert!(
            count.widen() == 0 || self.last().is_none_or(|last| last < first),
            "numbers must be pushed in ascending order"
        );
        self.append(first.widen(), end((first, count)));
    }

    /// The runs: first number and length.
    #[must_use]
    pub fn runs(&self) -> &[(N, N)] {
        &self.runs
    }

    /// How many numbers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.iter().map(|(_, len)| usize::narrow(len.widen())).sum()
    }

    /// Whether it has no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The lowest number.
    #[must_use]
    pub fn first(&self) -> Option<N> {
        self.runs.first().map(|(first, _)| *first)
    }

    /// The highest number.
    #[must_use]
    pub fn last(&self) -> Option<N> {
        self.runs.last().map(|run| N::narrow(end(*run) - 1))
    }

    /// Whether `number` is in the set.
    #[must_use]
    pub fn contains(&self, number: N) -> bool {
        self.find(number).is_some()
    }

    /// Removes `number`. Returns whether it was in the set.
    pub fn remove(&mut self, number: N) -> bool {
        let Some(at) = self.find(number) else { return false };
        self.cut(at..at + 1, (number, N::narrow(1)));
        true
    }

    /// The numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = N> + '_ {
        self.runs.iter().flat_map(|&(first, len)| first.run(len))
    }

    /// The numbers in either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        Self::from_runs(self.runs.iter().chain(&other.runs).copied().collect())
    }

    /// Adds the numbers of another set. Cheap if that has few runs, even if this one has many.
    pub fn extend_by(&mut self, other: &Self) {
        if other.runs.len() > FEW {
            *self = self.union(other);
            return;
        }
        for &added in &other.runs {
            // Merge with the runs that it overlaps or touches.
            let from = self.runs.partition_point(|run| end(*run) < added.0.widen());
            let to = from + self.runs[from..].partition_point(|(first, _)| first.widen() <= end(added));
            let (mut low, mut high) = (added.0.widen(), end(added));
            if let [lowest, .., highest] | [lowest @ highest] = &self.runs[from..to] {
                (low, high) = (low.min(lowest.0.widen()), high.max(end(*highest)));
            }
            self.runs.splice(from..to, [run(low, high)]);
        }
    }

    /// Removes the numbers of another set. Cheap if that has few runs, even if this one has many.
    pub fn reduce_by(&mut self, other: &Self) {
        if other.runs.len() > FEW {
            *self = self.difference(other);
            return;
        }
        for &taken in &other.runs {
            let from = self.behind(taken.0);
            let to = from + self.runs[from..].partition_point(|(first, _)| first.widen() < end(taken));
            self.cut(from..to, taken);
        }
    }

    /// Whether any number is in both sets.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (few, many) = if self.runs.len() < other.runs.len() { (self, other) } else { (other, self) };
        few.runs.iter().any(|&run| many.runs.get(many.behind(run.0)).is_some_and(|(first, _)| first.widen() < end(run)))
    }

    /// The numbers in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let mut set = Self::new();
        let (mut a, mut b) = (0, 0);
        // Skip whatever lies before the other's first number, for when one list is long and the other short.
        if let (Some(mine), Some(theirs)) = (self.first(), other.first()) {
            (a, b) = (self.behind(theirs), other.behind(mine));
        }
        while let (Some(&mine), Some(&theirs)) = (self.runs.get(a), other.runs.get(b)) {
            set.append(mine.0.max(theirs.0).widen(), end(mine).min(end(theirs)));
            if end(mine) <= end(theirs) {
                a += 1;
            } else {
                b += 1;
            }
        }
        set
    }

    /// The numbers of this set that are not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut set = Self::new();
        let mut holes = other.runs.iter().peekable();
        for &run in &self.runs {
            let (mut start, stop) = (run.0.widen(), end(run));
            while let Some(&&hole) = holes.peek() {
                if hole.0.widen() >= stop {
                    break;
                }
                set.append(start, hole.0.widen());
                start = start.max(end(hole));
                if end(hole) > stop {
                    // It may also cut the next run.
                    break;
                }
                holes.next();
            }
            set.append(start, stop);
        }
        set
    }

    /// Cuts the set into at most `pieces` nonempty sets of nearly equal size, in ascending order.
    #[must_use]
    pub fn split(&self, pieces: usize) -> Vec<Self> {
        let total = self.len();
        let pieces = pieces.min(total);
        let mut runs = self.runs.iter().map(|&run| (run.0.widen(), end(run)));
        let mut rest = runs.next();
        let piece = |i: usize| {
            let mut wanted = (total / pieces + usize::from(i < total % pieces)).widen();
            let mut piece = Self::new();
            while let Some((first, end)) = rest.filter(|_| wanted > 0) {
                let to = end.min(first.saturating_add(wanted));
                piece.append(first, to);
                wanted -= to - first;
                rest = if to < end { Some((to, end)) } else { runs.next() };
            }
            piece
        };
        (0..pieces).map(piece).collect()
    }

    /// Adds `from..to`, which must not begin before the last run does. Merges runs that touch.
    pub(crate) fn append(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if end(*last) >= from => *last = run(last.0.widen(), to.max(end(*last))),
            _ => self.runs.push(run(from, to)),
        }
    }

    /// The index of the first run that does not lie wholly below `number`.
    fn behind(&self, number: N) -> usize {
        self.runs.partition_point(|run| end(*run) <= number.widen())
    }

    /// The index of the run that contains `number`.
    fn find(&self, number: N) -> Option<usize> {
        let at = self.runs.partition_point(|(first, _)| *first <= number).checked_sub(1)?;
        (number.widen() < end(self.runs[at])).then_some(at)
    }

    /// Removes a run from the runs at `place`, which are all those that it overlaps.
    fn cut(&mut self, place: std::ops::Range<usize>, taken: (N, N)) {
        let ([lowest, .., highest] | [lowest @ highest]) = &self.runs[place.clone()] else { return };
        let parts = [(lowest.0.widen(), taken.0.widen()), (end(taken), end(*highest))];
        self.runs.splice(place, parts.into_iter().filter(|(from, to)| from < to).map(|(from, to)| run(from, to)));
    }
}

/// Sets with up to this many runs are added or removed run by run, instead of rebuilding the set.
const FEW: usize = 4;

impl<N: RunNumber> FromIterator<N> for RunSet<N> {
    fn from_iter<I: IntoIterator<Item = N>>(numbers: I) -> Self {
        Self::from_runs(numbers.into_iter().map(|number| (number, N::narrow(1))).collect())
    }
}
