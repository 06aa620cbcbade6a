//! Spawns whose arguments arrive later than the announcement of the actor.
//!
//! SPW-1: an actor is announced at once, without its arguments, so that its inbox exists: whatever is sent to it later
//! waits there. The arguments follow when its process reads ([`super::answers`]). If they never come, because the
//! spawner has ended, the inbox is closed when the spawner's agent stops what the spawner left behind.

use super::answers::Admitted;
use super::{Outgoing, Runtime, Terms};
use crate::call::Call;
use crate::completion::Completion;
use crate::error::RuntimeError;
use mesh_proto::messages::{Spawn, SpawnPart};
use mesh_proto::{Frame, ProcAddr};
use std::sync::Arc;

/// The call of a spawn; how many bytes wait for its slowest receiver; and, if too much waits, what is finished when its
/// arguments no longer do.
pub type Spawned = (Arc<Call>, usize, Option<Arc<Completion>>);

impl Runtime {
    /// If more arguments wait for processes that do not read than may: how much waits, and how much may.
    pub fn spawns_wait(&self) -> Option<(u64, u64)> {
        self.spawning.excess()
    }

    /// Like [`Runtime::call_on`], for a spawn.
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

    /// Sends a spawn to each of its receivers separately; those that do not read get its announcement (SPW-1).
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
