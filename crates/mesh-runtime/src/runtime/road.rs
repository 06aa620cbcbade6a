//! The bypass of a process: how large parts travel between hosts ([`super::offering`], [`super::landing`]).

use crate::bypass::Bypass;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The bypass, and how much was offered by it.
#[derive(Debug, Default)]
pub(crate) struct Road {
    /// With the length from which on it is used. None once it is known that there is no bypass.
    bypass: OnceLock<Option<(Bypass, usize)>>,
    was_asked: AtomicBool,
    pub(super) offered: AtomicU64,
}

impl Road {
    /// Sets it, or that there is none. Only the first call counts.
    pub(super) fn set(&self, bypass: Option<(Bypass, usize)>) {
        let _ = self.bypass.set(bypass);
    }

    /// The bypass, if it is known by now. The first time it is not, `ask` asks for it.
    pub(super) fn get(&self, ask: impl FnOnce()) -> Option<(Bypass, usize)> {
        if let Some(known) = self.bypass.get() {
            return *known;
        }
        if !self.was_asked.swap(true, Ordering::Relaxed) {
            ask();
        }
        None
    }

    /// How many parts were offered.
    pub(crate) fn offered(&self) -> u64 {
        self.offered.load(Ordering::Relaxed)
    }
}
