//! The table of a host's procs: their lives, owners, seats and titles. No I/O, no clock.

use crate::inspect::{ProcView, Titles};
use mesh_proto::{Actions, Aftermath, CallId, Ended, Event, Family, HostNo, Lifecycle, MeshId, ProcAddr, Stage};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
struct Proc {
    life: Lifecycle,
    /// The one that forked it; a guest has none.
    fork_server: Option<u64>,
    seat: u32,
    /// Its owner, and the call that tells the owner that it is up.
    spawner: (ProcAddr, CallId),
    /// Its spawner was notified.
    is_up: bool,
}

/// Procs that are about to be spawned.
#[derive(Debug)]
pub(crate) struct Spawn<'a> {
    pub(crate) mesh: MeshId,
    pub(crate) ranks: Range<u32>,
    pub(crate) title: &'a Arc<str>,
    /// Their owner, and the call that tells the owner that they are up.
    pub(crate) spawner: (ProcAddr, CallId),
    /// The one that will fork them; a guest has none.
    pub(crate) fork_server: Option<u64>,
    /// How long each may take to say hello.
    pub(crate) within: Duration,
}

/// What follows from an event.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The fork server that is to kill the proc.
    pub(crate) kill: Option<u64>,
    /// The end of the proc.
    pub(crate) ended: Option<Ended>,
    /// Its deadline changed.
    pub(crate) new_deadline: bool,
}

/// What follows from a proc's end.
#[derive(Debug, Default)]
pub(crate) struct Death {
    /// The title of its mesh.
    pub(crate) title: Arc<str>,
    /// What ends with it, and who is notified.
    pub(crate) aftermath: Aftermath,
    /// Its seat on the board, which is free now.
    pub(super) seat: u32,
}

type Deadlines = BTreeSet<(Duration, ProcAddr)>;

impl Proc {
    /// Handles an event.
    fn on(&mut self, addr: ProcAddr, event: Event, now: Duration, deadlines: &mut Deadlines) -> Actions {
        let before = self.life.deadline();
        let actions = self.life.on(event, now);
        if self.life.deadline() != before {
            before.map(|at| deadlines.remove(&(at, addr)));
            deadlines.extend(self.life.deadline().map(|at| (at, addr)));
        }
        actions
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Procs {
    here: HostNo,
    procs: HashMap<ProcAddr, Proc>,
    /// Deadlines in order: the I/O thread asks for the first one at every turn.
    deadlines: Deadlines,
    /// Who owns whom, and who is notified of whose end.
    pub(crate) family: Family,
    free_seats: Vec<u32>,
    /// The highest seat ever taken. This process has seat 0.
    last_seat: u32,
    /// Titles of live meshes.
    titles: HashMap<MeshId, Arc<str>>,
}

impl Procs {
    pub(crate) fn new(here: HostNo) -> Self {
        Self {
            here,
            procs: HashMap::new(),
            deadlines: Deadlines::new(),
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

    /// Adds procs that are about to be spawned. Returns their seats, and whether their owner is alive; if not, they must not be.
    pub(crate) fn add(&mut self, spawn: &Spawn<'_>, now: Duration) -> (Vec<u32>, bool) {
        let Spawn { mesh, title, spawner, fork_server, within, .. } = *spawn;
        let owned = self.family.procs_made(mesh, spawn.ranks.clone(), spawner.0);
        self.titles.insert(mesh, Arc::clone(title));
        let seats = spawn.ranks.clone().map(|rank| {
            let seat = self.take_seat();
            let addr = ProcAddr { mesh, rank, host: self.here };
            let mut proc = Proc { life: Lifecycle::default(), fork_server, seat, spawner, is_up: false };
            proc.on(addr, Event::Asked { within }, now, &mut self.deadlines);
            self.procs.insert(addr, proc);
            seat
        });
        (seats.collect(), owned)
    }

    /// Handles an event of a proc. Returns `None` if it is not here.
    pub(crate) fn on(&mut self, addr: ProcAddr, event: Event, now: Duration) -> Option<Turn> {
        let proc = self.procs.get_mut(&addr)?;
        let before = proc.life.deadline();
        let actions = proc.on(addr, event, now, &mut self.deadlines);
        Some(Turn {
            kill: proc.fork_server.filter(|_| actions.kill),
            ended: actions.notice,
            new_deadline: proc.life.deadline() != before,
        })
    }

    /// A proc said hello. Returns the title of its mesh and whom to notify; `None` the second time.
    pub(crate) fn hello(&mut self, addr: ProcAddr, pid: u32, now: Duration) -> Option<(Arc<str>, (ProcAddr, CallId))> {
        let proc = self.procs.get_mut(&addr)?;
        proc.on(addr, Event::Hello(pid), now, &mut self.deadlines);
        if matches!(proc.life.stage(), Stage::Ending | Stage::Ended) || std::mem::replace(&mut proc.is_up, true) {
            return None;
        }
        Some((self.titles.get(&addr.mesh).cloned().unwrap_or_default(), proc.spawner))
    }

    /// Asks procs to end within `within`. Returns them, by rank.
    pub(crate) fn stop(&mut self, meant: impl Fn(ProcAddr) -> bool, within: Duration, now: Duration) -> Vec<ProcAddr> {
        let mut stopped = Vec::new();
        for (addr, proc) in self.procs.iter_mut().filter(|(addr, _)| meant(**addr)) {
            proc.on(*addr, Event::StopAsked { within }, now, &mut self.deadlines);
            stopped.push(*addr);
        }
        stopped.sort_unstable();
        stopped
    }

    /// A proc has ended, and its end is about to be told: it is forgotten. Its route has to be closed by then, so that
    /// whoever sends to it in between is told one way or the other.
    pub(crate) fn remove(&mut self, addr: ProcAddr) -> Option<Death> {
        let Proc { seat, life, .. } = self.procs.remove(&addr)?;
        life.deadline().map(|at| self.deadlines.remove(&(at, addr)));
        self.free_seats.push(seat);
        let aftermath = self.family.died(addr);
        let title = match self.family.owner_of(addr.mesh) {
            Some(_) => self.titles.get(&addr.mesh).cloned(),
            None => self.titles.remove(&addr.mesh),
        };
        Some(Death { title: title.unwrap_or_default(), aftermath, seat })
    }

    /// Returns the procs whose deadline has passed, with the fork server of each and how long it may take to say hello.
    pub(crate) fn late(&self, now: Duration) -> Vec<(ProcAddr, Option<u64>, Duration)> {
        let late = self.deadlines.iter().take_while(|(at, _)| *at <= now);
        let known = late.filter_map(|(_, addr)| Some((*addr, self.procs.get(addr)?)));
        known.map(|(addr, proc)| (addr, proc.fork_server, proc.life.allowed())).collect()
    }

    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Returns the procs that a fork server forked or is to fork.
    pub(crate) fn of_fork_server(&self, token: u64) -> Vec<ProcAddr> {
        self.those(|proc| proc.fork_server == Some(token))
    }

    fn those(&self, meant: impl Fn(&Proc) -> bool) -> Vec<ProcAddr> {
        self.procs.iter().filter(|(_, proc)| meant(proc)).map(|(addr, _)| *addr).collect()
    }

    /// Whether a proc is here whose end was not told yet.
    pub(crate) fn is_here(&self, addr: ProcAddr) -> bool {
        self.procs.contains_key(&addr)
    }

    /// Whether a mesh is alive here.
    pub(crate) fn has(&self, mesh: MeshId) -> bool {
        self.titles.contains_key(&mesh)
    }

    pub(crate) fn len(&self) -> usize {
        self.procs.len()
    }

    pub(crate) fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        self.procs.get(&addr).and_then(|proc| proc.life.pid())
    }

    /// Returns the meshes that have procs here.
    pub(crate) fn meshes(&self) -> HashSet<MeshId> {
        self.procs.keys().map(|addr| addr.mesh).collect()
    }

    /// Returns the meshes that a process owns and that have not ended.
    pub(crate) fn owned_by(&self, owner: ProcAddr) -> Vec<MeshId> {
        self.family.meshes().filter(|mesh| self.family.owner_of(*mesh) == Some(owner)).collect()
    }

    /// Returns all procs that have not ended, and the titles of their meshes.
    pub(crate) fn overview(&self) -> (Vec<ProcView>, Titles) {
        let procs = self.procs.iter().map(|(at, proc)| (*at, proc.life.stage(), proc.life.pid(), proc.spawner.0));
        (procs.collect(), self.titles.iter().map(|(mesh, title)| (*mesh, Arc::clone(title))).collect())
    }

    /// Whether nothing is left.
    #[cfg(test)]
    pub(crate) fn has_forgotten_all(&self) -> bool {
        let all_free = self.free_seats.len() == self.last_seat as usize;
        self.procs.is_empty()
            && self.deadlines.is_empty()
            && self.titles.is_empty()
            && self.family.is_empty()
            && all_free
    }
}
