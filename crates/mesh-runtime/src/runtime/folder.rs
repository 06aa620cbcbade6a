//! The job's own folder on a host, and what its agent leaves there for the job's processes.

use super::Runtime;
use std::io;

/// Tells a fork server where it is.
pub(super) const SCRATCH: &str = "MESH_HOST_SCRATCH";
/// The newest list of revocations that the host was sent.
const REVOKED: &str = "revoked.crl";

impl Runtime {
    /// Has the job's processes on this host find a list of revocations.
    pub(crate) fn hand_on_revocations(&self, list: &[u8]) -> io::Result<()> {
        let Some(scratch) = self.home.get().and_then(|home| home.scratch.as_ref()) else { return Ok(()) };
        // Whole or not at all; it is signed, so that whoever reads it need not trust the file.
        let part = scratch.join(".revoked");
        std::fs::write(&part, list).and_then(|()| std::fs::rename(&part, scratch.join(REVOKED)))
    }
}
