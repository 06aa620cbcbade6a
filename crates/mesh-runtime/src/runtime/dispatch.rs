//! How parts of a runtime send frames.

use super::Runtime;
use mesh_proto::Frame;

/// Takes frames of this process on their way.
pub(crate) trait Dispatch {
    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    fn dispatch(&self, frame: Frame) -> usize;
}

impl Dispatch for Runtime {
    fn dispatch(&self, frame: Frame) -> usize {
        Self::dispatch(self, frame, None)
    }
}
