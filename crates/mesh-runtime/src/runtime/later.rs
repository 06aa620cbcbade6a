//! Messages that their senders want sent once there is room; they wait in [`super::backlog`].

use super::backlog::{Deferral, Delayed, Ways};
use super::{Later, Outgoing, Packed, Runtime};
use crate::call::Call;
use crate::error::RuntimeError;
use crate::meter::Meter;
use mesh_proto::{ActorId, CallId, Frame, Target};
use std::sync::Arc;

/// How many replies such a message gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calling {
    /// One from each receiver.
    Each,
    /// Any number.
    Stream,
    /// One, which the receivers combine.
    Reduced,
}

impl Ways for Runtime {
    type Enclosed = Packed;

    fn is_clear(&self, target: &Target) -> bool {
        self.admit(target).is_ok()
    }
}

impl Runtime {
    /// Whether any message waits for room.
    pub fn defers(&self) -> bool {
        self.deferred.any()
    }

    /// The first of the receivers for which messages wait: what is sent to them now must wait behind those.
    pub fn behind(&self, target: &Target, actor: ActorId) -> Option<usize> {
        self.deferred.behind(target, actor)
    }

    /// Whether a call waits for its turn.
    pub fn waits_here(&self, call: CallId) -> bool {
        self.deferred.has_call(call)
    }

    /// Reserves room for a message of `cost` bytes that will be sent later; with `surely` even if there is none.
    ///
    /// # Errors
    /// How many bytes wait here, and how many may, if there is no room.
    pub fn reserve(&self, cost: u64, surely: bool) -> Result<(), (u64, u64)> {
        self.deferred.reserve(cost, surely)
    }

    /// Releases an unneeded reservation.
    pub fn unreserve(&self, cost: u64) {
        self.deferred.release(cost);
    }

    /// Gives up a message or a turn. False if it is on its way, or was refused.
    pub fn take_back(&self, deferral: &Deferral) -> bool {
        self.deferred.take_back(self, deferral)
    }

    /// Like [`Runtime::call_on`], once there is room. Requires a reservation, unless the message is not counted.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_later(
        &self,
        out: &Outgoing<'_>,
        target: &Arc<Target>,
        how: Calling,
        later: Later,
    ) -> Result<Arc<Call>, RuntimeError> {
        let opened = self.usable().and_then(|()| self.open(out.target.clone(), how == Calling::Stream));
        let call = opened.inspect_err(|_| self.unreserve(later.cost))?;
        if how == Calling::Reduced {
            call.mark_reduced(out.target.clone(), out.actor);
        }
        let frames = self.compose_all(&out.streamed(how == Calling::Stream), call.id);
        let delayed = Delayed { target: Arc::clone(target), later, frames, call: call.id, done: None };
        self.deferred.add(self, out.actor, delayed);
        Ok(call)
    }

    /// Like [`Runtime::tell_on`], once there is room; otherwise like [`Runtime::call_later`].
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell_later(&self, out: &Outgoing<'_>, target: &Arc<Target>, later: Later) -> Result<Deferral, RuntimeError> {
        self.usable().inspect_err(|_| self.unreserve(later.cost))?;
        Ok(self.dispatch_later(self.compose_all(out, 0), target, out.actor, later))
    }

    /// Sends frames once there is room in these mailboxes.
    pub(crate) fn dispatch_later(
        &self,
        frames: Vec<Frame>,
        target: &Arc<Target>,
        mailbox: ActorId,
        later: Later,
    ) -> Deferral {
        self.deferred.send(self, frames, target, mailbox, later)
    }

    /// Makes a thread wait for its turn: until nothing is before it, the queues on the way are within budget, and the
    /// meters, if any, let a message of `cost` bytes through.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn turn(
        &self,
        target: &Arc<Target>,
        actor: ActorId,
        meters: Option<Arc<[Arc<Meter>]>>,
        cost: u64,
    ) -> Result<Deferral, RuntimeError> {
        self.usable()?;
        let later = Later { meters, cost, ..Later::default() };
        Ok(self.dispatch_later(Vec::new(), target, actor, later))
    }
}
