//! What a gateway needs of the process that it is in.

use crate::calls::{Call, Outcome};
use crate::error::RuntimeError;
use crate::visits::Answerer;
use mesh_proto::{Frame, Header, HostEnd, HostNo, MeshId, Target};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the module. No lock of the gateway but the one for deliveries is held during a call.
pub(crate) trait Process: Answerer {
    /// A frame has arrived from another host, and goes on to whomever it is for on this one.
    fn arrived(&self, frame: Frame);
    /// The ranks of a mesh that are, or were, on this host.
    fn local_ranks(&self, mesh: MeshId) -> Range<u32>;
    /// Whether an answer to this process brings a value that other processes of this host asked for, too.
    fn awaits_copy(&self, header: &Header) -> bool;
    /// An answer has arrived: if it brings such a value, the others are answered. Returns it as it goes on.
    fn share_copy(&self, frame: Frame) -> Frame;
    /// A message cannot reach its receiver.
    fn bounce(&self, frame: &Frame, outcome: Outcome);
    /// At the controller: a host has said for the first time what it is called.
    fn host_attached(&self, host: HostNo, name: &str);
    /// A host is dead: what was owned from there ends.
    fn host_died(&self, host: HostNo, end: &HostEnd);
    /// The processes of a dead host are lost to this process, and to all others here.
    fn ranks_lost(&self, host: HostNo, end: &HostEnd);
    /// Opens a call to agents of other hosts.
    ///
    /// # Errors
    /// If the process takes no part in its job any more.
    fn open_call(&self, agents: Target) -> Result<Arc<Call>, RuntimeError>;
    /// Waits until a call is done.
    fn wait_for_call(&self, call: &Call, until: Instant);
    /// Ends the job's processes on this host, each in order within a time, and waits for that.
    fn vacate(&self, within: Duration, until: Instant);
}
