//! Ending procs, by order or with their owners, and who is notified.

use super::{HostAgent, MOST_PROCS, Surroundings};
use crate::dispatch::Dispatch;
use crate::locks::lock;
use mesh_proto::control::{Down, StopProc, StopProcs, ranks_of};
use mesh_proto::messages::StopActor;
use mesh_proto::{Aftermath, EndReason, Ended, Frame, MeshId, Owned, ProcAddr, Route};
use mesh_topology::Region;
use std::sync::Arc;
use std::time::Duration;

/// How long procs whose owner died may take to stop by themselves.
pub(super) const ORPHAN_GRACE: Duration = Duration::from_secs(5);

impl HostAgent {
    /// Asks a mesh of this host, or some of its ranks, to end. What is left after `within` is killed.
    pub(crate) fn end_procs(&self, around: &impl Dispatch, mesh: MeshId, ranks: Option<&Region>, within: Duration) {
        let meant = |addr: ProcAddr| addr.mesh == mesh && ranks.is_none_or(|ranks| ranks.contains(addr.rank as usize));
        let stopped = lock(&self.state).procs.stop(meant, within, self.now());
        for addr in stopped {
            around.dispatch(StopProc { within }.frame(self.me, addr));
        }
        // For the new deadlines.
        self.reactor.ring_io();
    }

    /// Ends procs of this host, by order of a process that waits for their ends.
    pub(crate) fn on_stop_procs(&self, around: &impl Surroundings, order: &StopProcs, frame: &Frame) {
        if !self.me.is_agent() {
            return;
        }
        let (src, mesh) = (frame.header.src, order.mesh);
        lock(&self.state).procs.family.asked(src, mesh);
        if let Some(here) = ranks_of(frame, MOST_PROCS) {
            self.tell_ended(around, src, mesh, here.filter(|rank| order.ranks.contains(*rank as usize)));
        }
        self.end_procs(around, mesh, Some(&order.ranks), order.within);
    }

    /// Tells a process, which waits for all of these ranks to end, which ones already have.
    fn tell_ended(&self, around: &impl Surroundings, to: ProcAddr, mesh: MeshId, ranks: impl Iterator<Item = u32>) {
        let long_ago = || Ended { orderly: true, ..Ended::unmade(EndReason::LongAgo) };
        for rank in ranks {
            let addr = ProcAddr { mesh, rank, host: self.me.host };
            let ended = match around.route(addr) {
                Route::Gone(ended) => ended,
                Route::Unknown => Arc::new(long_ago()),
                Route::Here | Route::Via(_) | Route::Remote(_) => continue,
            };
            around.dispatch(Down::answer(addr, &ended).frame(self.me, to));
        }
    }

    /// A proc has ended: what it owned ends too, then whoever waits for its end is told. What these then send comes behind the
    /// stops (FAM-4).
    pub(crate) fn carry_out(&self, around: &impl Dispatch, addr: ProcAddr, ended: &Ended, aftermath: Aftermath) {
        self.end_orphans(around, aftermath.end);
        for listener in aftermath.tell {
            around.dispatch(Down::notice(addr, ended).frame(self.me, listener));
        }
    }

    /// Ends what dead owners left behind.
    pub(super) fn end_orphans(&self, around: &impl Dispatch, orphans: Vec<Owned>) {
        for thing in orphans {
            match thing {
                Owned::Procs(mesh) => self.end_procs(around, mesh, None, ORPHAN_GRACE),
                // Nobody waits for these.
                Owned::Actor(home, actor) => {
                    let stop = StopActor::of(actor).header(self.me, home);
                    around.dispatch(Frame::build(stop, None, b"", &[]));
                }
            }
        }
    }
}
