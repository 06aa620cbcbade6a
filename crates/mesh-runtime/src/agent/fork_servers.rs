//! The fork servers of a host: one per kind, started by the first spawn of that kind.
//!
//! Only the I/O thread starts them, because the kernel treats the end of the thread that created a child as the end of its
//! parent. Orders for workers wait until then.

use crate::fork_server::{ForkServer, ForkServerSpec, WorkerFds};
use mesh_proto::ProcAddr;
use std::collections::HashMap;
use std::sync::Arc;

/// Their reactor tokens start here, above those of all links.
pub(crate) const FORK_SERVER_TOKENS: u64 = 1 << 32;

/// A worker to fork.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) addr: ProcAddr,
    pub(super) exec: bool,
    pub(super) seat: u32,
    pub(super) worker: WorkerFds,
}

#[derive(Debug)]
enum Birth {
    /// The I/O thread is about to start it; these workers wait.
    Due(ForkServerSpec, Vec<Order>),
    Running(Arc<ForkServer>),
}

/// The fork servers of this host.
#[derive(Debug, Default)]
pub(super) struct ForkServers {
    tokens: HashMap<ForkServerSpec, u64>,
    births: HashMap<u64, Birth>,
    /// How many there have been so far.
    count: u64,
}

impl ForkServers {
    /// Returns the token of the fork server of this kind. If there is none, one becomes due.
    pub(super) fn token_of(&mut self, spec: &ForkServerSpec) -> u64 {
        if let Some(token) = self.tokens.get(spec) {
            return *token;
        }
        let token = FORK_SERVER_TOKENS + self.count;
        self.count += 1;
        self.tokens.insert(spec.clone(), token);
        self.births.insert(token, Birth::Due(spec.clone(), Vec::new()));
        token
    }

    pub(super) fn running(&self, token: u64) -> Option<Arc<ForkServer>> {
        match self.births.get(&token) {
            Some(Birth::Running(fork_server)) => Some(Arc::clone(fork_server)),
            _ => None,
        }
    }

    /// Orders workers. If the fork server is running, returns it and the orders to send to it.
    pub(super) fn order(&mut self, token: u64, orders: Vec<Order>) -> Option<(Arc<ForkServer>, Vec<Order>)> {
        match self.births.get_mut(&token)? {
            Birth::Due(_, waiting) => {
                waiting.extend(orders);
                None
            }
            Birth::Running(fork_server) => Some((Arc::clone(fork_server), orders)),
        }
    }

    pub(super) fn due(&self) -> Vec<(u64, ForkServerSpec)> {
        let due = self.births.iter().filter_map(|(token, birth)| match birth {
            Birth::Due(spec, _) => Some((*token, spec.clone())),
            Birth::Running(_) => None,
        });
        due.collect()
    }

    /// Marks it as running. Returns the workers that waited for it, or `None` if it was forgotten meanwhile.
    pub(super) fn started(&mut self, token: u64, fork_server: &Arc<ForkServer>) -> Option<Vec<Order>> {
        let birth = self.births.get_mut(&token)?;
        match std::mem::replace(birth, Birth::Running(Arc::clone(fork_server))) {
            Birth::Due(_, waiting) => Some(waiting),
            Birth::Running(_) => None,
        }
    }

    /// Forgets one that ended or failed to start. The next spawn of its kind starts another.
    pub(super) fn forget(&mut self, token: u64) {
        self.births.remove(&token);
        self.tokens.retain(|_, one| *one != token);
    }

    /// Forgets all and returns the running ones. No more are started.
    pub(super) fn take_all(&mut self) -> Vec<Arc<ForkServer>> {
        let running = self.births.drain().filter_map(|(_, birth)| match birth {
            Birth::Running(fork_server) => Some(fork_server),
            Birth::Due(..) => None,
        });
        running.collect()
    }
}
