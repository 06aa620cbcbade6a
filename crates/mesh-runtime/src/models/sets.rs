//! The descriptors that the reactor sleeps on, as far as it can tell: level-triggered, and waking whoever sleeps.

use crate::error::RuntimeError;
use crate::sync::{Mutex, MutexGuard, yield_now};
use loom::sync::Condvar;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// What ended a sleep of the I/O thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roused {
    pub(crate) rung: bool,
    pub(crate) readable: bool,
}

#[derive(Debug, Default)]
struct State {
    wake: bool,
    io: bool,
    armed: bool,
    /// Tokens of links that can be read.
    readable: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Sets {
    state: Mutex<State>,
    changed: Condvar,
}

impl Sets {
    #[expect(clippy::unnecessary_wraps, reason = "as that of the real ones")]
    pub(crate) fn new() -> Result<Self, RuntimeError> {
        Ok(Self { state: Mutex::new(State { armed: true, ..State::default() }), changed: Condvar::new() })
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Something has come on a link.
    pub(crate) fn arrive(&self, token: u64) {
        self.change(|state| state.readable.push(token));
    }

    /// Everything is read that has come on a link.
    pub(crate) fn read(&self, token: u64) {
        self.change(|state| state.readable.retain(|one| *one != token));
    }

    #[expect(clippy::unnecessary_wraps, reason = "as that of the real ones")]
    pub(crate) fn add(&self, _: BorrowedFd<'_>, _: u64) -> Result<(), RuntimeError> {
        Ok(())
    }

    pub(crate) fn watch_ways(&self, _: BorrowedFd<'_>, _: u64, _: bool, _: bool) {}

    pub(crate) fn watch(&self, _: BorrowedFd<'_>, _: u64, _: bool) {}

    pub(crate) fn watch_once(&self, _: BorrowedFd<'_>, _: u64, _: bool) {}

    pub(crate) fn watch_end(&self, _: BorrowedFd<'_>, _: u64) {}

    pub(crate) fn remove(&self, _: BorrowedFd<'_>) {}

    pub(crate) fn arm(&self, armed: bool) {
        self.change(|state| state.armed = armed);
    }

    pub(crate) fn ring_leader(&self) {
        self.change(|state| state.wake = true);
    }

    pub(crate) fn ring_io(&self) {
        self.change(|state| state.io = true);
    }

    pub(crate) fn hear_io(&self) {
        self.change(|state| state.io = false);
    }

    pub(crate) fn wait_as_io(&self, _: Option<Duration>) -> Roused {
        // It is awake again at once while a leader steps down: the others are to get on meanwhile.
        yield_now();
        let mut state = self.lock();
        loop {
            let readable = state.armed && (state.wake || !state.readable.is_empty());
            if state.io || readable {
                return Roused { rung: state.io, readable };
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    pub(crate) fn poll_links(
        &self,
        limit: Option<Duration>,
        _: u64,
        woken: impl FnOnce(),
        mut on_ready: impl FnMut(u64, bool, bool),
    ) {
        let mut state = self.lock();
        while limit.is_none() && !state.wake && state.readable.is_empty() {
            state = self.changed.wait(state).unwrap();
        }
        let tokens = state.readable.clone();
        let rung = state.wake;
        drop(state);
        woken();
        if rung {
            self.change(|state| state.wake = false);
        }
        tokens.into_iter().for_each(|token| on_ready(token, true, false));
    }
}
