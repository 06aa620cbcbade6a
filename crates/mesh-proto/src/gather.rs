//! Many replies becoming one.
//!
//! GTH-1: a rank's first outcome counts; later ones are dropped.

use crate::{ProcAddr, Target};
use std::sync::Arc;

/// What became of a call at one rank; `R` is a reply.
#[derive(Clone, Debug)]
pub enum Outcome<R> {
    /// The endpoint returned or raised: the reply, as it came.
    Replied(R),
    /// The proc is dead, or the message could not reach it: the reason.
    Lost(Arc<crate::Ended>),
    /// Its port was handed on, and its last holder has died.
    Deserted(crate::Deserter),
    /// The caller gave up.
    Cancelled,
}

/// Collects one outcome for every rank of a target.
///
/// A rank's first outcome counts; later ones are dropped (GTH-1). So a reply that crosses the notice of its sender's
/// death is neither lost nor counted twice.
#[derive(Debug)]
pub struct Gather<R> {
    target: Target,
    outcomes: Vec<Option<Outcome<R>>>,
    missing: usize,
}

impl<R> Gather<R> {
    /// Waits for every rank of `target`.
    #[must_use]
    pub fn new(target: Target) -> Self {
        let missing = target.receivers();
        let mut outcomes = Vec::with_capacity(target.len());
        match &target {
            // Nobody answers for vacant places.
            Target::Joined(joined) if joined.len() > missing => {
                outcomes.resize_with(joined.len(), || Some(Outcome::Cancelled));
                joined.places().for_each(|place| outcomes[place] = None);
            }
            _ => outcomes.resize_with(missing, || None),
        }
        Self { target, outcomes, missing }
    }

    /// Takes a rank's outcome; true if it was the last one missing.
    pub fn on_outcome(&mut self, index: usize, outcome: Outcome<R>) -> bool {
        match self.outcomes.get_mut(index) {
            Some(place @ None) => {
                *place = Some(outcome);
                self.missing -= 1;
                self.missing == 0
            }
            _ => false,
        }
    }

    /// Takes one outcome for all: closes the places that have none. False if this place had one already.
    pub fn settle(&mut self, index: usize, outcome: Outcome<R>) -> bool {
        let Some(place @ None) = self.outcomes.get_mut(index) else { return false };
        *place = Some(outcome);
        self.cancel();
        true
    }

    /// Forgets a rank's outcome, if there is one: somebody has it already.
    pub fn let_go(&mut self, index: usize) {
        if let Some(Some(place)) = self.outcomes.get_mut(index) {
            *place = Outcome::Cancelled;
        }
    }

    /// Whether a rank's outcome is still due.
    #[must_use]
    pub fn is_due(&self, index: usize) -> bool {
        matches!(self.outcomes.get(index), Some(None))
    }

    /// A proc has ended: if it is in the target and has not replied, it never will. True if nothing is missing any
    /// longer.
    pub fn on_down(&mut self, addr: ProcAddr, ended: &Arc<crate::Ended>) -> bool {
        let places: Vec<usize> = self.target.places_of(addr).collect();
        places.into_iter().any(|index| self.on_outcome(index, Outcome::Lost(Arc::clone(ended))))
    }

    /// The caller gave up: cancels whatever is missing. False if nothing was.
    pub fn cancel(&mut self) -> bool {
        let was = self.missing;
        for place in &mut self.outcomes {
            place.get_or_insert(Outcome::Cancelled);
        }
        self.missing = 0;
        was > 0
    }

    /// Whether every rank has an outcome.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// How many ranks have no outcome yet.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// The places that have no outcome yet.
    pub fn missing_places(&self) -> impl Iterator<Item = usize> + '_ {
        self.outcomes.iter().enumerate().filter(|(_, place)| place.is_none()).map(|(index, _)| index)
    }

    /// The ranks that were asked.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The outcomes in the order of the target; missing ones count as cancelled.
    #[must_use]
    pub fn into_outcomes(self) -> Vec<Outcome<R>> {
        self.outcomes.into_iter().map(|o| o.unwrap_or(Outcome::Cancelled)).collect()
    }
}
