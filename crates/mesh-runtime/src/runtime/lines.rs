//! Connects the logs of a host to its gateway, and to those who ask for them.

use super::Runtime;
use crate::error::RuntimeError;
use crate::logs::{LogPeers, Logs};
use mesh_proto::control::Lines;
use mesh_proto::{HostNo, ProcAddr};
use std::sync::Arc;

impl LogPeers for Runtime {
    fn hosts(&self) -> Vec<HostNo> {
        if self.me == ProcAddr::CONTROLLER { self.gateway.hosts_in_reach() } else { Vec::new() }
    }

    fn send(&self, host: HostNo, said: &Lines) {
        if !self.is_closed() {
            self.dispatch(said.frame(self.me, ProcAddr::agent(host), None), None);
        }
    }

    fn cast(&self, said: &Lines) {
        if let Some(agents) = self.gateway.other_agents().filter(|_| self.me == ProcAddr::CONTROLLER) {
            self.dispatch(said.frame(self.me, ProcAddr::CONTROLLER, Some(&agents)), None);
        }
    }
}

impl Runtime {
    /// What the procs of this host print.
    ///
    /// # Errors
    /// If descriptors or threads run out.
    pub fn logs(&self) -> Result<Arc<Logs>, RuntimeError> {
        self.logs.start()
    }

    /// The last lines that an ended process wrote to stderr.
    pub(crate) fn last_words(&self, addr: ProcAddr) -> Vec<String> {
        self.logs.last_words(addr)
    }

    /// A host is dead: waits for nothing from it.
    pub(crate) fn forget_lines_of(&self, host: HostNo) {
        self.logs.forget_host(host);
    }
}
