//! The road past the gateways: how large parts travel between hosts ([`super::offering`], [`super::landing`]).

use crate::bypass::Bypass;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The road past the gateways, and how much was offered there.
#[derive(Debug, Default)]
pub(crate) struct Road {
    /// With the length from which on it is taken. None once it is known that there is no road.
    bypass: OnceLock<Option<(Bypass, usize)>>,
    was_asked: AtomicBool,
    pub(super) offered: AtomicU64,
}

impl Road {
    /// Which it is, or that there is none. The first word counts.
    pub(super) fn set(&self, bypass: Option<(Bypass, usize)>) {
        let _ = self.bypass.set(bypass);
    }

    /// The road, if it is known by now. If nobody was asked for it yet, `ask` does.
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
