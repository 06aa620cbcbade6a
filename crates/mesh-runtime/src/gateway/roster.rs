//! The hosts that the controller knows, for people and for requests to all hosts.

use super::{Gateway, HostState, HostView, Process};
use mesh_proto::control::{Introduction, Traits};
use mesh_proto::messages::Reply;
use mesh_proto::{Frame, HostNo, Part, Target};

/// What an agent reports of itself when it is attached.
pub(crate) fn introduction(name: &str, traits: &Traits) -> Introduction {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    Introduction { name: name.to_owned(), pid: u64::from(std::process::id()), cpus, traits: traits.clone() }
}

impl<P: Process> Gateway<P> {
    /// Returns the agents of all hosts that were ever attached, at the controller; `None` if there was none.
    pub(crate) fn other_agents(&self) -> Option<Target> {
        self.machine().agents()
    }

    /// Returns the attached hosts that are not dead.
    pub(crate) fn live_hosts(&self) -> Vec<HostNo> {
        self.machine().live_hosts()
    }

    /// Returns the connections to other hosts, for inspection: host, whether it is up, bytes in flight.
    pub(crate) fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        self.machine().peers()
    }

    /// Returns the hosts that were attached here, dead ones included.
    pub(crate) fn roll(&self) -> Vec<HostView> {
        self.machine().roll()
    }

    /// Returns the introductions of these hosts; `None` for those that this host has not heard.
    pub(crate) fn introductions(&self, hosts: &[HostNo]) -> Vec<Option<Introduction>> {
        let machine = self.machine();
        hosts.iter().map(|host| machine.introduction(*host).cloned()).collect()
    }

    /// Returns the hosts that can be expected to answer, at the controller.
    pub(crate) fn hosts_in_reach(&self) -> Vec<HostNo> {
        if !self.is_active() {
            return Vec::new();
        }
        let reachable = |one: &HostView| matches!(one.state, HostState::Running | HostState::Suspect);
        self.roll().into_iter().filter(reachable).map(|one| one.host).collect()
    }

    /// Returns the name of a host, as far as it is known here.
    pub(crate) fn name_of(&self, host: HostNo) -> Option<String> {
        self.machine().name_of(host)
    }

    /// Handles a reply of an agent, which is its introduction if it answers the attachment.
    pub(super) fn note_introduction(&self, process: &P, frame: &Frame) {
        let host = frame.header.src.host;
        let Ok(Reply { call, .. }) = Reply::read(&frame.header) else { return };
        let said = || match frame.parts().ok()?.first()? {
            Part::Inline(raw) => Introduction::decode(raw),
            _ => None,
        };
        let name = {
            let mut machine = self.machine();
            if !machine.introduce(host, call, said) {
                return;
            }
            machine.introduction(host).map(|said| said.name.clone()).unwrap_or_default()
        };
        process.host_attached(host, &name);
    }
}
