//! Looking into a job from another machine: who may, and how what they say gets to the controller and back.
//!
//! ```text
//! who looks                      agent of any host                       controller
//! Python ─ local socket ─ pump ══ TLS, packets ══ pump ── frames, peer_streams ── pump ─ local socket ─ Python
//! ```
//!
//! - `pump`: passes bytes on between two ends;
//! - `ends`: what such ends are;
//! - `dialing`: the side of who looks.
//!
//! What is said is none of this module's business: at the controller it arrives at a local socket, as if somebody on that
//! machine had connected. A controller needs no open port for it.
//!
//! VIS-1: only certificates that may look into jobs are let in, and a visit ends when its certificate holds no more; one that
//! may do nothing else is refused whatever else it asks for.
//! VIS-2: a visit costs a bounded number of bytes at each place that it passes, an agent has a bounded number of them, and who
//! does not take what they have asked for, or is silent, is sent away.

mod dialing;
mod ends;
mod pump;
#[cfg(test)]
mod tests;

pub use dialing::{VisitEnd, VisitError, Visited, jobs_at, visit};

use super::greeting::{GREETING, say};
use crate::runtime::{Runtime, lock};
use crate::tls::{Identity, PeerFacts, TlsStream};
use ends::{LocalEnd, PacketEnd, Tunnel, TunnelEnd};
use mesh_proto::control::{Step, Visit};
use mesh_proto::hosts::{Look, PacketDecoder, Parting, Refusal, Refuse};
use mesh_proto::{HostNo, ProcAddr};
use pump::{Over, Rules, pump};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// So many may look into jobs through one agent, those included who have not said yet what they want.
const MOST: usize = 32;
/// So many visits a controller takes through all agents; of those it answers fewer, and says so.
const MOST_TAKEN: usize = 64;
/// What is not put up with from who has dialed.
const RULES: Rules = Rules {
    stall: Some(Duration::from_secs(10)),
    // Questions may take a minute, and who follows something is told every second that it goes on.
    idle: Some(Duration::from_secs(90)),
    tick: Some(Duration::from_secs(1)),
};
/// How long the end of a runtime waits for visits to say farewell.
const FAREWELL: Duration = Duration::from_millis(300);

/// A place of one who looks in, for as long as it is held.
#[derive(Debug)]
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// One of them, if there is one.
    pub(super) fn take(taken: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |n: usize| (n < MOST).then_some(n + 1);
        taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        Some(Self(Arc::clone(taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Tells who wants to look in that there is no place, without waiting for anything.
pub(super) fn turn_away(mut stream: TlsStream) {
    let text = format!("{MOST} others look into jobs through this host already, and that is the most");
    let _ = say(&mut stream, &Refuse { code: Refusal::Busy, text }.packet(0), Instant::now());
    stream.close_notify();
    let _ = stream.flush();
}

/// What a runtime knows of those who look in from other machines.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    /// By the agent's host, 0 at an agent itself, and the number that the agent has given.
    open: Mutex<HashMap<(HostNo, u64), Arc<Tunnel>>>,
    fewer: Condvar,
    next: AtomicU64,
    /// At the controller: those that Python has not taken yet.
    waiting: Mutex<Vec<OwnedFd>>,
    over: AtomicBool,
}

impl Visits {
    fn add(&self, key: (HostNo, u64), most: usize) -> Option<Arc<Tunnel>> {
        let mut open = lock(&self.open);
        if open.len() >= most || open.contains_key(&key) || self.over.load(Ordering::SeqCst) {
            return None;
        }
        let tunnel = Tunnel::new().ok()?;
        open.insert(key, Arc::clone(&tunnel));
        Some(tunnel)
    }

    fn remove(&self, key: (HostNo, u64)) {
        lock(&self.open).remove(&key);
        self.fewer.notify_all();
    }
}

/// Which jobs who has dialed may choose from, and how to get into one.
pub(super) trait Jobs {
    fn list(&self) -> Vec<u64>;
    fn find(&self, job: u64) -> Option<Arc<Runtime>>;
}

/// Somebody who wants to look in has dialed; answers them until they leave.
pub(super) fn receive(
    jobs: &dyn Jobs,
    look: Look,
    mut stream: TlsStream,
    decoder: PacketDecoder,
    (facts, identity): (&PeerFacts, &Identity),
    tell: &dyn Fn(&str),
) {
    let until = Instant::now() + GREETING;
    if !facts.role.may_look() {
        let text = format!("a {}'s certificate does not let anybody look into jobs", facts.role);
        tell(&format!("somebody was refused: {text}"));
        return super::greeting::refuse(stream, Refusal::NotAllowed, text);
    }
    if look.job == 0 {
        let _ = say(&mut stream, &Look::welcome(&jobs.list()).packet(0), until);
        stream.close_notify();
        let _ = stream.flush();
        return;
    }
    let Some(runtime) = jobs.find(look.job) else {
        return super::greeting::refuse(
            stream,
            Refusal::NoSuchJob,
            "there is no such job here, or not any more".to_owned(),
        );
    };
    if say(&mut stream, &Look::welcome(&[]).packet(0), until).is_ok() {
        let holds = || {
            let why = identity.check_peer(facts, SystemTime::now()).err();
            why.map_or(Ok(()), |why| {
                Err(Over::refused(Refusal::NotAllowed, format!("this side's certificate holds no more: {why}")))
            })
        };
        runtime.be_visited(PacketEnd::new(stream, decoder), holds);
    }
}

/// A controller at which hosts dial in leads one job.
impl Jobs for Runtime {
    fn list(&self) -> Vec<u64> {
        vec![self.job()]
    }

    fn find(&self, job: u64) -> Option<Arc<Runtime>> {
        self.this().filter(|_| self.job() == job)
    }
}

impl Runtime {
    /// Which job this is.
    pub fn job(&self) -> u64 {
        lock(&self.gateway.state).machine.job()
    }

    fn be_visited(&self, mut visitor: PacketEnd, holds: impl FnMut() -> Result<(), Over>) {
        if self.me == ProcAddr::CONTROLLER {
            let over = match self.at_the_door() {
                Some(socket) => pump(&mut visitor, &mut LocalEnd::new(socket), RULES, holds),
                None => Over::refused(Refusal::NoSuchJob, "the job ends"),
            };
            return visitor.finish(&over);
        }
        let number = self.visits.next.fetch_add(1, Ordering::Relaxed);
        let Some(tunnel) = self.visits.add((0, number), usize::MAX) else {
            return visitor.finish(&Over::refused(Refusal::NoSuchJob, "the job ends"));
        };
        let mut through = TunnelEnd::new(self.weak(), tunnel, ProcAddr::CONTROLLER, number);
        through.tell(Step::Begin);
        let over = pump(&mut visitor, &mut through, RULES, holds);
        through.tell(Step::End);
        visitor.finish(&over);
        self.visits.remove((0, number));
    }

    /// A pair of sockets, one of them for Python, which is told of it.
    fn at_the_door(&self) -> Option<OwnedFd> {
        let flags = SocketFlags::CLOEXEC;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        {
            let mut waiting = lock(&self.visits.waiting);
            if self.visits.over.load(Ordering::SeqCst) || waiting.len() >= MOST_TAKEN {
                return None;
            }
            waiting.push(there);
        }
        self.notice_visitor();
        Some(here)
    }

    /// The next connection from another machine, for whoever answers those of this one.
    pub fn take_visitor(&self) -> Option<OwnedFd> {
        lock(&self.visits.waiting).pop()
    }

    /// An agent and the controller talk of a visit.
    pub(crate) fn on_visit(&self, from: ProcAddr, Visit { number, step }: Visit) {
        let from_agent = from.is_agent() && from != ProcAddr::CONTROLLER;
        let key = match self.me == ProcAddr::CONTROLLER {
            true if from_agent => (from.host, number),
            false if self.me.is_agent() && from == ProcAddr::CONTROLLER => (0, number),
            _ => return,
        };
        if step == Step::Begin {
            if self.me == ProcAddr::CONTROLLER {
                self.take_visit(from, key);
            }
            return;
        }
        let tunnel = lock(&self.visits.open).get(&key).cloned();
        if let Some(tunnel) = tunnel {
            tunnel.on(step);
        }
    }

    fn take_visit(&self, from: ProcAddr, key: (HostNo, u64)) {
        let Some(tunnel) = self.visits.add(key, MOST_TAKEN) else {
            return TunnelEnd::refuse(self, from, key.1);
        };
        let mut through = TunnelEnd::new(self.weak(), tunnel, from, key.1);
        let runtime = self.weak();
        let socket = self.at_the_door();
        let serve = move || {
            if let Some(socket) = socket {
                // Whoever is at the other end of either socket sees to it that nothing waits for ever.
                pump(&mut LocalEnd::new(socket), &mut through, Rules::default(), || Ok(()));
            }
            through.tell(Step::End);
            if let Some(runtime) = runtime.upgrade() {
                runtime.visits.remove(key);
            }
        };
        let thread = std::thread::Builder::new().name("mesh-visit".to_owned()).stack_size(512 * 1024);
        if thread.spawn(serve).is_err() {
            self.visits.remove(key);
            TunnelEnd::refuse(self, from, key.1);
        }
    }

    /// The job's part here is over: those who look in hear why.
    pub(super) fn end_visits(&self, parting: Parting, why: &str) {
        self.visits.over.store(true, Ordering::SeqCst);
        let over = match parting {
            Parting::JobOver => Over::Left,
            _ => Over::refused(Refusal::Other, format!("this host has left the job: {why}")),
        };
        lock(&self.visits.open).values().for_each(|tunnel| tunnel.end(over.clone()));
        lock(&self.visits.waiting).clear();
    }

    /// A host has gone, and those with it who have looked in there.
    pub(super) fn end_visits_through(&self, host: HostNo) {
        let open = lock(&self.visits.open);
        open.iter().filter(|((through, _), _)| *through == host && host != 0).for_each(|(_, tunnel)| {
            tunnel.end(Over::Left);
        });
    }

    /// The runtime closes: gives those who look in a moment to hear of it.
    pub(crate) fn close_visits(&self) {
        self.end_visits(Parting::JobOver, "");
        let open = lock(&self.visits.open);
        let done = |open: &mut HashMap<(HostNo, u64), Arc<Tunnel>>| !open.is_empty();
        drop(self.visits.fewer.wait_timeout_while(open, FAREWELL, done).unwrap_or_else(PoisonError::into_inner));
    }
}
