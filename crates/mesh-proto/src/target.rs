//! Who a message is for: one process, ranks of a mesh, or several of these, joined.
//!
//! Joined receivers are not a region of one mesh, but parts of several, one after the other.
//!
//! A message to them is one cast or single message for each piece, but one call waits for all the answers. Frames name
//! only the pieces, so only the sender needs to know how they are joined.

use crate::hosts::HostSet;
use crate::{ActorId, FrameError, HostNo, MeshId, Placement, ProcAddr};
use mesh_topology::{Region, Wire};
use std::borrow::Cow;
use std::sync::Arc;

/// Who a message is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// One proc.
    One(ProcAddr),
    /// The ranks of a region of a mesh, in the region's order, and where the mesh's ranks are.
    Many(MeshId, Region, Placement),
    /// Pieces of the other two kinds: a message for each. Never the target of a frame.
    Joined(Arc<Joined>),
}

impl Target {
    /// The mesh that the target is in; for joined receivers, the first piece's.
    #[must_use]
    pub fn mesh(&self) -> MeshId {
        match self {
            Self::One(addr) => addr.mesh,
            Self::Many(mesh, ..) => *mesh,
            Self::Joined(joined) => joined.pieces().first().map_or(0, |piece| piece.target.mesh()),
        }
    }

    /// How many places there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(_, region, _) => region.len(),
            Self::Joined(joined) => joined.len(),
        }
    }

    /// How many procs it names: as many as there are places, unless some are vacant.
    #[must_use]
    pub fn receivers(&self) -> usize {
        match self {
            Self::One(_) | Self::Many(..) => self.len(),
            Self::Joined(joined) => joined.receivers(),
        }
    }

    /// The pieces to send, one message each.
    #[must_use]
    pub fn pieces(&self) -> Cow<'_, [Piece]> {
        match self {
            Self::One(_) | Self::Many(..) => Cow::Owned(vec![Piece { first: 0, target: self.clone(), actor: None }]),
            Self::Joined(joined) => Cow::Borrowed(joined.pieces()),
        }
    }

    /// The procs that it names, in order.
    pub fn procs(&self) -> Box<dyn Iterator<Item = ProcAddr> + '_> {
        match self {
            Self::One(addr) => Box::new(std::iter::once(*addr)),
            Self::Many(mesh, region, placement) => Box::new(region.iter().map(|rank| placement.addr(*mesh, rank))),
            Self::Joined(joined) => Box::new(joined.pieces().iter().flat_map(|piece| piece.target.procs())),
        }
    }

    /// The mailboxes of that actor, or of the actors that replace it in pieces.
    pub fn mailboxes(&self, actor: ActorId) -> Box<dyn Iterator<Item = (ProcAddr, ActorId)> + '_> {
        match self {
            Self::One(_) | Self::Many(..) => Box::new(self.procs().map(move |addr| (addr, actor))),
            Self::Joined(joined) => Box::new(joined.pieces().iter().flat_map(move |piece| {
                let actor = piece.actor_of(actor);
                piece.target.procs().map(move |addr| (addr, actor))
            })),
        }
    }

    /// The proc at a place.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<ProcAddr> {
        match self {
            Self::One(addr) => (index == 0).then_some(*addr),
            Self::Many(mesh, region, placement) => Some(placement.addr(*mesh, region.rank_at(index).ok()?)),
            Self::Joined(joined) => joined.place(index),
        }
    }

    /// Whether it names nobody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The hosts of the procs that it names.
    #[must_use]
    pub fn hosts(&self) -> HostSet {
        match self {
            Self::One(addr) => HostSet::one(addr.host),
            Self::Many(_, region, placement) => placement.hosts_of(region),
            Self::Joined(joined) => {
                joined.pieces().iter().flat_map(|piece| piece.target.hosts().iter().collect::<Vec<_>>()).collect()
            }
        }
    }

    /// Whether all procs that it names are on `host`.
    #[must_use]
    pub fn is_on(&self, host: HostNo) -> bool {
        match self {
            Self::One(addr) => addr.host == host,
            Self::Many(_, region, placement) => match placement.only() {
                Some(only) => only == host,
                None => region.iter().all(|rank| placement.addr(0, rank).host == host),
            },
            Self::Joined(joined) => joined.pieces().iter().all(|piece| piece.target.is_on(host)),
        }
    }

    /// A cast's region and placement as bytes; empty for one proc, and for joined receivers, whose pieces are sent
    /// separately.
    #[must_use]
    pub fn to_wire(&self) -> Vec<u8> {
        let Self::Many(_, region, placement) = self else { return Vec::new() };
        let mut out = region.to_wire();
        out.extend_from_slice(&placement.to_wire());
        out
    }

    /// Reads what [`Target::to_wire`] made of a cast to ranks of `mesh`.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn from_wire(mesh: MeshId, raw: &[u8]) -> Result<Self, FrameError> {
        let mut rest = raw;
        let region = Region::read_wire(&mut rest).map_err(|error| FrameError::Region(error.to_string()))?;
        Ok(Self::Many(mesh, region, Placement::from_wire(rest)?))
    }

    /// The first place of `addr` in the target, if any.
    #[must_use]
    pub fn index_of(&self, addr: ProcAddr) -> Option<usize> {
        match self {
            Self::One(one) => (*one == addr).then_some(0),
            Self::Many(mesh, region, _) => {
                if *mesh == addr.mesh {
                    region.position(addr.rank as usize)
                } else {
                    None
                }
            }
            Self::Joined(joined) => joined.places_of(addr).next(),
        }
    }

    /// All places of `addr` in the target.
    pub fn places_of(&self, addr: ProcAddr) -> impl Iterator<Item = usize> + '_ {
        let (joined, single) = match self {
            Self::Joined(joined) => (Some(joined.places_of(addr)), None),
            Self::One(_) | Self::Many(..) => (None, self.index_of(addr)),
        };
        joined.into_iter().flatten().chain(single)
    }
}

impl Placement {
    /// The agents of the hosts, in the order of the ranks; `None` for the mesh of agents itself.
    #[must_use]
    pub fn agents(&self) -> Option<Target> {
        match self {
            Self::On(host) => Some(Target::One(ProcAddr::agent(*host))),
            Self::Agents => None,
            Self::Spread(spread) => Some(Target::Many(0, spread.hosts.clone(), Self::Agents)),
        }
    }
}

/// One piece of a message's receivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The place of its first receiver among all receivers.
    pub first: usize,
    /// Its receivers; never itself joined.
    pub target: Target,
    /// The actor there, if it differs from the one that the message names.
    pub actor: Option<ActorId>,
}

impl Piece {
    /// The actor that a message for `actor` is for in this piece; 0, which means the process itself, remains 0.
    #[must_use]
    pub fn actor_of(&self, actor: ActorId) -> ActorId {
        self.actor.filter(|_| actor != 0).unwrap_or(actor)
    }
}

/// Pieces in the order of their places. Places in no piece are vacant: nothing is sent there, and no answer is
/// expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    pieces: Vec<Piece>,
    len: usize,
}

impl Joined {
    /// Joins pieces, which must be in order and not overlap, into receivers with `len` places.
    #[must_use]
    pub fn new(pieces: Vec<Piece>, len: usize) -> Self {
        Self { pieces, len }
    }

    /// The pieces.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// How many places there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no places.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many places are not vacant.
    #[must_use]
    pub fn receivers(&self) -> usize {
        self.pieces.iter().map(|piece| piece.target.len()).sum()
    }

    /// The places that are not vacant, in order.
    pub fn places(&self) -> impl Iterator<Item = usize> + '_ {
        self.pieces.iter().flat_map(|piece| piece.first..piece.first + piece.target.len())
    }

    /// The proc at a place.
    #[must_use]
    pub fn place(&self, index: usize) -> Option<ProcAddr> {
        let after = self.pieces.partition_point(|piece| piece.first <= index);
        let piece = self.pieces.get(after.checked_sub(1)?)?;
        piece.target.place(index - piece.first)
    }

    /// The places of a proc: several if it is in several pieces.
    pub fn places_of(&self, addr: ProcAddr) -> impl Iterator<Item = usize> + '_ {
        self.pieces.iter().filter_map(move |piece| piece.target.index_of(addr).map(|index| piece.first + index))
    }
}

/// Makes pieces out of single receivers, as few as possible.
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    pieces: Vec<Piece>,
    /// The piece being made: ranks of a mesh at equal distances.
    run: Option<Run>,
}

#[derive(Debug)]
struct Run {
    first: usize,
    count: usize,
    mesh: u64,
    rank: usize,
    step: isize,
    placement: crate::Placement,
    actor: Option<ActorId>,
}

impl Run {
    fn piece(self) -> Piece {
        let one = |rank| Target::One(self.placement.addr(self.mesh, rank));
        let target = match self.count {
            1 => one(self.rank),
            // Ascending ranks that exist form a region.
            _ => mesh_topology::Slice::new(self.rank, &[self.count], &[self.step])
                .and_then(|slice| mesh_topology::Region::new(&["places"], slice))
                .map_or_else(|_| one(self.rank), |region| Target::Many(self.mesh, region, self.placement.clone())),
        };
        Piece { first: self.first, target, actor: self.actor }
    }

    /// Takes one more receiver, if it continues the run.
    fn take(
        &mut self,
        place: usize,
        mesh: u64,
        rank: usize,
        placement: &crate::Placement,
        actor: Option<ActorId>,
    ) -> bool {
        let ahead = place == self.first + self.count;
        if !ahead || mesh != self.mesh || actor != self.actor || *placement != self.placement {
            return false;
        }
        let (Ok(here), Ok(first)) = (isize::try_from(rank), isize::try_from(self.rank)) else { return false };
        let step = here - first;
        let goes_on = match self.count {
            1 => step > 0,
            count => isize::try_from(count).ok().and_then(|count| self.step.checked_mul(count)) == Some(step),
        };
        if goes_on {
            if self.count == 1 {
                self.step = step;
            }
            self.count += 1;
        }
        goes_on
    }
}

impl Joiner {
    pub(crate) fn add(
        &mut self,
        place: usize,
        mesh: u64,
        rank: usize,
        placement: &crate::Placement,
        actor: Option<ActorId>,
    ) {
        if let Some(run) = &mut self.run
            && run.take(place, mesh, rank, placement, actor)
        {
            return;
        }
        self.end_run();
        self.run = Some(Run { first: place, count: 1, mesh, rank, step: 1, placement: placement.clone(), actor });
    }

    pub(crate) fn add_piece(&mut self, piece: Piece) {
        self.end_run();
        self.pieces.push(piece);
    }

    fn end_run(&mut self) {
        self.pieces.extend(self.run.take().map(Run::piece));
    }

    /// Returns everything, in its simplest form.
    pub(crate) fn done(mut self, len: usize) -> Target {
        self.end_run();
        match &self.pieces[..] {
            [only] if only.first == 0 && only.actor.is_none() && only.target.len() == len => only.target.clone(),
            _ => Target::Joined(std::sync::Arc::new(Joined::new(self.pieces, len))),
        }
    }
}
