//! The agent's table of procs under random schedules: processes of this host and of others spawn, ask, stop and die.

use crate::agent::{Procs, Spawn};
use mesh_proto::{Aftermath, EndReason, Ended, Event, Exit, GUEST_MESHES, HostNo, MeshId, Owned, ProcAddr};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::dice::Dice;

const STEPS: u32 = 60;

/// What is known of a proc, besides the table.
#[derive(Debug)]
struct Known {
    owner: ProcAddr,
    fork_server: Option<u64>,
    seat: u32,
    is_up: bool,
}

struct World {
    here: HostNo,
    procs: Procs,
    dice: Dice,
    now: Duration,
    title: Arc<str>,
    /// Numbers the meshes.
    made: u64,
    live: BTreeMap<ProcAddr, Known>,
    dead: HashSet<ProcAddr>,
    dead_hosts: HashSet<HostNo>,
    /// Who asked something of a mesh while it lived.
    asked: BTreeMap<MeshId, BTreeSet<ProcAddr>>,
    listeners: BTreeSet<ProcAddr>,
    /// Procs that must end with their owners.
    doomed: HashSet<ProcAddr>,
}

impl World {
    fn new(seed: u64) -> Self {
        // On the controller's host, or on another.
        let here = if seed.is_multiple_of(2) { 0 } else { 2 };
        Self {
            here,
            procs: Procs::new(here),
            dice: Dice(seed),
            now: Duration::ZERO,
            title: Arc::from("t"),
            made: 0,
            live: BTreeMap::new(),
            dead: HashSet::new(),
            dead_hosts: HashSet::new(),
            asked: BTreeMap::new(),
            listeners: BTreeSet::new(),
            doomed: HashSet::new(),
        }
    }

    fn me(&self) -> ProcAddr {
        ProcAddr::agent(self.here)
    }

    fn of_here(&mut self) -> Option<ProcAddr> {
        let at = self.dice.roll(self.live.len());
        self.live.keys().nth(at).copied()
    }

    /// Any process: of this host, the agent itself, or of another host; sometimes a dead one.
    fn someone(&mut self) -> ProcAddr {
        match self.dice.roll(8_u32) {
            0 => self.me(),
            1 => ProcAddr::CONTROLLER,
            2 | 3 => ProcAddr { mesh: 900, rank: self.dice.roll(3_u32), host: 3 + self.dice.roll(2_u32) },
            4 => self.dead.iter().min().copied().unwrap_or(self.me()),
            _ => self.of_here().unwrap_or(self.me()),
        }
    }

    fn lives(&self, who: ProcAddr) -> bool {
        let gone = if who.host == self.here { !who.is_agent() && !self.live.contains_key(&who) } else { false };
        !gone && !self.dead_hosts.contains(&who.host)
    }

    fn spawn(&mut self, guest: bool) {
        self.made += 1;
        let (mesh, spawner, n, fork_server) = match guest {
            true => (GUEST_MESHES + self.made, (self.me(), 0), 1, None),
            false => (self.made, (self.someone(), 1), 1 + self.dice.roll(4_u32), Some(self.dice.roll(3_u64))),
        };
        let first = self.dice.roll(3_u32);
        let within = Duration::from_millis(self.dice.roll(80_u64));
        let (ranks, title) = (first..first + n, Arc::clone(&self.title));
        let spawn = Spawn { mesh, ranks: ranks.clone(), title: &title, spawner, fork_server, within };
        let (seats, owned) = self.procs.add(&spawn, self.now);
        assert!(!owned || self.lives(spawner.0) || spawner.0.is_guest(), "{} owns something, and is dead", spawner.0);
        assert!(
            owned || !self.lives(spawner.0) || spawner.0.host != self.here,
            "{} lives, and owns nothing",
            spawner.0
        );
        for (rank, seat) in ranks.zip(seats) {
            assert!(seat > 0 && self.live.values().all(|one| one.seat != seat), "seat {seat} is taken");
            let known = Known { owner: spawner.0, fork_server, seat, is_up: false };
            self.live.insert(ProcAddr { mesh, rank, host: self.here }, known);
        }
        // What the agent itself owns needs no message.
        if spawner.0 != self.me() && (owned || spawner.0.host != self.here) {
            self.asked.entry(mesh).or_default().insert(spawner.0);
        }
        if !owned {
            self.end(vec![Owned::Procs(mesh)]);
        }
    }

    fn on(&mut self, addr: ProcAddr, event: Event) {
        let Some(turn) = self.procs.on(addr, event, self.now) else {
            return assert!(!self.live.contains_key(&addr), "{addr} lives, and is not known");
        };
        let known = &self.live[&addr];
        if let Some(token) = turn.kill {
            assert_eq!(Some(token), known.fork_server, "killed by its own fork server, and a guest by none");
        }
        if let Some(ended) = turn.ended {
            self.bury(addr, &ended);
        }
    }

    fn hello(&mut self, addr: ProcAddr) {
        let told = self.procs.hello(addr, 9, self.now);
        let Some(known) = self.live.get_mut(&addr) else { return assert!(told.is_none(), "{addr} is not there") };
        if let Some((title, spawner)) = told {
            assert!(!known.is_up, "{addr} is up twice");
            assert_eq!((&*title, spawner.0), ("t", known.owner));
            known.is_up = true;
        }
    }

    fn bury(&mut self, addr: ProcAddr, ended: &Ended) {
        let Known { owner, .. } = self.live.remove(&addr).expect("LIF-1: an end is told once");
        assert!(self.dead.insert(addr));
        let death = self.procs.remove(addr).unwrap();
        assert_eq!(&*death.title, "t");
        assert!(ended.orderly || !self.doomed.remove(&addr) || ended.exit != Exit::Code(0));
        let Aftermath { tell, end } = death.aftermath;
        let told: BTreeSet<ProcAddr> = tell.iter().copied().collect();
        assert_eq!(told.len(), tell.len(), "FAM-3: somebody is told twice");
        let asked = self.asked.get(&addr.mesh).cloned().unwrap_or_default();
        for listener in asked.iter().chain(&self.listeners).filter(|one| **one != addr && one.host == self.here) {
            assert!(told.contains(listener) || !self.lives(*listener), "FAM-3: {listener} has not heard of {addr}");
        }
        for listener in told {
            // An owner that is gone with its host, or was a guest, is told in vain.
            assert!(
                self.lives(listener) || listener == owner && (listener.host != self.here || listener.is_guest()),
                "{listener} is dead, and told"
            );
            assert!(asked.contains(&listener) || self.listeners.contains(&listener), "{listener} has not asked");
        }
        self.end(end);
    }

    /// What a dead owner left ends too, as the agent ensures.
    fn end(&mut self, orphans: Vec<Owned>) {
        for thing in orphans {
            if let Owned::Procs(mesh) = thing {
                let stopped = self.procs.stop(|addr| addr.mesh == mesh, Duration::from_millis(5), self.now);
                let all: Vec<_> = self.live.keys().filter(|addr| addr.mesh == mesh).copied().collect();
                assert_eq!(stopped, all);
                assert!(
                    all.iter()
                        .all(|addr| !self.lives(self.live[addr].owner) || self.live[addr].owner.host != self.here)
                );
                self.doomed.extend(stopped);
            }
        }
    }

    fn late(&mut self) {
        for (addr, ..) in self.procs.late(self.now) {
            self.on(addr, Event::Tick);
        }
        assert!(self.procs.next_deadline().is_none_or(|at| at > self.now));
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.dice.roll(20_u64));
        let kind = self.dice.roll(22_u32);
        if let 0..=3 = kind {
            let guest = kind == 3 && self.here == 0 && self.dice.roll(2_u32) == 0;
            return self.spawn(guest);
        }
        let Some(addr) = self.of_here() else { return };
        match kind {
            4 | 5 => self.on(addr, Event::Forked(9)),
            6..=8 => self.hello(addr),
            9 => self.on(addr, Event::Goodbye(EndReason::Unstated)),
            10 => self.on(addr, Event::LinkClosed(EndReason::ConnectionClosed(0))),
            11 => self.on(addr, Event::Exited(Exit::Code(0))),
            12 => self.on(addr, Event::Exited(Exit::Signal(9))),
            13 => self.on(addr, Event::SpawnFailed(EndReason::NotMade("no".to_owned()))),
            14 => {
                let within = Duration::from_millis(self.dice.roll(30_u64));
                self.procs.stop(|one| one.mesh == addr.mesh, within, self.now);
            }
            15 | 16 => {
                let by = self.someone();
                if self.lives(by) {
                    self.procs.family.asked(by, addr.mesh);
                    self.asked.entry(addr.mesh).or_default().insert(by);
                }
            }
            17 => {
                self.procs.family.listens(addr);
                self.listeners.insert(addr);
            }
            18 => {
                // A fork server dies.
                let token = self.dice.roll(3_u64);
                for addr in self.procs.of_fork_server(token) {
                    self.on(addr, Event::SpawnFailed(EndReason::ForkServerEnded(7)));
                }
                assert!(self.live.values().all(|one| one.fork_server != Some(token)));
            }
            19 if self.dice.roll(4_u32) == 0 => {
                let host = 3 + self.dice.roll(2_u32);
                let orphans = self.procs.family.host_died(host).end;
                self.dead_hosts.insert(host);
                self.end(orphans);
            }
            // A proc that has ended, or never existed.
            20 => {
                let ghost = ProcAddr { mesh: addr.mesh, rank: addr.rank + 40, host: self.here };
                self.hello(ghost);
                self.on(ghost, Event::Exited(Exit::Unknown));
                let dead = self.dead.iter().min().copied().unwrap_or(ghost);
                self.on(dead, Event::Exited(Exit::Unknown));
            }
            _ => self.late(),
        }
    }

    /// Everything is asked to stop; some do, and the rest is killed.
    fn finish(&mut self) {
        self.procs.stop(|_| true, Duration::from_millis(10), self.now);
        while let Some(addr) = self.of_here() {
            if self.dice.roll(2_u32) == 0 {
                self.on(addr, Event::Exited(Exit::Code(0)));
            }
            self.now = self.procs.next_deadline().unwrap_or(self.now).max(self.now);
            self.late();
        }
    }
}

/// LIF-1, FAM-3.
#[test]
fn every_proc_is_up_once_at_most_and_ends_once_and_nothing_is_left() {
    for seed in 0..if cfg!(debug_assertions) { 2_000 } else { 20_000 } {
        let mut world = World::new(seed);
        (0..STEPS).for_each(|_| world.step());
        world.finish();
        assert!(world.procs.has_forgotten_all(), "schedule {seed} leaves {:?}", world.procs);
    }
}
