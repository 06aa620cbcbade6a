//! Where the ranks of repaired meshes are.
//!
//! A mesh is a list of runs of ranks, each on one host. At first these are the procs that it was spawned with. A
//! respawned rank gets a new proc, in its own mesh. So each life of a rank (its *incarnation*) has its own address, a
//! message to an earlier one reaches nobody, and an answer to it finds no call. References name the rank; the sender
//! looks up where that is now.
//!
//! - MOV-1: news of a mesh counts if it is newer than what is known, in whatever order it arrives.
//! - MOV-2: what a proc has sent is dropped once another proc is known to have its rank.

use crate::target::Joiner;
use crate::{HostNo, MeshId, Placement, ProcAddr, Target};
use std::collections::{HashMap, HashSet, VecDeque};

/// How many procs that lost their ranks are remembered; whatever older ones have sent has long arrived.
const LEFT_KEPT: usize = 4096;

/// Consecutive ranks of a mesh that no longer live where they were spawned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first rank.
    pub first: u32,
    /// How many there are; never 0.
    pub count: u32,
    /// The first rank's proc. The procs of the others have the ranks after it.
    pub at: ProcAddr,
    /// The incarnation of these ranks; 0 is the one that they were spawned with.
    pub incarnation: u32,
}

impl Run {
    fn end(&self) -> u64 {
        u64::from(self.first) + u64::from(self.count)
    }

    fn addr(&self, rank: u32) -> ProcAddr {
        ProcAddr { rank: self.at.rank + (rank - self.first), ..self.at }
    }
}

/// Everything known about a repaired mesh, so that older news may be missed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The mesh.
    pub mesh: MeshId,
    /// How many times it was repaired.
    pub version: u32,
    /// Its runs in the order of their ranks, except for ranks that are where they were spawned.
    pub runs: Vec<Run>,
    /// Procs that lost their ranks to others in the last repair.
    pub left: Vec<ProcAddr>,
}

impl Moved {
    /// Whether the runs are in order, disjoint, and of possible ranks.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let most = u64::from(u32::MAX);
        let fits =
            |run: &Run| run.count > 0 && run.end() <= most && u64::from(run.at.rank) + u64::from(run.count) <= most;
        self.mesh != 0
            && self.runs.iter().all(|run| fits(run) && !run.at.is_agent())
            && self.runs.windows(2).all(|pair| pair[0].end() <= u64::from(pair[1].first))
    }
}

/// A place of a mesh, as references name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seat {
    /// The mesh that references name.
    pub mesh: MeshId,
    /// The rank there.
    pub rank: u32,
    /// The incarnation of that rank.
    pub incarnation: u32,
}

#[derive(Debug, Default)]
struct Repaired {
    version: u32,
    runs: Vec<Run>,
}

impl Repaired {
    fn run_of(&self, rank: u32) -> Option<&Run> {
        let after = self.runs.partition_point(|run| run.first <= rank);
        self.runs.get(after.checked_sub(1)?).filter(|run| u64::from(rank) < run.end())
    }
}

/// What one process knows of repaired meshes.
#[derive(Debug, Default)]
pub struct Moves {
    meshes: HashMap<MeshId, Repaired>,
    /// By the mesh of the procs, the ranks that they have.
    homes: HashMap<MeshId, Vec<(Run, MeshId)>>,
    /// Keys of `homes` whose procs have no rank any longer, oldest loss first.
    past: VecDeque<MeshId>,
    left: HashSet<ProcAddr>,
    left_in_order: VecDeque<ProcAddr>,
}

impl Moves {
    /// Whether no mesh is known to have been repaired.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.meshes.is_empty()
    }

    /// Takes news; false if it is not new (MOV-1), or makes no sense.
    pub fn adopt(&mut self, news: &Moved) -> bool {
        if !news.is_sound() {
            return false;
        }
        // Take these in any case: a reference may have told of the repair before, and does not list them.
        for addr in &news.left {
            if self.left.insert(*addr) {
                self.left_in_order.push_back(*addr);
            }
        }
        while self.left_in_order.len() > LEFT_KEPT {
            self.left_in_order.pop_front().map(|oldest| self.left.remove(&oldest));
        }
        if self.meshes.get(&news.mesh).is_some_and(|known| known.version >= news.version) {
            return false;
        }
        // Procs that had a rank keep their seat for a while: their ends may still have to be reported.
        let before = self.meshes.get(&news.mesh).map(|known| &known.runs[..]).unwrap_or_default();
        let has_ranks = |mesh: MeshId| news.runs.iter().any(|run| run.at.mesh == mesh);
        let mut losers: Vec<MeshId> = before.iter().map(|run| run.at.mesh).filter(|mesh| !has_ranks(*mesh)).collect();
        losers.dedup();
        self.past.extend(losers);
        while self.past.len() > LEFT_KEPT {
            self.past.pop_front().map(|oldest| self.homes.remove(&oldest));
        }
        for run in &news.runs {
            let homes = self.homes.entry(run.at.mesh).or_default();
            if !homes.contains(&(*run, news.mesh)) {
                homes.push((*run, news.mesh));
            }
        }
        self.meshes.insert(news.mesh, Repaired { version: news.version, runs: news.runs.clone() });
        true
    }

    /// Everything known, for a process that starts.
    pub fn all(&self) -> impl Iterator<Item = Moved> + '_ {
        self.meshes.iter().map(|(mesh, known)| Moved {
            mesh: *mesh,
            version: known.version,
            runs: known.runs.clone(),
            left: Vec::new(),
        })
    }

    /// What is known of one mesh.
    #[must_use]
    pub fn of(&self, mesh: MeshId) -> Option<Moved> {
        let known = self.meshes.get(&mesh)?;
        Some(Moved { mesh, version: known.version, runs: known.runs.clone(), left: Vec::new() })
    }

    /// Whether another proc has the rank of this one (MOV-2).
    #[must_use]
    pub fn has_left(&self, addr: ProcAddr) -> bool {
        self.left.contains(&addr)
    }

    /// The proc that has a rank now, if it is not the one that it was spawned with.
    #[must_use]
    pub fn addr(&self, mesh: MeshId, rank: u32) -> Option<ProcAddr> {
        self.meshes.get(&mesh)?.run_of(rank).map(|run| run.addr(rank))
    }

    /// The current incarnation of a rank.
    #[must_use]
    pub fn incarnation(&self, mesh: MeshId, rank: u32) -> u32 {
        self.meshes.get(&mesh).and_then(|known| known.run_of(rank)).map_or(0, |run| run.incarnation)
    }

    /// The rank that a proc has, or had.
    #[must_use]
    pub fn seat(&self, addr: ProcAddr) -> Seat {
        let own = Seat { mesh: addr.mesh, rank: addr.rank, incarnation: 0 };
        let Some(homes) = self.homes.get(&addr.mesh) else { return own };
        let inside = |run: &Run| addr.rank.checked_sub(run.at.rank).filter(|behind| *behind < run.count);
        let found = homes.iter().find_map(|(run, mesh)| {
            let rank = run.first + inside(run)?;
            Some(Seat { mesh: *mesh, rank, incarnation: run.incarnation })
        });
        found.unwrap_or(own)
    }

    /// Where a message's receivers are now; `None` if they are where it says.
    #[must_use]
    pub fn resolve(&self, target: &Target) -> Option<Target> {
        match target {
            Target::One(addr) => self.addr(addr.mesh, addr.rank).map(Target::One),
            Target::Many(mesh, region, placement) => {
                let known = self.meshes.get(mesh)?;
                let mut joiner = Joiner::default();
                let mut moved = false;
                for (place, rank) in region.iter().enumerate() {
                    let to = u32::try_from(rank).ok().and_then(|rank| known.run_of(rank).map(|run| run.addr(rank)));
                    match to {
                        Some(to) => {
                            moved = true;
                            joiner.add(place, to.mesh, to.rank as usize, &Placement::On(to.host), None);
                        }
                        None => joiner.add(place, *mesh, rank, placement, None),
                    }
                }
                moved.then(|| joiner.done(region.len()))
            }
            Target::Joined(joined) => {
                let mut joiner = Joiner::default();
                let mut moved = false;
                for piece in joined.pieces() {
                    match self.resolve(&piece.target) {
                        None => joiner.add_piece(piece.clone()),
                        Some(target) => {
                            moved = true;
                            for part in target.pieces().iter() {
                                let first = piece.first + part.first;
                                joiner.add_piece(crate::Piece {
                                    first,
                                    target: part.target.clone(),
                                    actor: piece.actor,
                                });
                            }
                        }
                    }
                }
                moved.then(|| joiner.done(joined.len()))
            }
        }
    }

    /// The hosts of a mesh's moved ranks, in the order of the ranks.
    pub fn hosts(&self, mesh: MeshId) -> impl Iterator<Item = (std::ops::Range<u32>, HostNo)> + '_ {
        let runs = self.meshes.get(&mesh).map(|known| &known.runs[..]).unwrap_or_default();
        runs.iter().map(|run| (run.first..run.first + run.count, run.at.host))
    }
}
