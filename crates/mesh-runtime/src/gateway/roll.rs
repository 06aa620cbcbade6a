//! Which hosts there are, as the controller knows them: for people, and for whoever has to ask all of them something.

use super::{HostState, HostView};
use crate::inspect::Note;
use crate::runtime::{Runtime, lock};
use mesh_proto::control::Introduction;
use mesh_proto::hosts::Fate;
use mesh_proto::messages::Reply;
use mesh_proto::{Frame, HostEnd, HostNo, MeshId, Part, ProcAddr, Target, is_host_mesh};
use std::time::Duration;

impl Runtime {
    /// The agents of all hosts that were ever attached, at the controller; none if there was none.
    pub(crate) fn other_agents(&self) -> Option<Target> {
        lock(&self.gateway.state).machine.agents()
    }

    /// The hosts that were attached here, dead ones included.
    pub fn roll(&self) -> Vec<HostView> {
        lock(&self.gateway.state).machine.roll()
    }

    /// What these hosts have said of themselves; none of those that have not, or that only the controller has heard.
    pub fn introductions(&self, hosts: &[HostNo]) -> Vec<Option<Introduction>> {
        let state = lock(&self.gateway.state);
        hosts.iter().map(|host| state.machine.introduction(*host).cloned()).collect()
    }

    /// The hosts that can be expected to answer, at the controller.
    pub(crate) fn hosts_in_reach(&self) -> Vec<HostNo> {
        if !self.gateway.is_active() {
            return Vec::new();
        }
        let reachable = |one: &HostView| matches!(one.state, HostState::Running | HostState::Suspect);
        self.roll().into_iter().filter(reachable).map(|one| one.host).collect()
    }

    /// What people call a host, as far as it is known here.
    pub fn host_called(&self, host: HostNo) -> Option<String> {
        lock(&self.gateway.state).machine.name_of(host)
    }

    /// A reply of an agent has come: if it is the one to its attachment, the agent says in it what it is called.
    pub(super) fn note_introduction(&self, frame: &Frame) {
        let host = frame.header.src.host;
        let Ok(Reply { call, .. }) = Reply::read(&frame.header) else { return };
        let said = || match frame.parts().ok()?.first()? {
            Part::Inline(raw) => Introduction::decode(raw),
            _ => None,
        };
        let name = {
            let machine = &mut lock(&self.gateway.state).machine;
            if !machine.introduce(host, call, said) {
                return;
            }
            machine.introduction(host).map(|said| said.name.clone()).unwrap_or_default()
        };
        self.note(Note::new("host_attached", ProcAddr::agent(host)).text("host", &name), false);
        if let Some(frame) = self.inspector.watch_frame(ProcAddr::agent(host)) {
            self.dispatch(frame, None);
        }
    }

    /// A host is dead from now on: an event, at the controller.
    pub(super) fn note_host_died(&self, host: HostNo, verdict: &HostEnd) {
        if self.me != ProcAddr::CONTROLLER {
            return;
        }
        let name = self.host_called(host).unwrap_or_else(|| format!("host {host}"));
        let released = verdict.fate == Fate::Released;
        let kind = if released { "host_stopped" } else { "host_died" };
        self.note(Note::new(kind, ProcAddr::agent(host)).text("host", &name).text("text", &verdict.why), !released);
    }

    /// This host is to be taken away in `grace`: an event, for the controller.
    pub(super) fn announce_leaving(&self, grace: Duration, why: &str) {
        let note = Note::new("host_leaving", self.me).text("host", &self.host_name()).text("text", why);
        self.note(note.number("grace_ms", i128::try_from(grace.as_millis()).unwrap_or(i128::MAX)), false);
    }

    /// Whether no process of the job's meshes is on this host; those of its own extensions do not count.
    pub(super) fn is_vacant(&self) -> bool {
        let seat = |mesh: MeshId| self.seat(ProcAddr { mesh, rank: 0, host: self.me.host }).mesh;
        self.agent.meshes().into_iter().all(|mesh| is_host_mesh(seat(mesh)))
    }
}
