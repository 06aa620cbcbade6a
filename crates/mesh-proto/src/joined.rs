//! Receivers that are no region of one mesh: parts of several, one after the other.
//!
//! A message to them is a cast, or a single message, for each piece; the call that waits for their answers is one. What
//! travels names the pieces only, so that nobody but the sender has to know how they are joined.

use crate::{ActorId, ProcAddr, Target};

/// One piece of the receivers of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The place of its first receiver among all.
    pub first: usize,
    /// Its receivers; never itself joined.
    pub target: Target,
    /// The actor there, where it is another one than the message names.
    pub actor: Option<ActorId>,
}

impl Piece {
    /// The actor that a message for `actor` is for here; one for the process itself stays that.
    #[must_use]
    pub fn actor_of(&self, actor: ActorId) -> ActorId {
        self.actor.filter(|_| actor != 0).unwrap_or(actor)
    }
}

/// Pieces in the order of their places. Places that no piece has are nobody's: nothing is sent there, nor awaited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    pieces: Vec<Piece>,
    len: usize,
}

impl Joined {
    /// Joins pieces, which are in order and do not overlap, into receivers of `len` places.
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

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of them are somebody's.
    #[must_use]
    pub fn receivers(&self) -> usize {
        self.pieces.iter().map(|piece| piece.target.len()).sum()
    }

    /// The places that are somebody's, in order.
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

    /// The places of a proc: one that is in several pieces has several.
    pub fn places_of(&self, addr: ProcAddr) -> impl Iterator<Item = usize> + '_ {
        self.pieces.iter().filter_map(move |piece| piece.target.index_of(addr).map(|index| piece.first + index))
    }
}

/// Makes pieces out of single receivers, as few as there can be.
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    pieces: Vec<Piece>,
    /// The piece that is being made: a mesh's ranks at equal distances.
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
            // In ascending order, and ranks that there are, they are a region.
            _ => mesh_topology::Slice::new(self.rank, &[self.count], &[self.step])
                .and_then(|slice| mesh_topology::Region::new(&["places"], slice))
                .map_or_else(|_| one(self.rank), |region| Target::Many(self.mesh, region, self.placement.clone())),
        };
        Piece { first: self.first, target, actor: self.actor }
    }

    /// Takes one more receiver, if it goes on as it began.
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

    /// All of it, as simple as it can be said.
    pub(crate) fn done(mut self, len: usize) -> Target {
        self.end_run();
        match &self.pieces[..] {
            [only] if only.first == 0 && only.actor.is_none() && only.target.len() == len => only.target.clone(),
            _ => Target::Joined(std::sync::Arc::new(Joined::new(self.pieces, len))),
        }
    }
}
