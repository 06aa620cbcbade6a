//! How this process proves to processes on other hosts that it belongs to their job.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What this process needs to be let in elsewhere, and to let others in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The folder with the job's authority, its list of revocations, and a member's certificate and key.
    pub credentials: PathBuf,
    /// Where newer lists of revocations appear, if anywhere.
    pub revocations: Option<PathBuf>,
    /// This host's addresses as others reach it, the likeliest first.
    pub addresses: Vec<IpAddr>,
    /// How long a host may be silent before it counts as dead.
    pub silence: Duration,
}
