//! Messages that cannot reach their receivers: the caller, if any, gets an answer.

use super::Runtime;
use crate::agent::MOST_PROCS;
use crate::call::Outcome;
use crate::calls;
use mesh_proto::control::{Down, Undeliverable, Watch, mesh_of, ranks_of};
use mesh_proto::messages::{Asked, Meaning};
use mesh_proto::{EndReason, Ended, Flow, Frame, Header, Kind, MeshId, PortEnd, ProcAddr, Route, Target, Undelivered};
use std::sync::Arc;
use std::time::Instant;

impl Runtime {
    /// Notifies this process when procs end; at once for those that have ended.
    pub fn watch_procs(&self, target: &Target) {
        let addrs: Vec<ProcAddr> = target.procs().collect();
        // Only this process can tell which of them end with a host.
        self.note_target(target);
        let mut unknown = Vec::new();
        for addr in addrs {
            match self.switch.route(addr) {
                Route::Gone(ended) => self.notice_down(addr, &ended, 0),
                _ => unknown.push(addr),
            }
        }
        self.watch_owners(unknown);
    }

    /// Makes the agents of these processes notify this one of their ends.
    pub(crate) fn watch_owners(&self, owners: Vec<ProcAddr>) {
        for owner in owners {
            self.dispatch(Watch::of(owner).frame(self.me, ProcAddr::agent(owner.host)), None);
        }
    }

    /// A message cannot reach its receiver: the caller, if any, gets an answer at once.
    pub(crate) fn bounce(&self, frame: &Frame, outcome: Outcome) {
        let header = frame.header;
        if header.kind == Kind::Failure && header.dst.is_guest() && self.me == ProcAddr::CONTROLLER {
            // The script that owns the actor has left: tell the next one.
            self.inboxes.notice(frame.clone());
            return;
        }
        if header.is_owed() {
            self.memory.let_go(frame);
        }
        if let Ok(Meaning::Credit(Flow::Asks(progress))) = Meaning::of(&header) {
            // Its receiver will never read what came before the question.
            self.dispatch(progress.last(header.dst, header.src), None);
            return;
        }
        self.refuse(&frame.header);
        if Meaning::of(&header).is_ok_and(|said| said.is_for_port()) {
            self.refuse_post(&header, PortEnd::ReceiverEnded);
            return;
        }
        if matches!(header.kind, Kind::SpawnProcs | Kind::StopProcs) {
            if let Outcome::Lost(ended) = &outcome {
                self.agent_lost(frame, ended);
            }
            return;
        }
        if header.kind == Kind::Watch {
            if let Outcome::Lost(ended) = &outcome {
                self.unwatched(&header, ended);
            }
            return;
        }
        let Some(asked) = Asked::of(&header) else { return };
        if header.kind == Kind::Fetch && header.src == self.me && self.landings.unasked(self, asked.call) {
            return;
        }
        if header.src == self.me {
            self.calls.on_outcome(&self.reactor, asked.call, asked.place as usize, outcome);
            self.forget_fallen();
            return;
        }
        if let Outcome::Lost(ended) = &outcome {
            self.tell_lost(&header, ended);
        }
    }

    /// Tells a sender that its receiver has ended. This answers the message; it is not the one notice of that end.
    fn tell_lost(&self, header: &Header, ended: &Ended) {
        let down = Down::answer(header.dst, ended);
        self.dispatch(down.frame(ProcAddr::agent(header.dst.host), header.src), None);
    }

    /// A process can no longer be watched. An agent that asks for itself is told of the end of a host anyway.
    fn unwatched(&self, header: &Header, ended: &Ended) {
        if !header.dst.is_agent() {
            self.tell_lost(header, ended);
        } else if !header.src.is_agent() || header.src == ProcAddr::CONTROLLER {
            let Watch { mesh, rank } = Watch::read(header);
            let whom = ProcAddr { mesh, rank, host: header.dst.host };
            self.dispatch(Down::notice(whom, ended).frame(header.dst, header.src), None);
        }
    }

    /// An order cannot reach its agent: reports each of its procs as lost to the process that gave it.
    fn agent_lost(&self, order: &Frame, ended: &Ended) {
        let header = order.header;
        let (Some(mesh), Some(ranks)) = (mesh_of(&header), ranks_of(order, MOST_PROCS)) else { return };
        for rank in ranks {
            let addr = ProcAddr { mesh, rank, host: header.dst.host };
            let down = Down::answer(addr, ended);
            self.dispatch(down.frame(ProcAddr::agent(header.dst.host), header.src), None);
        }
    }

    /// Tells a sender that its message reaches no actor, and why.
    pub(crate) fn undeliverable(&self, header: &Header, why: Undelivered) {
        if let Some(asked) = Asked::of(header) {
            self.dispatch(Undeliverable::answer(&asked, why).frame(self.me, asked.by), None);
        }
    }

    // Messages that waited for a spawn in vain.

    /// These procs could not be made: tells senders of messages that wait for them why.
    pub(crate) fn procs_failed(&self, mesh: MeshId, ended: &Arc<Ended>) {
        self.early.fail(mesh, ended).iter().for_each(|frame| self.refuse_unknown(frame));
    }

    /// Returns messages whose spawn has not come in time. Says when it wants another turn.
    pub(super) fn early_turn(&self) -> Option<Instant> {
        let now = self.started.elapsed();
        let (frames, first) = self.early.turn(now);
        let (messages, second) = self.inboxes.turn(now);
        frames.iter().for_each(|frame| self.refuse_unknown(frame));
        for message in messages {
            self.refuse(message.header());
            self.undeliverable(message.header(), Undelivered::NeverSpawned);
        }
        [first, second].into_iter().flatten().min().map(|at| self.started + at)
    }

    pub(crate) fn refuse_unknown(&self, frame: &Frame) {
        let outcome = match self.early.why(frame.header.dst.mesh) {
            Some(ended) => Outcome::Lost(ended),
            None => calls::lost(EndReason::NoSuchProc(frame.header.dst)),
        };
        self.bounce(frame, outcome);
    }
}
