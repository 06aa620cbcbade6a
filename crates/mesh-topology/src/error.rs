//! Everything that can be wrong in a geometric operation.

use std::fmt::Write as _;

use crate::{MAX_DIMS, MAX_LABEL_LEN};

/// A result whose error is a [`TopologyError`].
pub type Result<T> = std::result::Result<T, TopologyError>;

/// Why a geometric operation was refused. Messages say what was asked, what exists and what to do next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// More dimensions than [`MAX_DIMS`].
    #[error("{got} dimensions; a mesh has at most {MAX_DIMS}")]
    TooManyDims {
        /// How many were given.
        got: usize,
    },
    /// Parallel lists of different lengths.
    #[error("{what} has {got} entries, but there are {expected} dimensions; give one for each")]
    LengthMismatch {
        /// The list that does not fit.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The number of dimensions.
        expected: usize,
    },
    /// A label that cannot name a dimension.
    #[error(
        "{label:?} cannot name a dimension: {why} (1 to {MAX_LABEL_LEN} bytes, no spaces, commas, equals signs or control characters)"
    )]
    BadLabel {
        /// The label, shortened if it is too long.
        label: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The same label twice.
    #[error("dimension '{label}' is named twice; every dimension of a mesh needs a name of its own")]
    DuplicateLabel {
        /// The label.
        label: String,
    },
    /// A product of sizes that does not fit.
    #[error("sizes {} multiply to more than {} elements", times(.sizes), isize::MAX)]
    TooLarge {
        /// The sizes.
        sizes: Vec<usize>,
    },
    /// A dimension that the mesh does not have.
    #[error("no dimension '{name}'; this mesh has {mesh}{}", did_you_mean(.nearest.as_deref()))]
    UnknownDim {
        /// The name that was asked for.
        name: String,
        /// The dimensions that exist, with their sizes.
        mesh: String,
        /// The closest existing name, if one is close.
        nearest: Option<String>,
    },
    /// A coordinate was not given.
    #[error("no coordinate for dimension '{dim}' of a mesh with {mesh}; give one for each dimension")]
    MissingCoord {
        /// The dimension without a coordinate.
        dim: String,
        /// The dimensions that exist, with their sizes.
        mesh: String,
    },
    /// An index outside its dimension.
    #[error("index {index} is out of range for {dim}={size}{}", valid_range(*.size, .dim))]
    IndexOutOfRange {
        /// The dimension.
        dim: String,
        /// The index asked for.
        index: isize,
        /// The size of the dimension.
        size: usize,
    },
    /// A rank or position outside the mesh.
    #[error("{what} {index} is out of range for a mesh of {len} ({mesh})")]
    RankOutOfRange {
        /// "rank" or "position".
        what: &'static str,
        /// What was asked for; saturated.
        index: isize,
        /// The number of elements.
        len: usize,
        /// The dimensions that exist, with their sizes.
        mesh: String,
    },
    /// A rank that a region does not contain.
    #[error("rank {rank} is not in this region ({region})")]
    NotInRegion {
        /// The rank; saturated.
        rank: isize,
        /// The region, described.
        region: String,
    },
    /// A span that selects nothing.
    #[error("{dim}={span} selects nothing of {dim}={size}; a slice of a mesh holds at least one element")]
    EmptySpan {
        /// The dimension.
        dim: String,
        /// The span, as Python writes it.
        span: String,
        /// The size of the dimension.
        size: usize,
    },
    /// A span with step zero.
    #[error("the slice of '{dim}' has step 0; a step must not be zero")]
    ZeroStep {
        /// The dimension.
        dim: String,
    },
    /// A split whose parts do not multiply to the size of what is split.
    #[error("{dim}={size} cannot be split into {parts}: {why}")]
    BadSplit {
        /// The dimension to split.
        dim: String,
        /// Its size.
        size: usize,
        /// The parts as far as they were given.
        parts: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A size for a dimension that a split does not create.
    #[error("a size is given for '{name}', but the split makes no such dimension; it makes: {parts}")]
    UnusedSize {
        /// The name with a size.
        name: String,
        /// The names that the split creates.
        parts: String,
    },
    /// A region whose ranks are not evenly spaced.
    #[error(
        "ranks of {region} are not evenly spaced, so they cannot form one dimension '{name}'; flatten first, then slice"
    )]
    NotFlat {
        /// The name for the flattened dimension.
        name: String,
        /// The region, described.
        region: String,
    },
    /// Strides that would include a rank more than once.
    #[error(
        "sizes {sizes:?} with strides {strides:?} name some ranks more than once; each stride must step over the whole reach of the smaller ones"
    )]
    Overlapping {
        /// The sizes.
        sizes: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// A slice that reaches below rank 0 or above the largest possible rank.
    #[error("offset {offset} with sizes {sizes:?} and strides {strides:?} reaches outside ranks 0 to {}", isize::MAX)]
    OutOfBounds {
        /// The offset.
        offset: usize,
        /// The sizes.
        sizes: Vec<usize>,
        /// The strides.
        strides: Vec<isize>,
    },
    /// Bytes that are not an encoding of the expected type.
    #[error("malformed {what}: {why}")]
    Malformed {
        /// What was being decoded.
        what: &'static str,
        /// What is wrong with the bytes.
        why: &'static str,
    },
}

/// A number for a message; out-of-range numbers are clamped.
pub(crate) fn saturated(number: usize) -> isize {
    isize::try_from(number).unwrap_or(isize::MAX)
}

fn times(sizes: &[usize]) -> String {
    let mut text = String::new();
    for (i, size) in sizes.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ = write!(text, "{}{size}", if i == 0 { "" } else { "×" });
    }
    text
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!(" — did you mean '{name}'?"))
}

fn valid_range(size: usize, dim: &str) -> String {
    match size {
        0 => format!("; '{dim}' is empty"),
        _ => format!("; valid are 0 to {} and -{size} to -1", size - 1),
    }
}
