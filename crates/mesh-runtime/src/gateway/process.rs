//! What a gateway needs of its process.

use crate::call::Call;
use crate::call::Outcome;
use crate::error::RuntimeError;
use crate::visits::Answerer;
use mesh_proto::{Frame, Header, HostEnd, HostNo, MeshId, Target};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the module. The gateway holds no lock during a call, except the one for deliveries.
pub(crate) trait Process: Answerer {
    /// Passes on a frame from another host to its receivers on this one.
    fn arrived(&self, frame: Frame);
    /// Returns the ranks of a mesh that are, or were, on this host.
    fn local_ranks(&self, mesh: MeshId) -> Range<u32>;
    /// Whether an answer to this process brings a value that other processes of this host also asked for.
    fn awaits_copy(&self, header: &Header) -> bool;
    /// Answers the others if a frame brings such a value. Returns the frame to pass on.
    fn share_copy(&self, frame: Frame) -> Frame;
    /// Handles a message that cannot reach its receiver.
    fn bounce(&self, frame: &Frame, outcome: Outcome);
    /// At the controller: a host introduced itself.
    fn host_attached(&self, host: HostNo, name: &str);
    /// Ends what was owned from a dead host.
    fn host_died(&self, host: HostNo, end: &HostEnd);
    /// Reports the processes of a dead host as lost to this process and all others here.
    fn ranks_lost(&self, host: HostNo, end: &HostEnd);
    /// Opens a call to agents of other hosts.
    ///
    /// # Errors
    /// If the process no longer takes part in its job.
    fn open_call(&self, agents: Target) -> Result<Arc<Call>, RuntimeError>;
    /// Waits until a call is done.
    fn wait_for_call(&self, call: &Call, until: Instant);
    /// Ends the job's processes on this host, each in order within `within`, and waits for that.
    fn vacate(&self, within: Duration, until: Instant);
}
