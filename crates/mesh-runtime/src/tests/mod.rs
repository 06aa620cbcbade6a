//! The runtime without Python: two of them in one process, and its parts alone.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod agent;
mod agent_schedules;
mod answering;
mod answers;
mod backlog;
mod calls;
mod collector;
mod completion;
#[path = "../../../mesh-proto/tests/support/dice.rs"]
mod dice;
mod direct;
mod flow;
mod gate;
mod gateway;
mod handling;
mod inspect;
mod landing;
mod landings;
mod link;
mod logs;
mod moving;
mod nonsense;
mod order;
mod outbox;
mod pair;
mod ports;
mod ports_schedules;
mod quiet;
mod refs;
mod remote_meshes;
mod sender;
mod shm;
mod switch;
mod tasks;
mod turns;
mod values;

use crate::Options;
use mesh_topology::{Extent, Region};
use std::time::{Duration, Instant};

/// How long to wait for something immediate before the test fails instead of hanging.
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
        direct_links: 64,
    }
}

pub(crate) fn procs(n: usize) -> Region {
    Region::whole(&Extent::new([("procs", n)]).unwrap())
}
