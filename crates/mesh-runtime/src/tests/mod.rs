//! The runtime without Python: two of them in one process, and its pieces alone.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod answers;
mod calls;
mod completion;
mod flow;
mod gateway;
mod inspect;
mod landing;
mod link;
mod logs;
mod moving;
mod nonsense;
mod order;
mod pair;
mod ports;
mod refs;
mod remote_meshes;
mod shm;
mod switch;
mod tasks;

use crate::Options;
use mesh_topology::{Extent, Region};
use std::time::{Duration, Instant};

/// What should be there at once has this long before the test fails instead of hanging.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) fn soon() -> Option<Instant> {
    Some(Instant::now() + SOON)
}

pub(crate) fn options() -> Options {
    Options {
        spin: Duration::ZERO,
        link_budget: 1 << 20,
        mailbox_budget: 4 << 20,
        reply_budget: u64::MAX,
        ref_budget: 64 << 20,
        shm_budget: 256 << 20,
        shm_threshold: 64 * 1024,
        shm_idle: Duration::from_secs(10),
    }
}

pub(crate) fn procs(n: usize) -> Region {
    Region::whole(&Extent::new([("procs", n)]).unwrap())
}
