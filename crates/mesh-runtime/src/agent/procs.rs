//! The table of a host's procs: their lives, owners, seats and titles. No I/O, no clock.

use crate::inspect::{ProcView, Titles};
use mesh_proto::{Aftermath, CallId, Ended, Event, Family, HostNo, Lifecycle, MeshId, ProcAddr, Stage};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
struct Proc {
    life: Lifecycle,
    /// Which one has forked it; nobody has forked a guest.
    fork_server: Option<u64>,
    seat: u32,
    /// Who owns it, and the call by which that process is told that it is up.
    spawner: (ProcAddr, CallId),
    /// Its spawner was told.
    is_up: bool,
}

/// Procs that are about to be made.
#[derive(Debug)]
pub(crate) struct Spawn<'a> {
    pub(crate) mesh: MeshId,
    pub(crate) ranks: Range<u32>,
    pub(crate) title: &'a Arc<str>,
    /// Who owns them, and the call by which that process is told that they are up.
    pub(crate) spawner: (ProcAddr, CallId),
    /// Which one is to fork them; none for a guest.
    pub(crate) fork_server: Option<u64>,
    /// How long each may take until it says hello.
    pub(crate) within: Duration,
}

/// What follows from an event.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The proc is to be killed, by this fork server.
    pub(crate) kill: Option<u64>,
    /// The proc has ended.
    pub(crate) ended: Option<Ended>,
    /// Its deadline is another one.
    pub(crate) new_deadline: bool,
}

/// What follows from a proc's end.
#[derive(Debug, Default)]
pub(crate) struct Death {
    /// The title of its mesh.
    pub(crate) title: Arc<str>,
    /// What is to end with it, and who is to be told.
    pub(crate) aftermath: Aftermath,
    /// It has no use for this seat on the board any more.
    pub(super) seat: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Procs {
    here: HostNo,
    procs: HashMap<ProcAddr, Proc>,
    /// Who owns whom, and who is told of whose end.
    pub(crate) family: Family,
    free_seats: Vec<u32>,
    /// The highest seat that was ever taken. This process has seat 0.
    last_seat: u32,
    /// Of the meshes that live.
    titles: HashMap<MeshId, Arc<str>>,
}

impl Procs {
    pub(crate) fn new(here: HostNo) -> Self {
        Self {
            here,
            procs: HashMap::new(),
            family: Family::new(here),
            free_seats: Vec::new(),
            last_seat: 0,
            titles: HashMap::new(),
        }
    }

    fn take_seat(&mut self) -> u32 {
        self.free_seats.pop().unwrap_or_else(|| {
            self.last_seat += 1;
            self.last_seat
        })
    }

    /// Enters procs that are about to be made. Returns their seats, and whether their owner lives: if not, they must not.
    pub(crate) fn add(&mut self, spawn: &Spawn<'_>, now: Duration) -> (Vec<u32>, bool) {
        let Spawn { mesh, title, spawner, fork_server, within, .. } = *spawn;
        let owned = self.family.procs_made(mesh, spawn.ranks.clone(), spawner.0);
        self.titles.insert(mesh, Arc::clone(title));
        let seats = spawn.ranks.clone().map(|rank| {
            let seat = self.take_seat();
            let mut life = Lifecycle::default();
            life.on(Event::Asked { within }, now);
            let addr = ProcAddr { mesh, rank, host: self.here };
            self.procs.insert(addr, Proc { life, fork_server, seat, spawner, is_up: false });
            seat
        });
        (seats.collect(), owned)
    }

    /// Something has happened to a proc; nothing, if it is not here.
    pub(crate) fn on(&mut self, addr: ProcAddr, event: Event, now: Duration) -> Option<Turn> {
        let proc = self.procs.get_mut(&addr)?;
        let before = proc.life.deadline();
        let actions = proc.life.on(event, now);
        Some(Turn {
            kill: proc.fork_server.filter(|_| actions.kill),
            ended: actions.notice,
            new_deadline: proc.life.deadline() != before,
        })
    }

    /// A proc has said hello. Returns the title of its mesh, and whom to tell that it is up; nothing the second time.
    pub(crate) fn hello(&mut self, addr: ProcAddr, now: Duration) -> Option<(Arc<str>, (ProcAddr, CallId))> {
        let proc = self.procs.get_mut(&addr)?;
        proc.life.on(Event::Hello, now);
        if matches!(proc.life.stage(), Stage::Ending | Stage::Ended) || std::mem::replace(&mut proc.is_up, true) {
            return None;
        }
        Some((self.titles.get(&addr.mesh).cloned().unwrap_or_default(), proc.spawner))
    }

    /// Procs are asked to end, and have `within` for that. Returns which these are, by rank.
    pub(crate) fn stop(&mut self, meant: impl Fn(ProcAddr) -> bool, within: Duration, now: Duration) -> Vec<ProcAddr> {
        let mut stopped = Vec::new();
        for (addr, proc) in self.procs.iter_mut().filter(|(addr, _)| meant(**addr)) {
            proc.life.on(Event::StopAsked { within }, now);
            stopped.push(*addr);
        }
        stopped.sort_unstable();
        stopped
    }

    /// A proc has ended, and its end is about to be told: it is forgotten. Its route has to be closed by then, so that
    /// whoever sends to it in between is told one way or the other.
    pub(crate) fn remove(&mut self, addr: ProcAddr) -> Option<Death> {
        let Proc { seat, .. } = self.procs.remove(&addr)?;
        self.free_seats.push(seat);
        let aftermath = self.family.died(addr);
        let title = match self.family.owner_of(addr.mesh) {
            Some(_) => self.titles.get(&addr.mesh).cloned(),
            None => self.titles.remove(&addr.mesh),
        };
        Some(Death { title: title.unwrap_or_default(), aftermath, seat })
    }

    /// Procs whose deadline has passed.
    pub(crate) fn late(&self, now: Duration) -> Vec<ProcAddr> {
        self.those(|proc| proc.life.deadline().is_some_and(|at| at <= now))
    }

    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.procs.values().filter_map(|proc| proc.life.deadline()).min()
    }

    /// What a fork server has made or is to make.
    pub(crate) fn of_fork_server(&self, token: u64) -> Vec<ProcAddr> {
        self.those(|proc| proc.fork_server == Some(token))
    }

    fn those(&self, meant: impl Fn(&Proc) -> bool) -> Vec<ProcAddr> {
        self.procs.iter().filter(|(_, proc)| meant(proc)).map(|(addr, _)| *addr).collect()
    }

    /// Whether a mesh lives here.
    pub(crate) fn has(&self, mesh: MeshId) -> bool {
        self.titles.contains_key(&mesh)
    }

    pub(crate) fn len(&self) -> usize {
        self.procs.len()
    }

    pub(crate) fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        self.procs.get(&addr).and_then(|proc| proc.life.pid())
    }

    /// The meshes that have procs here.
    pub(crate) fn meshes(&self) -> HashSet<MeshId> {
        self.procs.keys().map(|addr| addr.mesh).collect()
    }

    /// The meshes that a process owns and that have not ended.
    pub(crate) fn owned_by(&self, owner: ProcAddr) -> Vec<MeshId> {
        self.family.meshes().filter(|mesh| self.family.owner_of(*mesh) == Some(owner)).collect()
    }

    /// All procs that have not ended, and the titles of their meshes.
    pub(crate) fn overview(&self) -> (Vec<ProcView>, Titles) {
        let procs = self.procs.iter();
        let procs = procs.map(|(at, proc)| (*at, proc.life.stage(), proc.life.pid(), proc.spawner.0)).collect();
        (procs, self.titles.iter().map(|(mesh, title)| (*mesh, Arc::clone(title))).collect())
    }

    /// Whether nothing is left of what was here.
    #[cfg(test)]
    pub(crate) fn has_forgotten_all(&self) -> bool {
        let all_free = self.free_seats.len() == self.last_seat as usize;
        self.procs.is_empty() && self.titles.is_empty() && self.family.is_empty() && all_free
    }
}
