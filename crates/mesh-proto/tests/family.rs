//! Ownership and deaths under random schedules, against a model that knows everything.

use crate::support::config;
use mesh_proto::{ActorId, Aftermath, Family, MeshId, Owned, ProcAddr};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};

const ROOT: ProcAddr = ProcAddr::CONTROLLER;

#[derive(Clone, Debug)]
enum Step {
    /// A living proc, or the controller, makes a mesh of procs.
    Procs { by: usize, n: u32 },
    /// ... an actor on another living proc.
    Actor { by: usize, on: usize },
    /// ... asks something of a mesh.
    Ask { by: usize, of: usize },
    /// ... wants to hear of the end of every proc.
    Listen { by: usize },
    /// An actor is told to stop.
    Stop { which: usize },
    /// A living proc is killed.
    Kill { which: usize },
    /// The machine's oldest order is carried out.
    Obey,
}

fn step() -> impl Strategy<Value = Step> {
    let n = any::<usize>;
    prop_oneof![
        3 => (n(), 1_u32..4).prop_map(|(by, n)| Step::Procs { by, n }),
        4 => (n(), n()).prop_map(|(by, on)| Step::Actor { by, on }),
        2 => (n(), n()).prop_map(|(by, of)| Step::Ask { by, of }),
        1 => n().prop_map(|by| Step::Listen { by }),
        1 => n().prop_map(|which| Step::Stop { which }),
        3 => n().prop_map(|which| Step::Kill { which }),
        3 => Just(Step::Obey),
    ]
}

/// Everything that lives, as an omniscient observer sees it.
#[derive(Default)]
struct World {
    family: Family,
    next: u64,
    /// Living procs in the order of creation, with their owners.
    procs: Vec<(ProcAddr, ProcAddr)>,
    actors: HashMap<(ProcAddr, ActorId), ProcAddr>,
    dead: HashSet<ProcAddr>,
    /// Who must hear of the deaths in a mesh, and who has heard.
    asked: HashMap<MeshId, HashSet<ProcAddr>>,
    listeners: HashSet<ProcAddr>,
    heard: HashSet<(ProcAddr, ProcAddr)>,
    orders: VecDeque<Owned>,
    killed: HashSet<ProcAddr>,
}

impl World {
    fn someone(&self, pick: usize) -> ProcAddr {
        match pick % (self.procs.len() + 1) {
            0 => ROOT,
            at => self.procs[at - 1].0,
        }
    }

    fn is_orphan(&self, owner: ProcAddr) -> bool {
        owner != ROOT && self.dead.contains(&owner)
    }

    fn die(&mut self, addr: ProcAddr) {
        let Some(at) = self.procs.iter().position(|(proc, _)| *proc == addr) else {
            assert!(self.family.died(addr) == mesh_proto::Aftermath::default(), "a death counts once");
            return;
        };
        self.procs.remove(at);
        self.dead.insert(addr);
        self.actors.retain(|(home, _), _| *home != addr);
        let aftermath = self.family.died(addr);
        for listener in aftermath.tell {
            assert!(!self.dead.contains(&listener), "the dead are not told");
            let asked = self.asked.get(&addr.mesh).is_some_and(|who| who.contains(&listener));
            assert!(asked || self.listeners.contains(&listener), "nobody asked for that");
            assert!(self.heard.insert((listener, addr)), "FAM-3: told twice");
        }
        for listener in self.asked.get(&addr.mesh).into_iter().flatten().chain(&self.listeners) {
            let told = self.heard.contains(&(*listener, addr));
            assert!(
                told || self.dead.contains(listener) || *listener == addr,
                "FAM-3: {listener} has not heard of {addr}"
            );
        }
        for thing in aftermath.end {
            // FAM-2: only what belongs to the dead is ended.
            match thing {
                Owned::Procs(mesh) => {
                    assert!(self.procs.iter().filter(|(p, _)| p.mesh == mesh).all(|(_, owner)| *owner == addr));
                }
                Owned::Actor(home, actor) => assert_eq!(self.actors.get(&(home, actor)), Some(&addr)),
            }
            self.orders.push_back(thing);
        }
    }

    fn obey(&mut self) -> bool {
        match self.orders.pop_front() {
            None => return false,
            Some(Owned::Procs(mesh)) => {
                let all: Vec<ProcAddr> = self.procs.iter().map(|(p, _)| *p).filter(|p| p.mesh == mesh).collect();
                for addr in all {
                    self.die(addr);
                }
            }
            Some(Owned::Actor(home, actor)) => {
                self.actors.remove(&(home, actor));
                self.family.actor_stopped(home, actor);
            }
        }
        true
    }

    fn take(&mut self, step: &Step) {
        self.next += 1;
        match *step {
            Step::Procs { by, n } => {
                let (owner, mesh) = (self.someone(by), self.next);
                assert!(self.family.procs_made(mesh, 0..n, owner), "its owner lives");
                self.procs.extend((0..n).map(|rank| (ProcAddr { mesh, rank, host: 0 }, owner)));
                if owner != ROOT {
                    self.asked.entry(mesh).or_default().insert(owner);
                }
            }
            Step::Actor { by, on } => {
                let (owner, home) = (self.someone(by), self.someone(on));
                if home != ROOT && owner != ROOT && home != owner {
                    self.actors.insert((home, self.next), owner);
                }
                self.family.actor_made(home, self.next, owner);
            }
            Step::Ask { by, of } => {
                let (by, of) = (self.someone(by), self.someone(of));
                if by != ROOT && of != ROOT {
                    self.family.asked(by, of.mesh);
                    self.asked.entry(of.mesh).or_default().insert(by);
                }
            }
            Step::Listen { by } => {
                let by = self.someone(by);
                self.family.listens(by);
                if by != ROOT {
                    self.listeners.insert(by);
                }
            }
            Step::Stop { which } => {
                let mut all: Vec<(ProcAddr, ActorId)> = self.actors.keys().copied().collect();
                all.sort_unstable();
                if let Some((home, actor)) = all.get(which % all.len().max(1)).copied() {
                    self.actors.remove(&(home, actor));
                    self.orders.retain(|thing| *thing != Owned::Actor(home, actor));
                    self.family.actor_stopped(home, actor);
                }
            }
            Step::Kill { which } => {
                let addr = self.someone(which);
                if addr != ROOT {
                    self.killed.insert(addr);
                    self.die(addr);
                }
            }
            Step::Obey => {
                self.obey();
            }
        }
    }
}

proptest! {
    #![proptest_config(config(3000, 31))]

    /// FAM-1, FAM-2, FAM-3, and that nothing gone is remembered.
    #[test]
    fn what_the_dead_owned_ends_and_nothing_else(steps in prop::collection::vec(step(), 0..60)) {
        let mut world = World::default();
        for step in &steps {
            world.take(step);
        }
        while world.obey() {}
        for (addr, owner) in &world.procs {
            prop_assert!(!world.is_orphan(*owner), "FAM-1: {addr} outlives its owner {owner}");
        }
        for ((home, actor), owner) in &world.actors {
            prop_assert!(!world.is_orphan(*owner), "FAM-1: actor {actor} on {home} outlives its owner {owner}");
        }
        // FAM-2: whatever died was killed, or an owner above it was.
        for addr in &world.dead {
            prop_assert!(!world.killed.is_empty(), "{addr} died of nothing");
        }
        while let Some((addr, _)) = world.procs.first().copied() {
            world.die(addr);
            while world.obey() {}
        }
        prop_assert!(world.family.is_empty(), "{:?}", world.family);
    }
}

#[test]
fn a_mesh_whose_owner_is_dead_must_not_live() {
    let mut family = Family::default();
    let owner = ProcAddr { mesh: 1, rank: 0, host: 0 };
    assert!(family.procs_made(1, 0..1, ROOT));
    family.died(owner);
    assert!(!family.procs_made(2, 0..3, owner));
    assert_eq!(family.died(owner), mesh_proto::Aftermath::default());
}

#[test]
fn what_is_owned_from_another_host_ends_with_its_owner_or_its_host() {
    let mut family = Family::new(2);
    let (near, far, other) = (
        ProcAddr { mesh: 5, rank: 3, host: 2 },
        ProcAddr { mesh: 5, rank: 0, host: 1 },
        ProcAddr { mesh: 6, rank: 0, host: 1 },
    );
    assert!(family.procs_made(5, 2..4, ROOT));
    assert!(family.procs_made(9, 4..6, far));
    family.actor_made(near, 77, other);
    assert_eq!(family.to_watch(), [far, other], "their agents are to tell of their ends");
    assert_eq!(family.to_watch(), []);
    family.actor_made(near, 78, far);
    assert_eq!(family.to_watch(), [], "once");
    assert_eq!(family.died(far).end, [Owned::Actor(near, 78), Owned::Procs(9)]);
    assert_eq!(family.died(far), Aftermath::default(), "only the first notice counts");
    assert_eq!(family.host_died(1).end, [Owned::Actor(near, 77)]);
    assert!(!family.procs_made(10, 0..1, far), "nobody on a dead host owns anything");
    let told = family.died(near).tell;
    assert_eq!(told, [ROOT], "who owns it from another host is told");
}

/// FAM-5.
#[test]
fn what_a_guest_owns_outlives_it_on_its_host_and_on_others() {
    let guest = ProcAddr { mesh: mesh_proto::GUEST_MESHES, rank: 0, host: 0 };
    let next = ProcAddr { mesh: mesh_proto::GUEST_MESHES + 1, rank: 0, host: 0 };
    for here in [0, 3] {
        let mut family = Family::new(here);
        if here == 0 {
            assert!(family.procs_made(guest.mesh, 0..1, ROOT));
        }
        assert!(family.procs_made(7, 0..2, guest));
        let (first, second) = (ProcAddr { mesh: 7, rank: 0, host: here }, ProcAddr { mesh: 7, rank: 1, host: here });
        family.actor_made(first, 11, guest);
        // Owned by something that a guest owns.
        assert!(family.procs_made(8, 0..1, first));
        assert_eq!(family.died(guest).end, [], "nothing of it ends");
        // The controller remembers what ends meanwhile, unless it is told of everything anyway.
        let told = family.died(second).tell;
        assert_eq!(told.contains(&ROOT), here != 0, "{told:?}");
        family.asked(next, 7);
        let aftermath = family.died(first);
        assert!(aftermath.tell.contains(&next), "{aftermath:?}");
        assert_eq!(aftermath.end, [Owned::Procs(8)], "what others own ends with them as ever");
    }
}

#[test]
fn processes_of_the_controller_alone_are_remembered_until_they_die() {
    let mut family = Family::new(0);
    assert!(family.is_empty());
    assert!(family.procs_made(1, 0..1, ROOT));
    assert!(!family.is_empty());
    assert_eq!(family.died(ProcAddr { mesh: 1, rank: 0, host: 0 }), Aftermath::default());
    assert!(family.is_empty());
}
