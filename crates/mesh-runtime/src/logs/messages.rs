//! What is said of lines between hosts; the frames are [`Lines`].

use super::behind::CatchUp;
use crate::completion::Completion;
use bytes::Bytes;
use mesh_proto::control::Lines;
use mesh_proto::logs::LogOptions;
use mesh_proto::{HostNo, MeshId};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What others have said, for the thread.
#[derive(Debug)]
pub(crate) enum Order {
    Found(HostNo, Bytes),
    More,
    Flush(u64),
    Report(MeshId, u64),
    Set(MeshId, LogOptions),
    Dead(HostNo),
    /// From this process: see [`CatchUp`].
    CatchUp(CatchUp),
}

impl Order {
    /// What waits for the order to be done, if anything does.
    pub(super) fn waits(self) -> Option<Arc<Completion>> {
        match self {
            Self::CatchUp(wait) => Some(wait.done),
            _ => None,
        }
    }
}

/// What the thread says to others.
#[derive(Debug)]
pub(super) enum Mail {
    Found(Vec<u8>),
    More(HostNo),
    Report(HostNo, MeshId, u64),
    Set(MeshId, LogOptions),
}

/// The other hosts of the job, to whoever reads logs.
pub(crate) trait LogPeers: std::fmt::Debug + Send + Sync {
    /// At the controller: the hosts that can be asked for what was written there. Elsewhere nobody asks.
    fn hosts(&self) -> Vec<HostNo>;
    /// Says something to a host's agent.
    fn send(&self, host: HostNo, said: &Lines);
    /// At the controller: says something to all other agents.
    fn cast(&self, said: &Lines);
    /// Has polls of the links report once when this is readable, also if it is already. `first`: nobody has asked for that before.
    fn watch_pipes(&self, pipes: BorrowedFd<'_>, first: bool);
}
