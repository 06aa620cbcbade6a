//! Spawns whose arguments arrive later than the news of the actor.
//!
//! SPW-1: an actor is announced at once, without its arguments, so that its inbox exists: whatever anybody sends to it later
//! waits there. The arguments follow when its process reads ([`super::answers`]). If they never come, because the spawner has
//! ended, the inbox is closed when the spawner's agent stops what the spawner has left behind.

use super::answers::Admitted;
use super::{Outgoing, Runtime, Terms};
use crate::calls::Call;
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::locks::lock;
use mesh_proto::messages::{Spawn, SpawnPart, StopActor};
use mesh_proto::{ActorId, Frame, ProcAddr};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The call of a spawn; how many bytes wait on the way to its slowest receiver; and, where too much waits, what is finished
/// when its arguments no longer do.
pub type Spawned = (Arc<Call>, usize, Option<Arc<Completion>>);

/// Actors of this process whose arguments have not come yet, and their spawners.
#[derive(Debug, Default)]
pub(crate) struct Announced(Mutex<HashMap<ActorId, ProcAddr>>);

impl Announced {
    /// An actor is announced, and its arguments follow.
    pub(crate) fn add(&self, actor: ActorId, spawner: ProcAddr) {
        lock(&self.0).insert(actor, spawner);
    }

    /// The arguments of an actor have come.
    pub(crate) fn complete(&self, actor: ActorId) {
        lock(&self.0).remove(&actor);
    }

    /// An actor is to stop. True if its arguments will never come: an agent stops what a process has left behind that has
    /// ended, so what has not come by now never will.
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

impl Runtime {
    /// If more waits to be spawned than may, because processes do not read: how much waits, and how much may.
    pub fn spawns_wait(&self) -> Option<(u64, u64)> {
        self.spawning.excess()
    }

    /// As [`Runtime::call_on`], for a spawn.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_spawn(&self, out: &Outgoing<'_>, terms: Terms) -> Result<Spawned, RuntimeError> {
        self.usable()?;
        let Admitted { late, questions } = self.spawning.admit(out.target.procs(), out.cost());
        let (call, queued, full) = if late.is_empty() {
            let (call, queued) = self.call_on(out, false, terms)?;
            (call, queued, None)
        } else {
            let call = self.open(out.target.clone(), false)?;
            let full = self.announce(out, &call, terms, &late);
            (call, 0, full)
        };
        self.spawning.ask(self, questions);
        Ok((call, queued, full))
    }

    /// Sends a spawn to each of its receivers by itself; to those that do not read, its announcement (SPW-1).
    #[cold]
    fn announce(&self, out: &Outgoing<'_>, call: &Call, terms: Terms, late: &[ProcAddr]) -> Option<Arc<Completion>> {
        let pieces = out.target.pieces();
        let mut full = None;
        for (frame, piece) in self.compose_all(out, call.id).into_iter().zip(pieces.iter()) {
            let frame = terms.mark(frame);
            let Ok(first) = Spawn::read(&frame.header) else { continue };
            for (nth, addr) in (0..).zip(piece.target.procs()) {
                let place = first.place + nth;
                let mut frame = frame.for_one(addr, nth);
                if !late.contains(&addr) {
                    self.dispatch(frame, None);
                    continue;
                }
                let announced = Spawn { call: 0, place, part: SpawnPart::Announced, ..first };
                self.dispatch(Frame::build_plain(announced.header(self.me, addr), None, frame.name(), b""), None);
                Spawn { place, part: SpawnPart::Arguments, ..first }.mark(&mut frame.header);
                full = self.spawning.send(self, frame, None, true).full.or(full);
            }
        }
        full
    }
}
