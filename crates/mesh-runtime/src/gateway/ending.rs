//! The end of this host's part in the job, and of the gateway.

use super::{Event, Gateway, Process};
use mesh_proto::hosts::{Farewell, Parting};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often a controller that closes looks whether all that it said has arrived, should nobody tell it.
const LOOK: Duration = Duration::from_millis(5);
/// How long one connection may take to send what waits in it when the gateway closes.
const DRAIN: Duration = Duration::from_millis(200);

impl<P: Process> Gateway<P> {
    /// This host's part in the job ends, for a reason that the machine does not know.
    pub(crate) fn end_job(self: &Arc<Self>, parting: Parting, why: &str) {
        self.on(Event::Ended { parting, why: why.to_owned() });
    }

    /// This host's part in the job is over: its process, or whatever holds it, does the rest.
    pub(super) fn job_ended(&self, parting: Parting, visitors: Parting, why: &str) {
        self.parts.visits.end(visitors, why);
        if parting == Parting::CutOff {
            self.log.tell(format!("host {} stops its work: {why}", self.me.host));
        }
        let farewell = Farewell { parting, text: why.to_owned() }.packet(self.me.host);
        for connection in self.connections.all() {
            connection.send(self.reactor(), &farewell, self.now());
            connection.flush(self.reactor());
        }
        self.ended.tell(why.to_owned());
    }

    /// The process closes: the others are told, within about `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        if !self.is_active() {
            return;
        }
        let until = Instant::now() + limit;
        self.listeners.close();
        if self.is_controller() {
            let order = self.machine().close();
            if let Some(order) = order {
                self.dispatch(order);
            }
            // What was said before the end is to arrive; a host that does not answer holds up nobody for long.
            let mut machine = self.machine();
            while !machine.is_idle() && Instant::now() < until {
                self.room.want();
                machine = self.room.wait(machine, LOOK);
            }
            machine.stop();
        }
        let parting = Parting::JobOver;
        let farewell = Farewell { parting, text: parting.to_string() }.packet(self.me.host);
        for connection in self.connections.take() {
            connection.send(self.reactor(), &farewell, self.now());
            connection.drain(self.reactor(), until.saturating_duration_since(Instant::now()).min(DRAIN));
            connection.close(self.reactor());
        }
        self.active.store(false, Ordering::SeqCst);
    }
}
