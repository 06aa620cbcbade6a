//! Connects the gateway to the other parts of its process, and to Python.

use super::{GATEWAY, Runtime};
use crate::call::{Call, Outcome, is_combined};
use crate::error::RuntimeError;
use crate::gateway::{GatewayOptions, HostView, LAST, Process, ReleaseTerms};
use crate::inspect::Note;
use crate::tls::Identity;
use crate::visits::Answerer;
use mesh_proto::control::{Down, HostDown, Introduction};
use mesh_proto::hosts::{Fate, HostSet};
use mesh_proto::{Frame, Header, HostEnd, HostNo, Kind, MeshId, ProcAddr, Target, is_host_mesh};
use mesh_topology::Region;
use std::collections::HashSet;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Answerer for Runtime {
    fn notice_visitor(&self) {
        self.notice_visitor();
    }
}

impl Process for Runtime {
    fn arrived(&self, mut frame: Frame) {
        // Nobody here has printed anything for it, unless it has values of processes of this host in it (LOG-9).
        frame.header.set_quiet(!is_combined(&frame.header));
        self.dispatch(frame, Some(GATEWAY));
    }

    fn local_ranks(&self, mesh: MeshId) -> Range<u32> {
        self.local_ranks(mesh)
    }

    fn awaits_copy(&self, header: &Header) -> bool {
        self.remote_values.awaits(header)
    }

    fn share_copy(&self, frame: Frame) -> Frame {
        self.remote_values.share(frame, self)
    }

    fn bounce(&self, frame: &Frame, outcome: Outcome) {
        self.bounce(frame, outcome);
    }

    fn host_attached(&self, host: HostNo, name: &str) {
        self.note(Note::new("host_attached", ProcAddr::agent(host)).text("host", name), false);
        if let Some(frame) = self.inspector.watch_frame(ProcAddr::agent(host)) {
            self.dispatch(frame, None);
        }
    }

    fn host_died(&self, host: HostNo, end: &HostEnd) {
        if self.me == ProcAddr::CONTROLLER {
            let name = self.host_called(host).unwrap_or_else(|| format!("host {host}"));
            let released = end.fate == Fate::Released;
            let kind = if released { "host_stopped" } else { "host_died" };
            self.note(Note::new(kind, ProcAddr::agent(host)).text("host", &name).text("text", &end.why), !released);
        }
        self.agent.host_died(self, host);
    }

    fn ranks_lost(&self, host: HostNo, end: &HostEnd) {
        let down = HostDown { host, end: end.clone() };
        for link in self.links() {
            link.send(&self.reactor, &down.frame(self.me, link.peer, None));
        }
        self.ranks_lost_with(host, end);
    }

    fn open_call(&self, agents: Target) -> Result<Arc<Call>, RuntimeError> {
        self.open(agents, false)
    }

    fn wait_for_call(&self, call: &Call, until: Instant) {
        self.wait_call(call, None, Some(until), false, false);
    }

    fn vacate(&self, within: Duration, until: Instant) {
        // The host's own extensions serve the others until these have ended.
        let is_host =
            |mesh: &MeshId| is_host_mesh(self.seat(ProcAddr { mesh: *mesh, rank: 0, host: self.me.host }).mesh);
        let (last, first): (HashSet<_>, HashSet<_>) = self.agent.meshes().into_iter().partition(is_host);
        first.iter().for_each(|mesh| self.agent.end_procs(self, *mesh, None, within));
        if !last.is_empty() {
            self.gateway.wait_for_processes(until - LAST / 2, || self.agent.meshes().is_subset(&last));
            last.iter().for_each(|mesh| self.agent.end_procs(self, *mesh, None, within.min(LAST / 2)));
        }
        self.gateway.wait_for_processes(until, || self.agent.is_empty());
    }
}

impl Runtime {
    // For other parts of this process.

    /// Sends a frame to other hosts. Returns how many bytes wait behind it.
    pub(crate) fn send_remote(&self, frame: &Frame, hosts: HostSet) -> usize {
        self.gateway.send(frame, hosts)
    }

    /// Sends a frame from the controller to every other agent.
    pub(crate) fn cast_to_agents(&self, frame: impl FnOnce(&Target) -> Frame) {
        if let Some(agents) = self.gateway.other_agents() {
            self.dispatch(frame(&agents), None);
        }
    }

    /// A frame that concerns hosts: for the gateway at an agent; at a worker, the news of a dead host.
    pub(crate) fn on_gateway_frame(&self, frame: Frame) {
        if self.me.is_agent() {
            return self.gateway.on_frame(frame);
        }
        if frame.header.kind == Kind::HostDown
            && let Some(HostDown { host, end }) = HostDown::read(&frame)
        {
            self.ranks_lost_with(host, &end);
        }
    }

    /// A host is dead: this process's calls there fail, and its meshes have lost ranks.
    fn ranks_lost_with(&self, host: HostNo, verdict: &HostEnd) {
        let ended = verdict.ended();
        self.landings.end(self, |one| one.host == host);
        let known = self.remote_meshes.on(host);
        for addr in known {
            self.deliver(Down::notice(addr, &ended).frame(ProcAddr::agent(host), self.me));
        }
        let ended = Arc::new(ended);
        self.calls.on_host_down(&self.reactor, host, &ended);
        self.forget_lines_of(host);
        self.forget_fallen();
        self.ports.on_host_down(host);
        self.refs_end(|one| one.host == host, &ended);
        self.meters.end(|one| one.host == host);
        self.answers_end(|one| one.host == host);
    }

    // For the host that serves this job.

    /// Announces to the controller, by an event, that this host will be taken away in `grace`.
    pub(crate) fn announce_leaving(&self, grace: Duration, why: &str) {
        let note = Note::new("host_leaving", self.me).text("host", &self.host_name()).text("text", why);
        self.note(note.number("grace_ms", i128::try_from(grace.as_millis()).unwrap_or(i128::MAX)), false);
    }

    /// Whether no process of the job's meshes is on this host; those of its own extensions do not count.
    pub(crate) fn is_vacant(&self) -> bool {
        let seat = |mesh: MeshId| self.seat(ProcAddr { mesh, rank: 0, host: self.me.host }).mesh;
        self.agent.meshes().into_iter().all(|mesh| is_host_mesh(seat(mesh)))
    }

    // For Python.

    /// Attaches hosts on which agents run, at these addresses; a missing address is told later by
    /// [`Runtime::place_host`]. Returns the number of the first, and the call that completes as they come up: each
    /// answers with its introduction. Credentials are read on another thread; the call reports problems with them.
    ///
    /// # Errors
    /// If the runtime is closed, is not the controller's, or no thread can be started.
    pub fn attach(
        &self,
        addresses: &[Option<String>],
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        self.gateway.attach(addresses, identity, options)
    }

    /// Listens for hosts that can only dial out, and takes up to `count` of them. Returns the number of the first, and
    /// the call that completes as they come. Credentials are read and names looked up on another thread; the call
    /// reports problems with them and with the address.
    ///
    /// # Errors
    /// As for [`Runtime::attach`].
    pub fn attach_dialers(
        &self,
        address: &str,
        count: u32,
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        self.gateway.attach_dialers(address, count, identity, options)
    }

    /// Sets the address of a host that was attached without one.
    pub fn place_host(&self, host: HostNo, address: String) {
        self.gateway.place_host(host, address);
    }

    /// Says that a host that was attached without an address has none.
    pub fn displace_host(&self, host: HostNo, why: &str) {
        self.gateway.displace_host(host, why);
    }

    /// Releases hosts: what runs there is told to end, and has `within` for that. `ending` are calls by which meshes
    /// were already told to stop. `why` is for people. The returned call completes when all of the hosts are gone,
    /// after `limit` at the latest.
    ///
    /// # Errors
    /// If the runtime is closed, is not the controller's, or no thread can be started.
    pub fn release_hosts(
        &self,
        hosts: &Region,
        ending: Vec<Arc<Call>>,
        within: Duration,
        limit: Duration,
        why: &'static str,
    ) -> Result<Arc<Call>, RuntimeError> {
        self.gateway.release(hosts, ending, ReleaseTerms { within, limit, why })
    }

    /// The job's number.
    pub fn job(&self) -> u64 {
        self.gateway.job()
    }

    /// The hosts that are attached and not dead.
    pub fn live_hosts(&self) -> Vec<HostNo> {
        self.gateway.live_hosts()
    }

    /// The connections to all other hosts, for inspection: number, whether it is up, bytes under way.
    pub fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        self.gateway.peers()
    }

    /// The hosts that were attached here, including dead ones.
    pub fn roll(&self) -> Vec<HostView> {
        self.gateway.roll()
    }

    /// What these hosts said of themselves; none for those that have not, or that only the controller has heard.
    pub fn introductions(&self, hosts: &[HostNo]) -> Vec<Option<Introduction>> {
        self.gateway.introductions(hosts)
    }

    /// A host's name for people, as far as it is known here.
    pub fn host_called(&self, host: HostNo) -> Option<String> {
        self.gateway.name_of(host)
    }

    /// The next connection of a visitor from another machine, for the code that answers those of this one.
    pub fn take_visitor(&self) -> Option<OwnedFd> {
        self.visits.take_visitor()
    }
}
