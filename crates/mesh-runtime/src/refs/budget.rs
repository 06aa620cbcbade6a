//! How many bytes of values a process may keep, and who waits for room (REF-3).

use crate::completion::{Completion, Fate};
use crate::locks::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

#[derive(Debug, Default)]
struct State {
    used: u64,
    /// The waiters for room, and the bytes that each wants.
    waiting: VecDeque<(u64, Arc<Completion>)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: u64,
    state: Mutex<State>,
}

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, state: Mutex::default() }
    }

    /// How many bytes may be kept.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many bytes are counted.
    pub(crate) fn used(&self) -> u64 {
        lock(&self.state).used
    }

    fn fits(&self, state: &State, bytes: u64) -> bool {
        state.used.saturating_add(bytes) <= self.bytes
    }

    /// Counts bytes if there is room for them now. Returns whether there is.
    pub(crate) fn reserve_now(&self, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        let fits = state.waiting.is_empty() && self.fits(&state, bytes);
        if fits {
            state.used += bytes;
        }
        fits
    }

    /// Counts bytes now, or else when the returned completion finishes.
    pub(crate) fn reserve(&self, bytes: u64, wait: impl FnOnce() -> Arc<Completion>) -> Option<Arc<Completion>> {
        let mut state = lock(&self.state);
        if state.waiting.is_empty() && self.fits(&state, bytes) {
            state.used += bytes;
            return None;
        }
        let done = wait();
        state.waiting.push_back((bytes, Arc::clone(&done)));
        Some(done)
    }

    /// Frees bytes, and lets waiters proceed for whom there is room now, in order of arrival.
    pub(crate) fn free(&self, bytes: u64) {
        let mut ready = Vec::new();
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(bytes);
        while let Some((bytes, done)) = state.waiting.front() {
            if done.fate().is_none() && !self.fits(&state, *bytes) {
                break;
            }
            let Some((bytes, done)) = state.waiting.pop_front() else { break };
            if done.begin(Fate::Status(0)) {
                state.used += bytes;
                ready.push(done);
            }
        }
        drop(state);
        ready.iter().for_each(|done| done.end());
    }

    /// Stops waiting for room, or frees it if it was just granted.
    pub(crate) fn give_up(&self, bytes: u64, done: &Arc<Completion>) {
        if done.finish(Fate::Cancelled) {
            self.free(0);
        } else if done.fate() == Some(Fate::Status(0)) {
            self.free(bytes);
        }
    }

    /// Tells all waiters that there will be no more room.
    pub(crate) fn close(&self) {
        let waiting = std::mem::take(&mut lock(&self.state).waiting);
        waiting.iter().for_each(|(_, done)| {
            done.finish(Fate::Broken);
        });
    }
}
