//! The logs of a host: what its processes print, and what hosts tell each other about it; see [`crate::logs`].

use crate::error::RuntimeError;
use crate::logs::{LogPeers, Logs, Order};
use mesh_proto::control::Lines;
use mesh_proto::{Frame, HostNo, ProcAddr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long the end of a job waits for lines of other hosts.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The logs of a host, started with its first process or the first request for them.
#[derive(Debug)]
pub(crate) struct HostLogs {
    me: ProcAddr,
    begun: Instant,
    peers: Weak<dyn LogPeers>,
    logs: OnceLock<Arc<Logs>>,
}

impl HostLogs {
    pub(crate) fn new(me: ProcAddr, begun: Instant, peers: Weak<dyn LogPeers>) -> Self {
        Self { me, begun, peers, logs: OnceLock::new() }
    }

    /// The logs, started if they were not.
    pub(crate) fn start(&self) -> Result<Arc<Logs>, RuntimeError> {
        if let Some(logs) = self.logs.get() {
            return Ok(Arc::clone(logs));
        }
        let made = Logs::start(self.begun, Weak::clone(&self.peers), self.me != ProcAddr::CONTROLLER)?;
        // Another thread may have been first. Then these end unused.
        Ok(Arc::clone(self.logs.get_or_init(|| made)))
    }

    /// The logs, if they were started.
    pub(crate) fn get(&self) -> Option<&Arc<Logs>> {
        self.logs.get()
    }

    /// The last lines that an ended process wrote to stderr.
    pub(crate) fn last_words(&self, addr: ProcAddr) -> Vec<String> {
        self.logs.get().map(|logs| logs.ended(addr)).unwrap_or_default()
    }

    /// Handles what another host says about lines. The controller takes lines from the agents, and orders from nobody;
    /// the agents take orders from the controller.
    pub(crate) fn on_lines(&self, frame: &Frame) {
        let (me, src) = (self.me, frame.header.src);
        if !src.is_agent() || !me.is_agent() || src == me {
            return;
        }
        let order = match Lines::read(frame) {
            Some(Lines::Found(batch)) if me == ProcAddr::CONTROLLER => Order::Found(src.host, batch),
            Some(Lines::More) if src == ProcAddr::CONTROLLER => Order::More,
            Some(Lines::Flush(ticket)) if src == ProcAddr::CONTROLLER => Order::Flush(ticket),
            Some(Lines::Report(mesh, ticket)) if src == ProcAddr::CONTROLLER => Order::Report(mesh, ticket),
            Some(Lines::Set(mesh, options)) if src == ProcAddr::CONTROLLER => Order::Set(mesh, options),
            _ => return,
        };
        if let Ok(logs) = self.start() {
            logs.order(order);
        }
    }

    /// A host is dead: waits for nothing from it.
    pub(crate) fn forget_host(&self, host: HostNo) {
        if let Some(logs) = self.logs.get() {
            logs.order(Order::Dead(host));
        }
    }

    /// Before the end: waits a while for lines that other hosts still have.
    pub(crate) fn collect(&self) {
        if let Some(logs) = self.logs.get() {
            logs.collect(Instant::now() + LAST_WORDS);
        }
    }

    /// The runtime closes.
    pub(crate) fn close(&self) {
        if let Some(logs) = self.logs.get() {
            logs.close();
        }
    }
}
