//! An operation under way, as its waiters see it.
//!
//! OPR-1: an operation has one outcome, given after the last byte has moved. From then on nobody touches the caller's
//! memory. Cancelling brings the outcome sooner, but is not itself an outcome.

use crate::error::TransferError;
use crate::lock;
use crate::watch::Watch;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The result: the value that each operation found, in order; 0 for copies.
pub type Outcome = Result<Vec<u64>, TransferError>;

type Listener = Box<dyn FnOnce() + Send>;

/// Copies and atomic operations that were submitted together.
#[derive(Default)]
pub struct Operation {
    pub(crate) watch: Watch,
    state: Mutex<State>,
    done: Condvar,
}

#[derive(Default)]
struct State {
    outcome: Option<Outcome>,
    listeners: Vec<Listener>,
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operation({})", if self.is_done() { "done" } else { "under way" })
    }
}

impl Operation {
    pub(crate) fn new(deadline: Option<Instant>) -> Arc<Self> {
        Arc::new(Self { watch: Watch::new(deadline), ..Self::default() })
    }

    /// Sets the outcome; a second one is dropped.
    pub(crate) fn finish(&self, outcome: Outcome) {
        let listeners = {
            let mut state = self.state();
            if state.outcome.is_some() {
                return;
            }
            state.outcome = Some(outcome);
            std::mem::take(&mut state.listeners)
        };
        self.done.notify_all();
        for listener in listeners {
            listener();
        }
    }

    /// Whether there is an outcome.
    pub fn is_done(&self) -> bool {
        self.state().outcome.is_some()
    }

    /// Whether it finished without an error.
    pub fn has_succeeded(&self) -> bool {
        matches!(self.state().outcome, Some(Ok(_)))
    }

    /// Waits for the outcome. It does come, since everything that works on the operation heeds the deadline.
    pub fn wait(&self) -> Outcome {
        let mut state = self.state();
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes it end soon, if it is under way.
    pub fn cancel(&self) {
        self.watch.give_up();
    }

    /// Calls `listener` once, when the outcome is given, on the thread that gives it; at once if there already is one.
    pub fn on_done(&self, listener: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        if state.outcome.is_none() {
            state.listeners.push(Box::new(listener));
            return;
        }
        drop(state);
        listener();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}
