//! Who owns whom on a host: what must end with a dead proc, and who is told of its end.
//!
//! The host agent feeds it with passing frames (spawns, stops, calls) and with deaths, and does what it says. It
//! ignores actors that fail while their procs live on: their own process tells their owner.
//!
//! What is on a host may be owned from another host. Then the owner's agent is asked to report the owner's end
//! ([`Family::to_watch`]), and the death of a whole host ends every owner on it ([`Family::host_died`]).
//!
//! FAM-1: nothing outlives its owner: what a dead proc owned is ended, along with everything owned by that in turn.
//! FAM-2: nothing else is ended.
//! FAM-3: a proc that has asked something of a mesh hears of each of the mesh's deaths once; a listener, of each on its
//! host.
//! FAM-4: on one host, what a dead proc owned is told to end before anybody hears of the death, so whatever they then
//! send to it arrives after that.
//! FAM-5: what a guest script owns outlives it (see [`ProcAddr::is_guest`]), until the next script takes it over or the
//! job ends.

use crate::{ActorId, HostNo, MeshId, ProcAddr};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Something that a proc has made and owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owned {
    /// A mesh of procs.
    Procs(MeshId),
    /// One rank of a mesh of actors, not necessarily in its owner's proc.
    Actor(ProcAddr, ActorId),
}

/// The consequences of a death.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aftermath {
    /// Procs to tell.
    pub tell: Vec<ProcAddr>,
    /// What to end, the youngest first.
    pub end: Vec<Owned>,
}

#[derive(Debug, Default)]
struct Mesh {
    owner: Option<ProcAddr>,
    alive: HashSet<u32>,
    /// Procs that have asked something of it, and so must hear of its deaths.
    interested: HashSet<ProcAddr>,
}

/// The state machine; see the module.
#[derive(Debug, Default)]
pub struct Family {
    /// The host whose procs these are.
    here: HostNo,
    /// Owners on other hosts, whose agents report their ends; and those whose agents have not been asked yet.
    abroad: HashSet<ProcAddr>,
    to_watch: Vec<ProcAddr>,
    /// Hosts that have died: nobody on them owns anything.
    dead_hosts: HashSet<HostNo>,
    meshes: HashMap<MeshId, Mesh>,
    /// Procs of this host that hear of the end of every other proc here.
    listeners: HashSet<ProcAddr>,
    /// What each proc owns, in the order of creation. The controller is not in it: its end is the end of everything.
    owned: HashMap<ProcAddr, BTreeSet<(u64, Owned)>>,
    /// The owner of each actor that is not the controller's, by the proc that it lives in.
    actors: HashMap<ProcAddr, HashMap<ActorId, (ProcAddr, u64)>>,
    made: u64,
}

impl Family {
    /// The family of a host's procs.
    #[must_use]
    pub fn new(here: HostNo) -> Self {
        Self { here, ..Self::default() }
    }

    /// Whether what this proc owns outlives it: the controller's end is the end of everything, and the next script
    /// takes over from a guest (FAM-5).
    fn leaves_things(owner: ProcAddr) -> bool {
        owner.is_agent() || owner.is_guest()
    }

    fn own(&mut self, owner: ProcAddr, thing: Owned) -> u64 {
        self.made += 1;
        self.owned.entry(owner).or_default().insert((self.made, thing));
        self.made
    }

    fn disown(&mut self, owner: ProcAddr, entry: (u64, Owned)) {
        if let Some(things) = self.owned.get_mut(&owner) {
            things.remove(&entry);
            if things.is_empty() {
                self.owned.remove(&owner);
            }
        }
    }

    /// Whether an owner lives. An owner on another host is assumed to until its death is reported, and its agent must
    /// be asked to report that.
    fn can_own(&mut self, owner: ProcAddr) -> bool {
        if owner.host == self.here {
            return self.is_alive(owner);
        }
        if self.dead_hosts.contains(&owner.host) {
            return false;
        }
        if self.abroad.insert(owner) {
            self.to_watch.push(owner);
        }
        true
    }

    /// Owners on other hosts whose agents have not been asked yet.
    pub fn to_watch(&mut self) -> Vec<ProcAddr> {
        std::mem::take(&mut self.to_watch)
    }

    fn is_alive(&self, addr: ProcAddr) -> bool {
        self.meshes.get(&addr.mesh).is_some_and(|mesh| mesh.alive.contains(&addr.rank))
    }

    /// Some ranks of a mesh of procs were made here for `owner`. False if it has died meanwhile: they must not live.
    pub fn procs_made(&mut self, mesh: MeshId, ranks: std::ops::Range<u32>, owner: ProcAddr) -> bool {
        let some = !ranks.is_empty();
        let mut entry = Mesh { owner: Some(owner), alive: ranks.collect(), interested: HashSet::new() };
        let stays = Self::leaves_things(owner);
        let orphan = !stays && !self.can_own(owner);
        if !stays && !orphan {
            entry.interested.insert(owner);
            self.own(owner, Owned::Procs(mesh));
        } else if owner.host != self.here || owner.is_guest() {
            // A guest, or the controller from another host; on its own host the controller is told without a message.
            entry.interested.insert(owner);
            if owner.is_guest() && self.here != 0 {
                // The controller remembers, for the next script, what ended while there was none.
                entry.interested.insert(ProcAddr::CONTROLLER);
            }
        }
        if some {
            self.meshes.insert(mesh, entry);
        }
        !orphan
    }

    /// `owner` has spawned an actor in `home`.
    pub fn actor_made(&mut self, home: ProcAddr, actor: ActorId, owner: ProcAddr) {
        // An actor in its owner's own proc ends with it anyway, and what the controller owns ends with everything.
        if Self::leaves_things(owner) || home == owner || !self.is_alive(home) || !self.can_own(owner) {
            return;
        }
        if self.actors.get(&home).is_some_and(|actors| actors.contains_key(&actor)) {
            return;
        }
        let number = self.own(owner, Owned::Actor(home, actor));
        self.actors.entry(home).or_default().insert(actor, (owner, number));
    }

    /// An actor was told to stop.
    pub fn actor_stopped(&mut self, home: ProcAddr, actor: ActorId) {
        let Some(actors) = self.actors.get_mut(&home) else { return };
        let Some((owner, number)) = actors.remove(&actor) else { return };
        if actors.is_empty() {
            self.actors.remove(&home);
        }
        self.disown(owner, (number, Owned::Actor(home, actor)));
    }

    /// `by` has asked something of a mesh, or holds memory of it.
    pub fn asked(&mut self, by: ProcAddr, mesh: MeshId) {
        // Nobody is left to report on in a mesh that has ended.
        if let Some(mesh) = self.meshes.get_mut(&mesh) {
            mesh.interested.insert(by);
        }
    }

    /// A proc of this host wants to hear of the end of every other proc here.
    pub fn listens(&mut self, by: ProcAddr) {
        if by.host == self.here && self.is_alive(by) {
            self.listeners.insert(by);
        }
    }

    /// A proc has died. Only the first notice counts.
    pub fn died(&mut self, addr: ProcAddr) -> Aftermath {
        let mut aftermath = Aftermath::default();
        if addr.host != self.here {
            if self.abroad.remove(&addr) {
                self.bequeath(addr, &mut aftermath);
            }
            return aftermath;
        }
        let Some(mesh) = self.meshes.get_mut(&addr.mesh) else { return aftermath };
        if !mesh.alive.remove(&addr.rank) {
            return aftermath;
        }
        let heard_by = mesh.interested.union(&self.listeners).copied();
        aftermath.tell = heard_by.filter(|listener| *listener != addr).collect();
        aftermath.tell.sort_unstable();
        if mesh.alive.is_empty() {
            let owner = mesh.owner;
            self.meshes.remove(&addr.mesh);
            if let Some(owner) = owner {
                let entry = self
                    .owned
                    .get(&owner)
                    .and_then(|things| things.iter().copied().find(|(_, thing)| *thing == Owned::Procs(addr.mesh)));
                if let Some(entry) = entry {
                    self.disown(owner, entry);
                }
            }
        }
        for (actor, (owner, number)) in self.actors.remove(&addr).unwrap_or_default() {
            self.disown(owner, (number, Owned::Actor(addr, actor)));
        }
        self.bequeath(addr, &mut aftermath);
        aftermath
    }

    /// A whole host has died: whatever was owned from there must end.
    pub fn host_died(&mut self, host: HostNo) -> Aftermath {
        let mut aftermath = Aftermath::default();
        self.dead_hosts.insert(host);
        let mut owners: Vec<ProcAddr> = self.abroad.extract_if(|owner| owner.host == host).collect();
        owners.sort_unstable();
        for owner in owners {
            self.bequeath(owner, &mut aftermath);
        }
        for mesh in self.meshes.values_mut() {
            mesh.interested.retain(|listener| listener.host != host);
        }
        aftermath
    }

    /// Ends what a dead proc owned, and its interest in others.
    fn bequeath(&mut self, addr: ProcAddr, aftermath: &mut Aftermath) {
        for (_, thing) in self.owned.remove(&addr).unwrap_or_default().into_iter().rev() {
            if let Owned::Actor(home, actor) = thing
                && let Some(actors) = self.actors.get_mut(&home)
            {
                actors.remove(&actor);
                if actors.is_empty() {
                    self.actors.remove(&home);
                }
            }
            aftermath.end.push(thing);
        }
        self.listeners.remove(&addr);
        for mesh in self.meshes.values_mut() {
            mesh.interested.remove(&addr);
        }
    }

    /// The owner of a mesh that has not ended.
    #[must_use]
    pub fn owner_of(&self, mesh: MeshId) -> Option<ProcAddr> {
        self.meshes.get(&mesh).and_then(|mesh| mesh.owner)
    }

    /// The meshes that have not ended, whoever owns them.
    pub fn meshes(&self) -> impl Iterator<Item = MeshId> + '_ {
        self.meshes.keys().copied()
    }

    /// Whether nothing is remembered, because nothing lives.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.meshes.is_empty() && self.owned.is_empty() && self.actors.is_empty() && self.listeners.is_empty()
    }
}
