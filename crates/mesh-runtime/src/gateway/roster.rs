//! Which hosts there are, as the controller knows them: for people, and for whoever has to ask all of them something.

use super::{Gateway, HostState, HostView, Process};
use mesh_proto::control::{Introduction, Traits};
use mesh_proto::messages::Reply;
use mesh_proto::{Frame, HostNo, Part, Target};

/// What an agent says of itself when it is attached.
pub(crate) fn introduction(name: &str, traits: &Traits) -> Introduction {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    Introduction { name: name.to_owned(), pid: u64::from(std::process::id()), cpus, traits: traits.clone() }
}

impl<P: Process> Gateway<P> {
    /// The agents of all hosts that were ever attached, at the controller; none if there was none.
    pub(crate) fn other_agents(&self) -> Option<Target> {
        self.machine().agents()
    }

    /// The hosts that are attached and not dead.
    pub(crate) fn live_hosts(&self) -> Vec<HostNo> {
        self.machine().live_hosts()
    }

    /// The connections to all other hosts, for inspection: number, whether it is up, bytes under way.
    pub(crate) fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        self.machine().peers()
    }

    /// The hosts that were attached here, dead ones included.
    pub(crate) fn roll(&self) -> Vec<HostView> {
        self.machine().roll()
    }

    /// What these hosts have said of themselves; none of those that have not, or that only the controller has heard.
    pub(crate) fn introductions(&self, hosts: &[HostNo]) -> Vec<Option<Introduction>> {
        let machine = self.machine();
        hosts.iter().map(|host| machine.introduction(*host).cloned()).collect()
    }

    /// The hosts that can be expected to answer, at the controller.
    pub(crate) fn hosts_in_reach(&self) -> Vec<HostNo> {
        if !self.is_active() {
            return Vec::new();
        }
        let reachable = |one: &HostView| matches!(one.state, HostState::Running | HostState::Suspect);
        self.roll().into_iter().filter(reachable).map(|one| one.host).collect()
    }

    /// What people call a host, as far as it is known here.
    pub(crate) fn name_of(&self, host: HostNo) -> Option<String> {
        self.machine().name_of(host)
    }

    /// A reply of an agent has come: if it is the one to its attachment, it is the agent's introduction.
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
