//! Letting hosts go, in order, while the job and its other hosts go on.
//!
//! REL-1: a host that is let go first ends what runs there for the job, each process in order or, if that takes too long,
//! by a kill; then it waits until what these have sent was acknowledged, and says that it is done. Only then, or if it does
//! not answer in time, the controller declares it released. REL-2 is in `mesh_proto::hosts::gateway`.

use super::{Event, State};
use crate::calls::Call;
use crate::error::RuntimeError;
use crate::runtime::{Runtime, lock};
use mesh_proto::control::StopProcs;
use mesh_proto::hosts::{Fate, HostSet};
use mesh_proto::messages::{Answer, Asked, Reply};
use mesh_proto::{EndReason, Ended, Frame, Header, HostEnd, HostNo, MeshId, Placement, ProcAddr, Target, is_host_mesh};
use mesh_topology::Region;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an agent waits for what its processes have sent to be acknowledged, once they have ended.
const LAST: Duration = Duration::from_secs(3);
/// Less than a segment: what is as small goes in the order in which it was sent.
const SMALL: u64 = 64 << 10;
/// How often it looks again, should nobody have told it to.
const LOOK: Duration = Duration::from_millis(50);

impl Runtime {
    /// Lets hosts go: what runs there is told to end, and has `within` for that. `ending` are calls by which meshes were
    /// told to stop already. `why` is for people. The call that is returned completes when all of them are gone.
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
        self.usable()?;
        let this = self.this().filter(|_| self.me == ProcAddr::CONTROLLER).ok_or(RuntimeError::NotController)?;
        let agents = Target::Many(0, hosts.clone(), Placement::Agents);
        let (told, order) = (self.open(agents.clone(), false)?, self.open(agents.clone(), false)?);
        let ranks = hosts.clone();
        let hosts: HostSet = agents.procs().map(|agent| agent.host).collect();
        let absent = lock(&self.gateway.state).machine.release(&hosts, why);
        // Nothing runs on a host that is not attached yet, and there may be nobody to answer.
        for host in absent {
            self.let_go(host, why);
        }
        let stop = StopProcs { mesh: 0, call: order.id, first: 0, per_host: 0, within, ranks };
        let (call, until) = (Arc::clone(&told), Instant::now() + limit);
        // Messages take turns by their size, and the order must not overtake what was sent before.
        let ordered = lock(&self.gateway.state).machine.is_heard(&hosts, SMALL);
        if ordered {
            self.dispatch(stop.frame(self.me, &agents), None);
        }
        let release = move || {
            if !ordered {
                this.wait_until(Instant::now() + within, |state| state.machine.is_heard(&hosts, SMALL), || true);
                this.dispatch(stop.frame(this.me, &agents), None);
            }
            for one in ending.iter().chain([&order]) {
                this.wait_call(one, None, Some(until), false, false);
            }
            this.give_up_call(&order);
            for host in hosts.iter() {
                this.let_go(host, why);
                // For one that was dead before.
                let ended = Arc::new(this.verdict_on(host).ended());
                this.calls.on_host_missing(&this.reactor, told.id, host, &ended);
            }
        };
        match std::thread::Builder::new().name("mesh-release".to_owned()).spawn(release) {
            Ok(_) => Ok(call),
            Err(error) => {
                // Hosts that were told to end do so all the same; what becomes of them is told as ever.
                self.give_up_call(&call);
                Err(RuntimeError::thread(&error))
            }
        }
    }

    fn let_go(&self, host: HostNo, why: &str) {
        self.on_gateway(Event::Lost { host, fate: Fate::Released, why: why.to_owned() });
    }

    fn give_up_call(&self, call: &Call) {
        self.calls.cancel(&self.reactor, call);
    }

    /// The controller lets this host go: what runs here ends, then the controller hears of that.
    pub(crate) fn on_release(&self, order: Header, within: Duration) {
        if order.src != ProcAddr::CONTROLLER || !self.me.is_agent() || self.me == ProcAddr::CONTROLLER {
            return;
        }
        let (Some(this), Some(asked)) = (self.this(), Asked::of(&order)) else { return };
        let end =
            HostEnd { fate: Fate::Released, label: self.host_name(), why: "the script needs it no longer".to_owned() };
        let _ = self.gateway.leaving.set(end);
        let leave = move || {
            let until = Instant::now() + within + LAST;
            // The host's own extensions serve the others until these have ended.
            let is_host =
                |mesh: &MeshId| is_host_mesh(this.seat(ProcAddr { mesh: *mesh, rank: 0, host: this.me.host }).mesh);
            let (last, first): (HashSet<_>, HashSet<_>) = this.agent.meshes().into_iter().partition(is_host);
            first.iter().for_each(|mesh| this.agent.end_procs(&*this, *mesh, None, within));
            if !last.is_empty() {
                this.wait_until(until - LAST / 2, |_| true, || this.agent.meshes().is_subset(&last));
                last.iter().for_each(|mesh| this.agent.end_procs(&*this, *mesh, None, within.min(LAST / 2)));
            }
            this.wait_until_left(until);
            let reply = Reply { actor: 0, call: asked.call, place: asked.place, answer: Answer::Value };
            this.dispatch(Frame::build(reply.header(this.me, asked.by), None, b"", &[]), None);
        };
        // If there is no thread for it, the controller waits no longer than it has said.
        let _ = std::thread::Builder::new().name("mesh-leave".to_owned()).spawn(leave);
    }

    /// Waits until no process runs here any more, and what these have sent has arrived.
    fn wait_until_left(&self, until: Instant) {
        self.wait_until(until, |_| true, || self.agent.is_empty());
        self.wait_until(until, |state| state.machine.has_arrived(), || true);
    }

    /// Waits until both hold. The second is looked at without the lock: it may take that of the agent.
    fn wait_until(&self, until: Instant, first: impl Fn(&State) -> bool, second: impl Fn() -> bool) {
        while Instant::now() < until && !self.is_closed() {
            // Before the look: who changes something in between is heard.
            self.gateway.room_wanted.store(true, Ordering::SeqCst);
            let second = second();
            let state = lock(&self.gateway.state);
            if first(&state) && second {
                return;
            }
            drop(self.gateway.room.wait_timeout(state, LOOK));
        }
    }

    /// A process of this host has ended: in order, and for its host's sake, if this host is let go.
    pub(crate) fn note_leaving(&self, ended: &mut Ended) {
        if let Some(end) = self.gateway.leaving.get() {
            if ended.orderly {
                ended.reason = EndReason::Host(end.clone());
            }
            self.tell_room();
        }
    }

    /// Why nothing new runs on this host, if it is let go.
    pub(crate) fn leaving(&self) -> Option<Arc<Ended>> {
        self.gateway.leaving.get().map(|end| Arc::new(end.ended()))
    }
}
