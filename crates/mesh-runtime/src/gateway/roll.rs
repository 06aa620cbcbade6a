//! Which hosts there are, as the controller knows them: for people, and for whoever has to ask all of them something.

use super::{Peer, agents};
use crate::inspect::Note;
use crate::runtime::{Runtime, lock};
use mesh_proto::control::Introduction;
use mesh_proto::hosts::{Fate, Standing};
use mesh_proto::messages::Reply;
use mesh_proto::{Frame, HostEnd, HostNo, MeshId, Part, ProcAddr, Target, is_host_mesh};
use std::time::Duration;

/// How a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostState {
    /// It is being attached.
    Attaching,
    /// It is part of the job.
    Running,
    /// It is silent.
    Suspect,
    /// It was lost, and is being connected to again.
    Unreachable,
    /// It was let go.
    Stopped,
    /// It is dead.
    Dead,
}

impl HostState {
    /// In one word, as snapshots of a job have it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Attaching => "attaching",
            Self::Running => "running",
            Self::Suspect => "suspect",
            Self::Unreachable => "unreachable",
            Self::Stopped => "stopped",
            Self::Dead => "dead",
        }
    }
}

/// A host, as the controller knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostView {
    /// Its number.
    pub host: HostNo,
    /// What it calls itself, or how it is reached; empty if nothing is known.
    pub name: String,
    /// Where it was attached; empty if it has dialed.
    pub address: String,
    /// Its agent's process; 0 if nothing was heard of it yet.
    pub pid: u64,
    /// How it is.
    pub state: HostState,
    /// Why it is dead, if it is.
    pub fate: Option<Fate>,
    /// Why, if it is not running.
    pub why: String,
}

fn why_of(peer: &Peer) -> String {
    peer.verdict.as_ref().map_or_else(|| peer.why.clone(), |verdict| verdict.why.clone())
}

impl Runtime {
    /// The agents of all hosts that were ever attached, at the controller; none if there was none.
    pub(crate) fn other_agents(&self) -> Option<Target> {
        let last = lock(&self.gateway.state).next_host;
        (last > 1).then(|| agents(1, last - 1))
    }

    /// The hosts that were attached here, dead ones included.
    pub fn roll(&self) -> Vec<HostView> {
        let state = lock(&self.gateway.state);
        let children = state.topology.children(self.me.host);
        let view = |host: HostNo| {
            let peer = state.peers.get(&host);
            let said = peer.and_then(|peer| peer.introduction.as_ref());
            let address = peer.and_then(|peer| peer.address.clone()).unwrap_or_default();
            let standing = state.topology.standing(host);
            let how = match (standing, said) {
                (Standing::Dead, _) if peer.is_some_and(Peer::is_released) => HostState::Stopped,
                (Standing::Dead, _) => HostState::Dead,
                (_, None) => HostState::Attaching,
                (Standing::Suspect, _) => HostState::Suspect,
                _ if children.contains(host) && peer.is_none_or(|peer| peer.connection.is_none()) => {
                    HostState::Unreachable
                }
                _ => HostState::Running,
            };
            HostView {
                host,
                name: said.map_or_else(|| address.clone(), |said| said.name.clone()),
                address,
                pid: said.map_or(0, |said| said.pid),
                state: how,
                fate: peer.and_then(|peer| peer.verdict.as_ref()).map(|verdict| verdict.fate),
                why: peer.filter(|_| how != HostState::Running).map(why_of).unwrap_or_default(),
            }
        };
        let known = (1..state.next_host).filter(|host| *host != self.me.host && state.topology.knows(*host));
        known.map(view).collect()
    }

    /// What these hosts have said of themselves; none of those that have not, or that only the controller has heard.
    pub fn introductions(&self, hosts: &[HostNo]) -> Vec<Option<Introduction>> {
        let state = lock(&self.gateway.state);
        hosts.iter().map(|host| state.peers.get(host).and_then(|peer| peer.introduction.clone())).collect()
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
        let state = lock(&self.gateway.state);
        let peer = state.peers.get(&host)?;
        let said = peer.introduction.as_ref().map(|said| said.name.clone());
        said.or_else(|| peer.address.clone()).filter(|name| !name.is_empty())
    }

    /// A reply of an agent has come: if it is the one to its attachment, the agent says in it what it is called.
    pub(super) fn note_introduction(&self, frame: &Frame) {
        let host = frame.header.src.host;
        let Ok(Reply { call, .. }) = Reply::read(&frame.header) else { return };
        let name = {
            let mut state = lock(&self.gateway.state);
            let Some(peer) = state.peers.get_mut(&host) else { return };
            let expected = peer.attachment.as_ref().is_some_and(|told| told.call == call);
            if !expected || peer.introduction.is_some() {
                return;
            }
            let Ok(parts) = frame.parts() else { return };
            let Some(Part::Inline(raw)) = parts.first() else { return };
            peer.introduction = Introduction::decode(raw);
            peer.introduction.as_ref().map(|said| said.name.clone())
        };
        let Some(name) = name else { return };
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
        self.meshes_here().into_iter().all(|mesh| is_host_mesh(seat(mesh)))
    }
}
