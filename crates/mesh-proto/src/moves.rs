//! Where the ranks of meshes are that were repaired.
//!
//! A mesh is a list of runs of ranks, each on one host. The first are those of the procs that it was spawned with. A rank
//! that is made again gets a new proc, of a mesh of its own: so each life of a rank (its *incarnation*) has an address of
//! its own, a message to an earlier one meets nobody, and an answer to it finds no call. References name the rank; the
//! sender looks up where that is now.
//!
//! - MOV-1: news of a mesh counts if it is newer than what is known, in whatever order it comes.
//! - MOV-2: what a proc has sent is not taken once it is known that another one has its rank.

use crate::target::Joiner;
use crate::{HostNo, MeshId, Placement, ProcAddr, Target};
use std::collections::{HashMap, HashSet, VecDeque};

/// So many procs whose ranks others have are kept in mind; what older ones have sent has long arrived.
const LEFT_KEPT: usize = 4096;

/// Consecutive ranks of a mesh that live elsewhere than they were spawned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them.
    pub first: u32,
    /// How many there are; never 0.
    pub count: u32,
    /// The proc of the first. Those of the others have the ranks behind its.
    pub at: ProcAddr,
    /// Which life of theirs it is; the one that they were spawned with is 0.
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

/// What is to be known of a mesh that was repaired: all of it, so that older news may be missed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The mesh.
    pub mesh: MeshId,
    /// How often it was repaired.
    pub version: u32,
    /// Its runs in the order of their ranks, but for ranks that are where they were spawned.
    pub runs: Vec<Run>,
    /// Procs whose ranks others have got by the last repair.
    pub left: Vec<ProcAddr>,
}

impl Moved {
    /// Whether the runs are in order, apart, and of ranks that there can be.
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

/// A place of a mesh as references name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seat {
    /// The mesh that references name.
    pub mesh: MeshId,
    /// The rank there.
    pub rank: u32,
    /// Which life of that rank.
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

/// What one process knows of meshes that were repaired.
#[derive(Debug, Default)]
pub struct Moves {
    meshes: HashMap<MeshId, Repaired>,
    /// By the mesh of the procs: whose ranks they have.
    homes: HashMap<MeshId, Vec<(Run, MeshId)>>,
    /// Those of them whose procs have no rank any more, the first that lost theirs first.
    past: VecDeque<MeshId>,
    left: HashSet<ProcAddr>,
    left_in_order: VecDeque<ProcAddr>,
}

impl Moves {
    /// Whether no mesh was ever repaired, as far as is known here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.meshes.is_empty()
    }

    /// Takes news; false if they are none (MOV-1), or make no sense.
    pub fn adopt(&mut self, news: &Moved) -> bool {
        if !news.is_sound() {
            return false;
        }
        // These count whatever else is known: a reference may have told of the repair before, and says nothing of them.
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
        // Procs that had a rank before keep their name for a while: their ends may still have to be told of.
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

    /// All that is known, for a process that begins.
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

    /// The proc that a rank has now, where it is not the one that it was spawned with.
    #[must_use]
    pub fn addr(&self, mesh: MeshId, rank: u32) -> Option<ProcAddr> {
        self.meshes.get(&mesh)?.run_of(rank).map(|run| run.addr(rank))
    }

    /// Which life of its rank there is now.
    #[must_use]
    pub fn incarnation(&self, mesh: MeshId, rank: u32) -> u32 {
        self.meshes.get(&mesh).and_then(|known| known.run_of(rank)).map_or(0, |run| run.incarnation)
    }

    /// Whose rank a proc has, or had.
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

    /// Where those are now that a message is for; none if they are where it says.
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

    /// The hosts of a mesh's ranks that have moved, in the order of these.
    pub fn hosts(&self, mesh: MeshId) -> impl Iterator<Item = (std::ops::Range<u32>, HostNo)> + '_ {
        let runs = self.meshes.get(&mesh).map(|known| &known.runs[..]).unwrap_or_default();
        runs.iter().map(|run| (run.first..run.first + run.count, run.at.host))
    }
}
