//! Processes that have ended, as far as this one was told.

use crate::locks::lock;
use mesh_proto::ProcAddr;
use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;

/// How many ends are remembered. A call to a process that ended earlier still fails.
pub(crate) const ENDS_KEPT: usize = 1 << 16;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct EndedProcs(Mutex<Ends>);

#[derive(Debug, Default)]
struct Ends {
    known: HashSet<ProcAddr>,
    in_order: VecDeque<ProcAddr>,
}

impl EndedProcs {
    /// A process has ended.
    pub(crate) fn note(&self, addr: ProcAddr) {
        let mut ends = lock(&self.0);
        if ends.known.insert(addr) {
            ends.in_order.push_back(addr);
            if ends.in_order.len() > ENDS_KEPT {
                let oldest = ends.in_order.pop_front();
                oldest.map(|addr| ends.known.remove(&addr));
            }
        }
    }

    /// Whether a process is known to have ended.
    pub(crate) fn contains(&self, addr: ProcAddr) -> bool {
        lock(&self.0).known.contains(&addr)
    }
}
