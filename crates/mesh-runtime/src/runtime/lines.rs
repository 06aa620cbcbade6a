//! What hosts tell each other of lines; see [`crate::logs`].

use super::Runtime;
use crate::error::RuntimeError;
use crate::logs::{LogPeers, Logs, Order};
use mesh_proto::control::Lines;
use mesh_proto::{Frame, HostNo, ProcAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the end of a job waits for what other hosts have still to tell.
const LAST_WORDS: Duration = Duration::from_secs(5);

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
        if let Some(logs) = self.logs.get() {
            return Ok(Arc::clone(logs));
        }
        let away = self.me != ProcAddr::CONTROLLER;
        let made = Logs::start(self.started, self.weak(), away)?;
        // Another thread may have been first; then this one ends unused.
        Ok(Arc::clone(self.logs.get_or_init(|| made)))
    }

    /// The last lines on stderr of a proc that has ended.
    pub(crate) fn last_words(&self, addr: ProcAddr) -> Vec<String> {
        self.logs.get().map(|logs| logs.ended(addr)).unwrap_or_default()
    }

    /// What hosts tell each other of lines; see the module.
    pub(crate) fn on_lines(&self, frame: &Frame) {
        let header = frame.header;
        if !header.src.is_agent() || !self.me.is_agent() || header.src == self.me {
            return;
        }
        let by_controller = header.src == ProcAddr::CONTROLLER;
        let order = match Lines::read(frame) {
            Some(Lines::Found(batch)) if self.me == ProcAddr::CONTROLLER => Some(Order::Found(header.src.host, batch)),
            Some(Lines::More) if by_controller => Some(Order::More),
            Some(Lines::Flush(ticket)) if by_controller => Some(Order::Flush(ticket)),
            Some(Lines::Set(mesh, options)) if by_controller => Some(Order::Set(mesh, options)),
            _ => None,
        };
        if let Some(order) = order
            && let Ok(logs) = self.logs()
        {
            logs.order(order);
        }
    }

    /// A host is dead: nothing of it is waited for.
    pub(crate) fn forget_lines_of(&self, host: HostNo) {
        if let Some(logs) = self.logs.get() {
            logs.order(Order::Dead(host));
        }
    }

    /// Before the end: what other hosts have still to tell is wanted.
    pub(crate) fn collect_lines(&self) {
        if let Some(logs) = self.logs.get() {
            logs.collect(Instant::now() + LAST_WORDS);
        }
    }
}
