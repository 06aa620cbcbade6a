//! Who waits in this process, and since when.
//!
//! WTS-1: a wait for a call or a promise is noted before it begins, whether a thread blocks or a loop or list listens.
//! So every wait under way is an edge, and nothing else is.

use crate::locks::lock;
use mesh_proto::ActorId;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

#[derive(Debug, Default)]
struct Threads {
    blocked: u32,
    since: Option<Instant>,
}

/// The waits for one thing.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    threads: Mutex<Threads>,
    /// The waiting actor; 0 for none.
    asker: AtomicU64,
}

impl Waits {
    /// Sets which actor is about to wait.
    pub(crate) fn asked_by(&self, actor: ActorId) {
        self.asker.store(actor, Ordering::Relaxed);
    }

    /// Notes that a thread blocks, until the result is dropped.
    pub(crate) fn block(&self) -> Waiting<'_> {
        let mut threads = lock(&self.threads);
        if threads.blocked == 0 {
            threads.since = Some(Instant::now());
        }
        threads.blocked += 1;
        Waiting(self)
    }

    /// Notes the first listener.
    pub(crate) fn listened(&self) {
        let mut threads = lock(&self.threads);
        if threads.blocked == 0 {
            threads.since = Some(Instant::now());
        }
    }

    /// The waiting actor, and since when; `listens` says whether anything listens.
    pub(crate) fn look(&self, listens: bool) -> Option<(ActorId, Instant)> {
        let threads = lock(&self.threads);
        let since = threads.since.filter(|_| listens || threads.blocked > 0)?;
        Some((self.asker.load(Ordering::Relaxed), since))
    }
}

/// A waiting thread.
#[derive(Debug)]
#[must_use]
pub struct Waiting<'a>(&'a Waits);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.threads).blocked -= 1;
    }
}

/// Threads that wait for room in a mailbox, with the actors that they work for.
#[derive(Debug, Default)]
pub(crate) struct Blocked(Mutex<Vec<(ActorId, Instant)>>);

impl Blocked {
    pub(crate) fn block(&self, actor: ActorId) -> InRoom<'_> {
        lock(&self.0).push((actor, Instant::now()));
        InRoom(self, actor)
    }

    pub(crate) fn look(&self) -> Vec<(ActorId, Instant)> {
        lock(&self.0).clone()
    }
}

/// A thread that waits for room.
#[derive(Debug)]
#[must_use]
pub struct InRoom<'a>(&'a Blocked, ActorId);

impl Drop for InRoom<'_> {
    fn drop(&mut self) {
        let mut blocked = lock(&self.0.0);
        if let Some(place) = blocked.iter().position(|(actor, _)| *actor == self.1) {
            blocked.swap_remove(place);
        }
    }
}
