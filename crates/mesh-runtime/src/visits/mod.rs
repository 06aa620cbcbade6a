//! Looking into a job from another machine: who may, and how their bytes reach the controller and return.
//!
//! ```text
//! visitor                        agent of any host                       controller
//! Python ─ local socket ─ pump ══ TLS, packets ══ pump ── frames, peer_streams ── pump ─ local socket ─ Python
//! ```
//!
//! - this file: the visits that a process takes part in;
//! - `door`: who may look in;
//! - `pump`: passes bytes on between two ends;
//! - `ends`, `tunnel`: such ends;
//! - `dialing`: the visitor's side.
//!
//! This module does not interpret the bytes. At the controller they arrive at a local socket, as if someone on that
//! machine had connected. A controller needs no open port for it.
//!
//! VIS-1: only certificates that may look into jobs are admitted, and a visit ends when its certificate is no longer
//! valid. A certificate that may do nothing else is refused anything else.
//! VIS-2: a visit costs a bounded number of bytes wherever it passes, an agent has a bounded number of visits, and
//! visitors who do not take what they asked for, or are silent, are disconnected.

mod dialing;
mod door;
mod ends;
mod pump;
#[cfg(test)]
mod tests;
mod tunnel;

pub use dialing::{VisitEnd, VisitError, Visited, jobs_at, visit};
pub(crate) use door::{Jobs, NO_SUCH_JOB, Place, receive, turn_away};

use crate::dispatch::Dispatch;
use crate::greeting::on_thread;
use crate::locks::lock;
use ends::{LocalEnd, PacketEnd};
use mesh_proto::control::{Inspect, Step, Visit};
use mesh_proto::hosts::{Parting, Refusal};
use mesh_proto::{HostNo, ProcAddr};
use pump::{Over, Rules, pump};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;
use tunnel::{Tunnel, TunnelEnd};

/// The most visits that a controller takes through all agents. It answers fewer at a time, and says so.
const MOST_TAKEN: usize = 64;
/// Limits for visitors.
const RULES: Rules = Rules {
    stall: Some(Duration::from_secs(10)),
    // Questions may take a minute, and followers are told every second that it goes on.
    idle: Some(Duration::from_secs(90)),
    tick: Some(Duration::from_secs(1)),
};
/// How long a closing process waits for visits to say farewell.
const FAREWELL: Duration = Duration::from_millis(300);

/// The process that visits lead to, or through.
pub(crate) trait Answerer: Dispatch + Send + Sync + 'static {
    /// A visitor waits: see [`Visits::take_visitor`].
    fn notice_visitor(&self);
}

/// A visit, by the agent's host (0 at an agent itself) and the agent's number for it.
type Key = (HostNo, u64);

/// See the module.
#[derive(Debug)]
pub(crate) struct Visits<P> {
    me: ProcAddr,
    process: Weak<P>,
    open: Mutex<HashMap<Key, Arc<Tunnel>>>,
    fewer: Condvar,
    next: AtomicU64,
    /// At the controller: connections that Python has not taken yet.
    waiting: Mutex<Vec<OwnedFd>>,
    over: AtomicBool,
}

impl<P: Answerer> Visits<P> {
    pub(crate) fn new(me: ProcAddr, process: &Weak<P>) -> Self {
        Self {
            me,
            process: Weak::clone(process),
            open: Mutex::default(),
            fewer: Condvar::new(),
            next: AtomicU64::new(0),
            waiting: Mutex::default(),
            over: AtomicBool::new(false),
        }
    }

    fn is_controller(&self) -> bool {
        self.me == ProcAddr::CONTROLLER
    }

    fn add(&self, key: Key, most: usize) -> Option<Arc<Tunnel>> {
        let mut open = lock(&self.open);
        if open.len() >= most || open.contains_key(&key) || self.over.load(Ordering::SeqCst) {
            return None;
        }
        let tunnel = Tunnel::new().ok()?;
        open.insert(key, Arc::clone(&tunnel));
        Some(tunnel)
    }

    fn remove(&self, key: Key) {
        lock(&self.open).remove(&key);
        self.fewer.notify_all();
    }

    /// Serves a visitor through this process. Returns when they have left, or `holds` says that they must.
    fn be_visited(&self, mut visitor: PacketEnd, holds: impl FnMut() -> Result<(), Over>) {
        let ends = || Over::refused(Refusal::NoSuchJob, "the job ends");
        if self.is_controller() {
            let over = match self.at_the_door() {
                Some(socket) => pump(&mut visitor, &mut LocalEnd::new(socket), RULES, holds),
                None => ends(),
            };
            return visitor.finish(&over);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Some(tunnel) = self.add((0, number), usize::MAX) else { return visitor.finish(&ends()) };
        let mut through = TunnelEnd::new(&self.process, tunnel, (self.me, ProcAddr::CONTROLLER), number);
        through.tell(Step::Begin);
        let over = pump(&mut visitor, &mut through, RULES, holds);
        through.tell(Step::End);
        visitor.finish(&over);
        self.remove((0, number));
    }

    /// Makes a pair of sockets. One is for Python, which is told of it.
    fn at_the_door(&self) -> Option<OwnedFd> {
        let process = self.process.upgrade()?;
        let flags = SocketFlags::CLOEXEC;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        {
            let mut waiting = lock(&self.waiting);
            if self.over.load(Ordering::SeqCst) || waiting.len() >= MOST_TAKEN {
                return None;
            }
            waiting.push(there);
        }
        process.notice_visitor();
        Some(here)
    }

    /// The next connection from another machine, for the code that answers those of this one.
    pub(crate) fn take_visitor(&self) -> Option<OwnedFd> {
        lock(&self.waiting).pop()
    }

    /// Handles a message about a visit, between an agent and the controller.
    pub(crate) fn on_visit(self: &Arc<Self>, from: ProcAddr, Visit { number, step }: Visit) {
        let from_agent = from.is_agent() && from != ProcAddr::CONTROLLER;
        let key = match self.is_controller() {
            true if from_agent => (from.host, number),
            false if self.me.is_agent() && from == ProcAddr::CONTROLLER => (0, number),
            _ => return,
        };
        if step == Step::Begin {
            if self.is_controller() {
                self.take_visit(from, key);
            }
            return;
        }
        let tunnel = lock(&self.open).get(&key).cloned();
        if let Some(tunnel) = tunnel {
            tunnel.on(step);
        }
    }

    /// At the controller: somebody looks into the job through an agent.
    fn take_visit(self: &Arc<Self>, from: ProcAddr, key: Key) {
        let refuse = || {
            if let Some(process) = self.process.upgrade() {
                let end = Inspect::Visit(Visit { number: key.1, step: Step::End });
                process.dispatch(end.frame(self.me, from, None));
            }
        };
        let Some(tunnel) = self.add(key, MOST_TAKEN) else { return refuse() };
        let mut through = TunnelEnd::new(&self.process, tunnel, (self.me, from), key.1);
        let socket = self.at_the_door();
        let this = Arc::clone(self);
        let serve = move || {
            if let Some(socket) = socket {
                // The code at the other end of either socket makes sure that nothing waits forever.
                pump(&mut LocalEnd::new(socket), &mut through, Rules::default(), || Ok(()));
            }
            through.tell(Step::End);
            this.remove(key);
        };
        if on_thread("mesh-visit", serve).is_err() {
            self.remove(key);
            refuse();
        }
    }

    /// Tells visitors why the job's part here is over.
    pub(crate) fn end(&self, parting: Parting, why: &str) {
        self.over.store(true, Ordering::SeqCst);
        let over = match parting {
            Parting::JobOver => Over::Left,
            _ => Over::refused(Refusal::Other, format!("this host has left the job: {why}")),
        };
        lock(&self.open).values().for_each(|tunnel| tunnel.end(over.clone()));
        lock(&self.waiting).clear();
    }

    /// Ends the visits through a host that is gone.
    pub(crate) fn end_through(&self, host: HostNo) {
        let open = lock(&self.open);
        let through = open.iter().filter(|((through, _), _)| *through == host && host != 0);
        through.for_each(|(_, tunnel)| tunnel.end(Over::Left));
    }

    /// The process closes: gives visitors a moment to learn of it.
    pub(crate) fn close(&self) {
        self.end(Parting::JobOver, "");
        let open = lock(&self.open);
        let some = |open: &mut HashMap<Key, Arc<Tunnel>>| !open.is_empty();
        drop(self.fewer.wait_timeout_while(open, FAREWELL, some).unwrap_or_else(PoisonError::into_inner));
    }
}
