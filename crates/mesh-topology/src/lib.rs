//! The geometry of meshes: named dimensions, coordinates and strided views of flat ranks.
//!
//! Everything here is arithmetic: no I/O, no clock, no Python, no unsafe code.
//!
//! | type | is |
//! | --- | --- |
//! | [`Extent`] | the ordered names and sizes of a mesh's dimensions |
//! | [`Point`] | one coordinate in an extent; its `rank` is the row-major index |
//! | [`Slice`] | a strided n-dimensional view of flat ranks, without names |
//! | [`Region`] (also [`Shape`]) | an extent laid over a slice: the part of a mesh that a cast names |
//! | [`RankSet`] | any set of ranks, as sorted runs: the result of set operations |
//! | [`RunSet`] | a set of any unsigned numbers, kept as sorted runs |
//!
//! Invariants, cited by the tests that check them:
//!
//! - `TOP-1`: a slice never includes a rank twice, so a rank has at most one position in it.
//! - `TOP-2`: every count, offset and rank fits in `isize`; nothing overflows after construction.
//! - `TOP-3`: decoding never panics, and never allocates more than its input can justify.
//!
//! ```
//! use mesh_topology::{Extent, Region, Selector, Span};
//!
//! let mesh = Region::whole(&Extent::new([("hosts", 2), ("gpus", 8)])?);
//! let even = mesh.slice(&[("gpus", Selector::Span(Span::every(2)))])?;
//! assert_eq!(even.extent().to_string(), "hosts=2, gpus=4");
//! assert_eq!(even.iter().collect::<Vec<_>>(), [0, 2, 4, 6, 8, 10, 12, 14]);
//! assert_eq!(even.position(10), Some(5));
//! # Ok::<(), mesh_topology::TopologyError>(())
//! ```

#![forbid(unsafe_code)]

mod error;
mod extent;
mod label;
mod point;
mod ranks;
mod region;
mod run_set;
mod select;
mod slice;
mod wire;

pub use error::{Result, TopologyError};
pub use extent::Extent;
pub use label::nearest;
pub use point::Point;
pub use ranks::Ranks;
pub use region::{Region, Shape};
pub use run_set::{RankSet, RunNumber, RunSet};
pub use select::{Selector, Span};
pub use slice::Slice;
pub use wire::Wire;

/// The most dimensions a mesh may have.
pub const MAX_DIMS: usize = 16;

/// The longest label, in bytes. Its length travels as one byte.
pub const MAX_LABEL_LEN: usize = 64;
