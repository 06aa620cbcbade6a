//! The end of this host's part in the job, and of the gateway.

use super::{Event, Gateway, Process};
use mesh_proto::hosts::{Farewell, Parting};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often a closing controller checks whether everything that it sent has arrived, in case it is not notified.
const LOOK: Duration = Duration::from_millis(5);
/// How long one connection may take to send its queue when the gateway closes.
const DRAIN: Duration = Duration::from_millis(200);

impl<P: Process> Gateway<P> {
    /// Ends this host's part in the job for a reason that the machine does not know.
    pub(crate) fn end_job(self: &Arc<Self>, parting: Parting, why: &str) {
        self.on(Event::Ended { parting, why: why.to_owned() });
    }

    /// This host's part in the job is over. Its process, or the process's host, does the rest.
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

    /// Closes the gateway and notifies the other hosts, within about `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        {
            // Under the machine's lock, so that hosts are attached either before, and end here, or not at all.
            let mut machine = self.machine();
            if !self.is_active() {
                machine.stop();
                self.over.store(true, Ordering::Relaxed);
                return;
            }
        }
        let until = Instant::now() + limit;
        self.listeners.close();
        if self.is_controller() {
            let order = self.machine().close();
            if let Some(order) = order {
                self.dispatch(order);
            }
            // Let what was sent before arrive. A host that does not answer delays this no longer than the limit.
            let mut machine = self.machine();
            while !machine.is_idle() && Instant::now() < until {
                self.room.want();
                machine = self.room.wait(machine, LOOK);
            }
        }
        // From here on a new connection is closed at once.
        self.machine().stop();
        self.over.store(true, Ordering::Relaxed);
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
