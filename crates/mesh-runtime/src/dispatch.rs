//! How parts of a runtime send frames.

use mesh_proto::Frame;

/// Takes frames of this process on their way.
pub(crate) trait Dispatch {
    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    fn dispatch(&self, frame: Frame) -> usize;
}
