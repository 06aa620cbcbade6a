//! Connects the logs of a host to its gateway, and to those who ask for them.

use super::Runtime;
use crate::call::{Call, Origin, is_combined};
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::logs::{LogPeers, Logs, Look};
use crate::reactor::TOKEN_PIPES;
use mesh_proto::control::Lines;
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::Partial;
use mesh_proto::{Frame, HostNo, Joined, Kind, Piece, ProcAddr, Target};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Whose output a result follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// That of all processes that were called.
    All,
    /// That of the process that gave this outcome of a stream.
    Nth(usize),
    /// That of the process that sent the only value.
    Sender,
}

impl Which {
    fn of(self, call: &Call) -> Option<Origin> {
        match self {
            Self::All => None,
            Self::Nth(n) => call.answered(Some(n)),
            Self::Sender => call.answered(None),
        }
    }
}

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

    fn watch_pipes(&self, pipes: BorrowedFd<'_>, first: bool) {
        self.reactor.watch_once(pipes, TOKEN_PIPES, first);
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

    /// Whether processes of a call, or the one that gave the `n`th outcome of a stream, have written something that was
    /// not shown yet (LOG-8). For a value that came through a port, the process that sent it.
    pub fn is_behind(&self, call: &Call, target: &Target, which: Which) -> bool {
        if self.standing.is_closed() {
            return false;
        }
        // Most results are quiet, and nothing is on its way (LOG-9): then this costs no system call.
        let here = |target: &Target, quiet: bool| match self.logs.get() {
            None => false,
            Some(logs) if quiet => logs.is_on_its_way(target),
            Some(logs) => !call.was_looked_after(self.calls.looks()) && self.calls.looks().take(|| logs.look(target)),
        };
        match which.of(call) {
            // Only other processes write to the pipes.
            Some(one) => one.printed || (one.addr != self.me && here(&Target::One(one.addr), one.quiet)),
            None => here(target, call.is_quiet()) || call.has_printed(self.shows()),
        }
    }

    /// Returns what is finished when that has been shown, or after `limit`; `None` if it is of no use to wait.
    pub fn catch_up(&self, call: &Call, target: &Target, which: Which, limit: Duration) -> Option<Arc<Completion>> {
        let logs = self.logs.get()?;
        let done = self.completion();
        let waits = match which.of(call) {
            Some(Origin { addr, printed, .. }) => {
                let hosts = if printed { HostSet::one(addr.host) } else { HostSet::default() };
                logs.catch_up(Target::One(addr), &hosts, limit, &done)
            }
            None => logs.catch_up(target.clone(), &call.printed(self.shows()), limit, &done),
        };
        waits.then_some(done)
    }

    /// The processes of a call that may have printed something before they answered. A script that is not the controller
    /// names them to the controller, which shows lines on its behalf.
    pub fn printed(&self, call: &Call, target: &Target, which: Which) -> Vec<ProcAddr> {
        match which.of(call) {
            Some(one) => one.printed.then_some(one.addr).into_iter().collect(),
            None => {
                let hosts = call.printed(self.shows());
                target.procs().filter(|addr| hosts.contains(addr.host)).collect()
            }
        }
    }

    /// Finishes what is returned when the lines that these processes have written before have been shown, or after `limit`;
    /// `None` if it is of no use to wait. At the controller, for a script that is not.
    pub fn catch_up_with(&self, procs: &[ProcAddr], limit: Duration) -> Option<Arc<Completion>> {
        let logs = self.logs.get()?;
        let mut hosts = HostSet::default();
        for addr in procs.iter().filter(|addr| addr.host != self.me.host) {
            hosts.extend_by(&HostSet::one(addr.host));
        }
        let piece = |(first, addr): (usize, &ProcAddr)| Piece { first, target: Target::One(*addr), actor: None };
        let target = Target::Joined(Arc::new(Joined::new(procs.iter().enumerate().map(piece).collect(), procs.len())));
        let done = self.completion();
        logs.catch_up(target, &hosts, limit, &done).then_some(done)
    }

    /// The host whose lines are read in this process. A script that is not the controller reads none.
    fn shows(&self) -> Option<HostNo> {
        (!self.me.is_guest()).then_some(self.me.host)
    }

    /// At an agent: whether a frame is, or will become part of, a reply to a script that has not been told yet what its
    /// sender has printed.
    pub(crate) fn has_output(&self, frame: &Frame) -> bool {
        let header = &frame.header;
        let here = self.me.host;
        if !self.me.is_agent() || header.src.is_agent() {
            return false;
        }
        let (caller, all) = match header.kind {
            Kind::Reply => (Some(header.dst), is_combined(header)),
            Kind::Post => (Some(header.dst), false),
            // The rank above counts on the mark: only this host knows what was printed here.
            Kind::Partial => (Partial::caller_in(frame.name()), false),
            _ => return false,
        };
        let is_for_script = caller.is_some_and(|caller| match self.me == ProcAddr::CONTROLLER {
            true => caller.is_guest(),
            false => header.src.host == here && (caller == ProcAddr::CONTROLLER || caller.is_guest()),
        });
        is_for_script
            && self.logs.get().is_some_and(|logs| match (all, header.is_quiet()) {
                // What has come from other hosts, and is still to be shown.
                (true, true) => logs.is_on_its_way_for_mesh(header.src.mesh),
                (true, false) => logs.look_for_mesh(header.src.mesh) == Look::OfThese,
                (false, true) => logs.is_on_its_way(&Target::One(header.src)),
                (false, false) => logs.look(&Target::One(header.src)) == Look::OfThese,
            })
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
