//! Many replies becoming one.
//!
//! GTH-1: a rank's first outcome counts; what comes later is dropped.

use crate::{ProcAddr, Target};
use std::sync::Arc;

/// What became of a call at one rank; `R` is a reply.
#[derive(Clone, Debug)]
pub enum Outcome<R> {
    /// The endpoint returned or raised: the reply, as it came.
    Replied(R),
    /// The proc is dead, or the message could not reach it: the reason.
    Lost(Arc<crate::Ended>),
    /// Its port was handed on, and the last that held it has died.
    Deserted(crate::Deserter),
    /// The caller gave up.
    Cancelled,
}

/// Collects one outcome for every rank of a target.
///
/// A rank's first outcome counts; what comes later is dropped (GTH-1), so that a reply which crosses the notice of
/// its sender's death is neither lost nor counted twice.
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
            // What is nobody's nobody answers for.
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

    /// One outcome speaks for all: the places that have none are closed. False if there was none left.
    pub fn settle(&mut self, index: usize, outcome: Outcome<R>) -> bool {
        let Some(place @ None) = self.outcomes.get_mut(index) else { return false };
        *place = Some(outcome);
        self.cancel();
        true
    }

    /// Forgets what a rank's outcome was, if it is there: somebody has it already.
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

    /// A proc has ended: if it is in the target and has not replied, it never will.
    pub fn on_down(&mut self, addr: ProcAddr, ended: &Arc<crate::Ended>) -> bool {
        let places: Vec<usize> = self.target.places_of(addr).collect();
        places.into_iter().any(|index| self.on_outcome(index, Outcome::Lost(Arc::clone(ended))))
    }

    /// The caller gave up: whatever is missing is cancelled.
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

    /// How many ranks have none yet.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// The places that have none yet.
    pub fn missing_places(&self) -> impl Iterator<Item = usize> + '_ {
        self.outcomes.iter().enumerate().filter(|(_, place)| place.is_none()).map(|(index, _)| index)
    }

    /// Who was asked.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The outcomes in the order of the target; those still missing count as cancelled.
    #[must_use]
    pub fn into_outcomes(self) -> Vec<Outcome<R>> {
        self.outcomes.into_iter().map(|o| o.unwrap_or(Outcome::Cancelled)).collect()
    }
}
