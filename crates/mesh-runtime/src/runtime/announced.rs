//! Actors whose arguments have not arrived yet (SPW-1, [`super::arguments`]).

use crate::locks::lock;
use mesh_proto::messages::StopActor;
use mesh_proto::{ActorId, ProcAddr};
use std::collections::HashMap;
use std::sync::Mutex;

/// Actors of this process whose arguments have not arrived yet, and their spawners.
#[derive(Debug, Default)]
pub(crate) struct Announced(Mutex<HashMap<ActorId, ProcAddr>>);

impl Announced {
    /// An actor was announced; its arguments follow.
    pub(crate) fn add(&self, actor: ActorId, spawner: ProcAddr) {
        lock(&self.0).insert(actor, spawner);
    }

    /// The arguments of an actor have arrived.
    pub(crate) fn complete(&self, actor: ActorId) {
        lock(&self.0).remove(&actor);
    }

    /// An actor must stop. True if its arguments will never come: an agent stops what an ended process left behind, so
    /// what has not arrived by then never will.
    pub(crate) fn is_orphan(&self, stop: StopActor, from: ProcAddr) -> bool {
        if stop.call != 0 || !from.is_agent() {
            return false;
        }
        let mut announced = lock(&self.0);
        let orphan = announced.get(&stop.actor).is_some_and(|spawner| *spawner != from);
        if orphan {
            announced.remove(&stop.actor);
        }
        orphan
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}
