//! The parts to which the switch hands frames, by their kind.

use super::Runtime;
use super::early::NotEarly;
use super::switch::Parts;
use crate::call::Outcome;
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::Meaning;
use mesh_proto::{Frame, Kind, LinkId, ProcAddr, Undelivered};

impl Parts for Runtime {
    fn is_abroad(&self) -> bool {
        self.gateway.is_active()
    }

    fn expects_early(&self) -> bool {
        self.gateway.is_active()
    }

    fn overhear(&self, frame: &Frame, came: bool) {
        if came {
            self.agent.overhear(self, &frame.header);
        }
        if frame.header.carries_refs() || frame.header.is_distant() {
            let owners = self.remote_values.note_carried(frame);
            self.watch_owners(owners);
        }
    }

    /// Behind what its sender sent before.
    fn deliver(&self, frame: Frame) {
        if self.landings.concerns(&frame) {
            self.landings.land(self, frame);
        } else {
            self.take_in(frame);
        }
    }

    fn send_remote(&self, frame: &Frame, hosts: HostSet) -> usize {
        self.send_remote(frame, hosts)
    }

    fn has_output(&self, frame: &Frame) -> bool {
        self.has_output(frame)
    }

    fn answers_for(&self, frame: &Frame) -> bool {
        self.remote_values.answers(frame, self)
    }

    fn await_procs(&self, frame: Frame, from: Option<LinkId>) {
        match self.early.keep(&self.switch, frame, self.started.elapsed()) {
            Ok(()) => self.reactor.ring_io(),
            Err(NotEarly::Known(frame)) => {
                self.dispatch(frame, from);
            }
            Err(NotEarly::Refused(frame)) => self.refuse_unknown(&frame),
        }
    }

    fn refuse_unknown(&self, frame: &Frame) {
        self.refuse_unknown(frame);
    }

    fn bounce(&self, frame: &Frame, outcome: Outcome) {
        self.bounce(frame, outcome);
    }
}

impl Runtime {
    /// For code that has a frame for this process.
    pub(crate) fn deliver(&self, frame: Frame) {
        Parts::deliver(self, frame);
    }

    /// Hands a frame to the responsible part of this process.
    pub(super) fn take_in(&self, frame: Frame) {
        let header = frame.header;
        let said = if self.moving.is_outdated(header.src) { None } else { Meaning::read(&frame).ok() };
        let Some(said) = said else {
            // From a process whose rank another one has (MOV-2), or not made by a process of Mesh (MSG-1).
            return self.memory.let_go(&frame);
        };
        match said {
            Meaning::Reply(_) | Meaning::Undeliverable(_) => self.on_answer(said, frame),
            Meaning::Post(post) => self.on_post(post, frame),
            Meaning::Call(_) | Meaning::Tell(_) | Meaning::StopActor(_) => self.on_message(said, frame),
            Meaning::Spawn(spawn) => self.on_spawn(spawn, frame),
            Meaning::Cancel(cancel) => self.on_cancel(cancel, frame),
            Meaning::Partial(_) | Meaning::Control(Kind::StopProc) => self.inboxes.tell_system(frame),
            Meaning::Credit(flow) => self.on_credit(flow, header.src),
            Meaning::Failure(_) => self.inboxes.notice(frame),
            Meaning::Extend(_) if self.me.is_agent() && self.me != ProcAddr::CONTROLLER => {
                self.refuse(&header);
                self.undeliverable(&header, Undelivered::NoExtensions);
            }
            Meaning::Extend(_) => self.inboxes.notice(frame),
            Meaning::Control(Kind::Closed) => self.on_closed(&frame),
            Meaning::Control(Kind::Held) => self.on_held(&frame),
            Meaning::Control(Kind::Fetch) => self.on_fetch(&header),
            Meaning::Control(Kind::Down) => self.on_down(&frame),
            Meaning::Control(Kind::SpawnProcs) => self.on_spawn_procs(&frame),
            Meaning::Control(Kind::StopProcs) => self.on_stop_procs(&frame),
            Meaning::Control(Kind::Hello) => self.agent.on_hello(self, &header),
            Meaning::Control(Kind::Goodbye) => self.on_goodbye(&frame),
            Meaning::Control(Kind::Watch) => self.agent.on_watch(self, &header),
            Meaning::Control(Kind::Inspect) => self.on_inspect(&frame),
            Meaning::Control(Kind::Moved | Kind::GivenUp) => self.on_news(&frame),
            Meaning::Control(Kind::Direct) => self.on_direct(&frame),
            Meaning::Control(Kind::Lines) => self.logs.on_lines(&frame),
            Meaning::Control(_) => self.on_gateway_frame(frame),
            // Split where it arrives; and a process's notices to itself do not come this way.
            Meaning::Gathered(_) | Meaning::Unseen(_) => {}
        }
    }
}
