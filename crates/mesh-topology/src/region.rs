//! The part of a mesh that a message can address.

use std::fmt;

use crate::error::saturated;
use crate::select::pick_index;
use crate::{Extent, Point, Ranks, Result, Selector, Slice, TopologyError};

/// Named dimensions laid over a strided view of a mesh's flat ranks.
///
/// Ranks are always those of the original mesh, however often it is sliced; positions are row-major within the region.
/// Clones share memory.
///
/// ```
/// # use mesh_topology::{Extent, Region, Selector, Span};
/// let mesh = Region::whole(&Extent::new([("hosts", 2), ("gpus", 8)])?);
/// let host = mesh.slice(&[("hosts", Selector::At(1))])?;
/// assert_eq!(host.iter().collect::<Vec<_>>(), [8, 9, 10, 11, 12, 13, 14, 15]);
/// let pairs = host.split("gpus", &[("pair", None), ("member", Some(2))])?;
/// assert_eq!(pairs.point_of(11)?.to_string(), "pair=1, member=1 of 4×2");
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Region {
    /// Its sizes always equal those of `slice`.
    extent: Extent,
    slice: Slice,
}

/// Another name for [`Region`]: a shape consists of labels and a slice.
pub type Shape = Region;

impl Region {
    /// Labels over a view; one label for each dimension.
    pub fn new<S: AsRef<str>>(labels: &[S], slice: Slice) -> Result<Self> {
        if labels.len() != slice.ndim() {
            return Err(TopologyError::LengthMismatch { what: "labels", got: labels.len(), expected: slice.ndim() });
        }
        Ok(Self { extent: Extent::from_parts(labels, slice.sizes())?, slice })
    }

    /// The whole mesh.
    pub fn whole(extent: &Extent) -> Self {
        // An extent has passed every check of a row-major slice, so this cannot fail.
        let slice = Slice::row_major(extent.sizes()).unwrap_or_else(|error| unreachable!("{error}"));
        Self { extent: extent.clone(), slice }
    }

    /// The names and sizes.
    pub fn extent(&self) -> &Extent {
        &self.extent
    }

    /// The view beneath the names.
    pub fn as_slice(&self) -> &Slice {
        &self.slice
    }

    /// The number of ranks.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no rank.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// The ranks in row-major order of the region.
    pub fn iter(&self) -> Ranks {
        self.slice.iter()
    }

    /// Whether it has this rank.
    pub fn contains(&self, rank: usize) -> bool {
        self.slice.contains(rank)
    }

    /// The position of a rank within the region.
    pub fn position(&self, rank: usize) -> Option<usize> {
        self.slice.position(rank)
    }

    /// The rank at a position within the region.
    pub fn rank_at(&self, position: usize) -> Result<usize> {
        self.slice.rank_at(position).ok_or_else(|| TopologyError::RankOutOfRange {
            what: "position",
            index: saturated(position),
            len: self.len(),
            mesh: self.extent.describe(),
        })
    }

    /// The coordinates within the region of a rank of the mesh.
    pub fn point_of(&self, rank: usize) -> Result<Point> {
        match self.position(rank) {
            Some(position) => Ok(Point::trusted(self.extent.clone(), position)),
            None => Err(TopologyError::NotInRegion { rank: saturated(rank), region: self.to_string() }),
        }
    }

    /// Keeps part of some dimensions: an index drops its dimension, a span keeps it.
    pub fn slice(&self, selectors: &[(&str, Selector)]) -> Result<Self> {
        let mut chosen = vec![None; self.extent.ndim()];
        for &(label, selector) in selectors {
            if chosen[self.extent.expect_axis(label)?].replace(selector).is_some() {
                return Err(TopologyError::DuplicateLabel { label: label.to_owned() });
            }
        }
        let mut offset = self.slice.offset().cast_signed();
        let (mut labels, mut sizes, mut strides) = (Vec::new(), Vec::new(), Vec::new());
        for (((label, size), &stride), selector) in self.extent.dims().zip(self.slice.strides()).zip(chosen) {
            let (first, kept) = match selector {
                None => (0, Some((size, stride))),
                Some(Selector::At(index)) => (pick_index(index, label, size)?, None),
                Some(Selector::Span(span)) => {
                    let picked = span.pick(label, size)?;
                    // A step that is never taken is omitted, so that it cannot overflow.
                    let stride = if picked.count > 1 { stride * picked.step } else { stride };
                    (picked.first, Some((picked.count, stride)))
                }
            };
            if first > 0 {
                // `first` is an index in this dimension, so its offset is within bounds (TOP-2).
                offset = offset.wrapping_add(first.cast_signed().wrapping_mul(stride));
            }
            if let Some((size, stride)) = kept {
                labels.push(label);
                sizes.push(size);
                strides.push(stride);
            }
        }
        Self::new(&labels, Slice::new(offset.cast_unsigned(), &sizes, &strides)?)
    }

    /// Replaces one dimension by several, outermost first; at most one size may be omitted and inferred.
    pub fn split(&self, dim: &str, parts: &[(&str, Option<usize>)]) -> Result<Self> {
        let axis = self.extent.expect_axis(dim)?;
        let size = self.extent.sizes()[axis];
        let sizes = split_sizes(size, parts).map_err(|why| TopologyError::BadSplit {
            dim: dim.to_owned(),
            size,
            parts: describe_parts(parts),
            why,
        })?;
        let mut part_strides = vec![0; sizes.len()];
        let mut stride = self.slice.strides()[axis];
        for (part_stride, &part) in part_strides.iter_mut().zip(&sizes).rev() {
            *part_stride = stride;
            // A stride past the last part is never taken; earlier ones stay within bounds (TOP-2).
            stride = stride.wrapping_mul(part.cast_signed());
        }
        let mut labels: Vec<&str> = self.extent.labels().collect();
        labels.splice(axis..=axis, parts.iter().map(|&(label, _)| label));
        let mut all_sizes = self.slice.sizes().to_vec();
        all_sizes.splice(axis..=axis, sizes);
        let mut strides = self.slice.strides().to_vec();
        strides.splice(axis..=axis, part_strides);
        Self::new(&labels, Slice::new(self.slice.offset(), &all_sizes, &strides)?)
    }

    /// Splits any number of dimensions at once, with the new sizes given by name, like
    /// `split(hosts=("rack", "host"), host=2)` in Python.
    ///
    /// ```
    /// # use mesh_topology::{Extent, Region};
    /// let mesh = Region::whole(&Extent::new([("hosts", 4), ("gpus", 8)])?);
    /// let split = mesh.split_named(&[("hosts", vec!["rack", "host"])], &[("host", 2)])?;
    /// assert_eq!(split.extent().to_string(), "rack=2, host=2, gpus=8");
    /// # Ok::<(), mesh_topology::TopologyError>(())
    /// ```
    pub fn split_named(&self, splits: &[(&str, Vec<&str>)], sizes: &[(&str, usize)]) -> Result<Self> {
        for (i, &(name, _)) in sizes.iter().enumerate() {
            if sizes[..i].iter().any(|&(other, _)| other == name) {
                return Err(TopologyError::DuplicateLabel { label: name.to_owned() });
            }
            if !splits.iter().any(|(_, parts)| parts.contains(&name)) {
                return Err(TopologyError::UnusedSize {
                    name: name.to_owned(),
                    parts: splits.iter().flat_map(|(_, parts)| parts).copied().collect::<Vec<_>>().join(", "),
                });
            }
        }
        splits.iter().try_fold(self.clone(), |region, (dim, parts)| {
            let size_of = |part| sizes.iter().find(|&&(name, _)| name == part).map(|&(_, size)| size);
            let parts: Vec<_> = parts.iter().map(|&part| (part, size_of(part))).collect();
            region.split(dim, &parts)
        })
    }

    /// Merges all dimensions into one, in row-major order; the ranks must be evenly spaced.
    pub fn flatten(&self, name: &str) -> Result<Self> {
        let mut stride = 1;
        let mut taken: Option<isize> = None;
        for (&size, &step) in self.slice.sizes().iter().zip(self.slice.strides()).rev() {
            if size == 1 || self.is_empty() {
                continue;
            }
            match taken {
                None => stride = step,
                Some(next) if next == step => {}
                Some(_) => {
                    return Err(TopologyError::NotFlat { name: name.to_owned(), region: self.to_string() });
                }
            }
            // Overflow means a step that no next dimension can have.
            taken = Some(step.checked_mul(size.cast_signed()).unwrap_or(0));
        }
        Self::new(&[name], Slice::new(self.slice.offset(), &[self.len()], &[stride])?)
    }

    /// Renames dimensions, all at once, so that two may swap names.
    pub fn rename(&self, names: &[(&str, &str)]) -> Result<Self> {
        let mut labels: Vec<&str> = self.extent.labels().collect();
        for (i, &(from, to)) in names.iter().enumerate() {
            if names[..i].iter().any(|&(other, _)| other == from) {
                return Err(TopologyError::DuplicateLabel { label: from.to_owned() });
            }
            labels[self.extent.expect_axis(from)?] = to;
        }
        Self::new(&labels, self.slice.clone())
    }
}

/// The size of each part, or why there is none.
fn split_sizes(size: usize, parts: &[(&str, Option<usize>)]) -> std::result::Result<Vec<usize>, &'static str> {
    let known = parts
        .iter()
        .filter_map(|&(_, part)| part)
        .try_fold(1_usize, |product, part| product.checked_mul(part))
        .ok_or("the given sizes multiply to too many")?;
    match parts.iter().filter(|(_, part)| part.is_none()).count() {
        0 if parts.is_empty() => Err("name at least one new dimension"),
        0 if known == size => Ok(parts.iter().filter_map(|&(_, part)| part).collect()),
        0 => Err("the sizes do not multiply to it"),
        1 if known == 0 => Err("a part of size 0 leaves the other undetermined"),
        1 if size.is_multiple_of(known) => Ok(parts.iter().map(|&(_, part)| part.unwrap_or(size / known)).collect()),
        1 => Err("the given sizes do not divide it"),
        _ => Err("only one size can be inferred; give the others"),
    }
}

fn describe_parts(parts: &[(&str, Option<usize>)]) -> String {
    let part = |&(label, size): &(&str, Option<usize>)| match size {
        Some(size) => format!("{label}={size}"),
        None => format!("{label}=?"),
    };
    format!("({})", parts.iter().map(part).collect::<Vec<_>>().join(", "))
}

/// `hosts=2, gpus=4 of ranks 0..=11` if there are gaps; `hosts=2, gpus=8` for a whole mesh from rank 0.
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bounds = self.slice.bounds();
        let whole = self.slice == *Region::whole(&self.extent).as_slice();
        match (self.extent.ndim(), self.len(), whole) {
            (0, ..) => write!(f, "rank {}", self.slice.offset()),
            (_, 0, _) | (_, _, true) => write!(f, "{}", self.extent),
            (_, 1, _) => write!(f, "{} at rank {}", self.extent, bounds.start),
            _ => write!(f, "{} in ranks {} to {}", self.extent, bounds.start, bounds.end - 1),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({self})")
    }
}

impl IntoIterator for &Region {
    type Item = usize;
    type IntoIter = Ranks;

    fn into_iter(self) -> Ranks {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Span;

    fn mesh() -> Region {
        Region::whole(&Extent::new([("hosts", 2), ("gpus", 8)]).unwrap())
    }

    fn ranks(region: &Region) -> Vec<usize> {
        region.iter().collect()
    }

    #[test]
    fn slicing_a_slice_keeps_the_ranks_of_the_mesh() {
        let some = mesh().slice(&[("gpus", Selector::Span(Span::range(2, 6)))]).unwrap();
        let one = some.slice(&[("gpus", Selector::At(-1)), ("hosts", Selector::Span(Span::every(-1)))]).unwrap();
        assert_eq!(ranks(&one), [13, 5]);
        assert_eq!(one.to_string(), "hosts=2 in ranks 5 to 13");
        let point = one.slice(&[("hosts", Selector::At(0))]).unwrap();
        assert_eq!((point.extent().ndim(), ranks(&point)), (0, vec![13]));
        assert_eq!(point.to_string(), "rank 13");
    }

    #[test]
    fn one_size_of_a_split_is_inferred() {
        let region = mesh().split("gpus", &[("a", Some(2)), ("b", None), ("c", Some(2))]).unwrap();
        assert_eq!(region.extent().to_string(), "hosts=2, a=2, b=2, c=2");
        assert_eq!(ranks(&region), ranks(&mesh()));
    }

    #[test]
    fn a_split_that_does_not_fit_says_why() {
        let error = |parts: &[(&str, Option<usize>)]| mesh().split("gpus", parts).unwrap_err().to_string();
        assert_eq!(
            error(&[("a", Some(3)), ("b", None)]),
            "gpus=8 cannot be split into (a=3, b=?): the given sizes do not divide it"
        );
        assert!(error(&[("a", None), ("b", None)]).ends_with("only one size can be inferred; give the others"));
        assert!(error(&[("a", Some(2)), ("b", Some(2))]).ends_with("the sizes do not multiply to it"));
        assert!(error(&[("a", Some(0)), ("b", None)]).contains("undetermined"));
        assert!(error(&[("a", Some(usize::MAX)), ("b", Some(2))]).contains("too many"));
        assert!(error(&[]).contains("at least one"));
        assert!(error(&[("hosts", Some(4)), ("b", None)]).contains("'hosts' is named twice"));
    }

    #[test]
    fn sizes_find_their_parts_by_name() {
        let split =
            mesh().split_named(&[("gpus", vec!["a", "b"]), ("hosts", vec!["x", "y"])], &[("y", 2), ("a", 4)]).unwrap();
        assert_eq!(split.extent().to_string(), "x=1, y=2, a=4, b=2");
        let error = |sizes: &[(&str, usize)]| mesh().split_named(&[("gpus", vec!["a", "b"])], sizes).unwrap_err();
        assert_eq!(
            error(&[("c", 2)]).to_string(),
            "a size is given for 'c', but the split makes no such dimension; it makes: a, b"
        );
        assert!(matches!(error(&[("a", 2), ("a", 2)]), TopologyError::DuplicateLabel { .. }));
    }

    #[test]
    fn evenly_spaced_ranks_flatten_and_others_do_not() {
        assert_eq!(mesh().flatten("all").unwrap().extent().to_string(), "all=16");
        let even = mesh().slice(&[("gpus", Selector::Span(Span::every(2)))]).unwrap();
        assert_eq!(ranks(&even.flatten("all").unwrap()), ranks(&even));
        let half = mesh().slice(&[("gpus", Selector::Span(Span::range(0, 4)))]).unwrap();
        assert_eq!(
            half.flatten("all").unwrap_err().to_string(),
            "ranks of hosts=2, gpus=4 in ranks 0 to 11 are not evenly spaced, so they cannot form one dimension \
             'all'; flatten first, then slice"
        );
    }

    #[test]
    fn names_can_be_swapped() {
        let swapped = mesh().rename(&[("hosts", "gpus"), ("gpus", "hosts")]).unwrap();
        assert_eq!(swapped.extent().to_string(), "gpus=2, hosts=8");
        assert!(matches!(mesh().rename(&[("hosts", "gpus")]), Err(TopologyError::DuplicateLabel { .. })));
        assert!(mesh().rename(&[("hosts", "a"), ("hosts", "b")]).is_err());
    }

    #[test]
    fn a_rank_outside_is_told_what_the_region_is() {
        let host = mesh().slice(&[("hosts", Selector::At(1))]).unwrap();
        assert_eq!(host.point_of(3).unwrap_err().to_string(), "rank 3 is not in this region (gpus=8 in ranks 8 to 15)");
        assert!(host.rank_at(8).is_err());
    }

    #[test]
    fn a_step_that_is_never_taken_is_left_out() {
        let far = |hosts| mesh().slice(&[("hosts", Selector::Span(Span::new(Some(1), None, Some(hosts))))]).unwrap();
        assert_eq!(far(isize::MAX), far(1));
        assert_eq!(ranks(&far(isize::MAX)), (8..16).collect::<Vec<_>>());
        let both = mesh().slice(&[("hosts", Selector::Span(Span::every(-1)))]).unwrap();
        assert_eq!(ranks(&both)[..9], [8, 9, 10, 11, 12, 13, 14, 15, 0], "of two, the step is taken");
    }

    #[test]
    fn the_same_dimension_cannot_be_sliced_twice_at_once() {
        let both = [("gpus", Selector::At(0)), ("gpus", Selector::At(1))];
        assert!(matches!(mesh().slice(&both), Err(TopologyError::DuplicateLabel { .. })));
    }
}
