//! Releasing hosts in order, while the job and its other hosts go on.
//!
//! REL-1: a host that is let go first ends what runs there for the job, each process in order or, if that takes too long,
//! by a kill; then it waits until what these have sent was acknowledged, and says that it is done. Only then, or if it does
//! not answer in time, the controller declares it released. REL-2 is in `mesh_proto::hosts::gateway`.

use super::{Event, Gateway, Machine, Process};
use crate::call::Call;
use crate::error::RuntimeError;
use crate::reactor::Reactor;
use mesh_proto::control::StopProcs;
use mesh_proto::hosts::{Fate, HostSet};
use mesh_proto::messages::{Answer, Asked, Reply};
use mesh_proto::{EndReason, Ended, Frame, Header, HostEnd, HostNo, Placement, ProcAddr, Target};
use mesh_topology::Region;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an agent waits for what its processes have sent to be acknowledged, once they have ended.
pub(crate) const LAST: Duration = Duration::from_secs(3);
/// Less than a segment: messages of up to this size arrive in the order in which they were sent.
const SMALL: u64 = 64 << 10;
/// How often it checks again, in case it is not notified.
const LOOK: Duration = Duration::from_millis(50);

/// How hosts are released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// How long processes there may take to end.
    pub(crate) within: Duration,
    /// How long the hosts may take to answer.
    pub(crate) limit: Duration,
    /// Why, for people.
    pub(crate) why: &'static str,
}

impl<P: Process> Gateway<P> {
    /// Releases hosts: processes there are told to end. `ending` are the calls that already told meshes to stop. The returned
    /// call completes when all of the hosts are gone.
    pub(crate) fn release(
        self: &Arc<Self>,
        hosts: &Region,
        ending: Vec<Arc<Call>>,
        terms: Terms,
    ) -> Result<Arc<Call>, RuntimeError> {
        let process = self.controller()?;
        let Terms { within, limit, why } = terms;
        let agents = Target::Many(0, hosts.clone(), Placement::Agents);
        let (told, order) = (process.open_call(agents.clone())?, process.open_call(agents.clone())?);
        let ranks = hosts.clone();
        let hosts: HostSet = agents.procs().map(|agent| agent.host).collect();
        let absent = self.machine().release(&hosts, why);
        // Nothing runs on a host that is not attached yet, and there may be nobody to answer.
        for host in absent {
            self.let_go(host, why);
        }
        let stop = StopProcs { mesh: 0, call: order.id, first: 0, per_host: 0, within, ranks };
        let (call, until) = (Arc::clone(&told), Instant::now() + limit);
        // Messages take turns by size, and the order must not overtake earlier ones.
        let ordered = self.machine().is_heard(&hosts, SMALL);
        if ordered {
            process.dispatch(stop.frame(self.me, &agents));
        }
        let this = Arc::clone(self);
        let release = move || {
            if !ordered {
                this.wait_until(Instant::now() + within, |machine| machine.is_heard(&hosts, SMALL));
                process.dispatch(stop.frame(this.me, &agents));
            }
            for one in ending.iter().chain([&order]) {
                process.wait_for_call(one, until);
            }
            this.give_up_call(&order);
            for host in hosts.iter() {
                this.let_go(host, why);
                // For a host that was dead before.
                let ended = Arc::new(this.verdict_on(host).ended());
                this.parts.calls.on_host_missing(this.reactor(), told.id, host, &ended);
            }
        };
        match std::thread::Builder::new().name("mesh-release".to_owned()).spawn(release) {
            Ok(_) => Ok(call),
            Err(error) => {
                // Hosts that got the order end all the same, and their end is reported as usual.
                self.give_up_call(&call);
                Err(RuntimeError::thread(&error))
            }
        }
    }

    fn let_go(self: &Arc<Self>, host: HostNo, why: &str) {
        self.on(Event::Lost { host, fate: Fate::Released, why: why.to_owned() });
    }

    fn give_up_call(&self, call: &Call) {
        self.parts.calls.cancel(self.reactor(), call);
    }

    /// The controller releases this host: ends its processes, then answers.
    pub(crate) fn on_release(self: &Arc<Self>, order: Header, within: Duration) {
        if order.src != ProcAddr::CONTROLLER || !self.me.is_agent() || self.is_controller() {
            return;
        }
        let (Some(process), Some(asked)) = (self.process.upgrade(), Asked::of(&order)) else { return };
        let label = self.parts.home.called(self.me.host);
        let why = "the script needs it no longer".to_owned();
        let _ = self.leaving.set(HostEnd { fate: Fate::Released, label, why });
        let this = Arc::clone(self);
        let leave = move || {
            let until = Instant::now() + within + LAST;
            process.vacate(within, until);
            // What its processes sent arrives before the answer.
            this.wait_until(until, Machine::has_arrived);
            let reply = Reply { actor: 0, call: asked.call, place: asked.place, answer: Answer::Value };
            process.dispatch(Frame::build(reply.header(this.me, asked.by), None, b"", &[]));
        };
        // If no thread can be started, the controller waits no longer than its limit.
        let _ = std::thread::Builder::new().name("mesh-leave".to_owned()).spawn(leave);
    }

    /// Waits until `done` holds of the machine.
    fn wait_until(&self, until: Instant, done: impl Fn(&Machine<Reactor>) -> bool) {
        while Instant::now() < until && !self.parts.standing.is_closed() {
            self.room.want();
            let machine = self.machine();
            if done(&machine) {
                return;
            }
            drop(self.room.wait(machine, LOOK));
        }
    }

    /// Waits until `done` holds of this host's processes. [`Gateway::note_leaving`] reports their ends.
    pub(crate) fn wait_for_processes(&self, until: Instant, done: impl Fn() -> bool) {
        while Instant::now() < until && !self.parts.standing.is_closed() {
            self.room.want();
            // Without the machine's lock: `done` may take the agent's.
            if done() {
                return;
            }
            drop(self.room.wait(self.machine(), LOOK));
        }
    }

    /// A process of this host ended. If it ended in order while the host is released, the host is the reason.
    pub(crate) fn note_leaving(&self, ended: &mut Ended) {
        if let Some(end) = self.leaving.get() {
            if ended.orderly {
                ended.reason = EndReason::Host(end.clone());
            }
            self.room.tell();
        }
    }

    /// Why nothing new runs on this host, if it is being released.
    pub(crate) fn leaving(&self) -> Option<Arc<Ended>> {
        self.leaving.get().map(|end| Arc::new(end.ended()))
    }
}
