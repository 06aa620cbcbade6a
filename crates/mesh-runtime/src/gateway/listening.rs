//! Connections from hosts that can only dial out. They offer themselves where the controller listens.

use super::doors::{Door, Seats};
use super::{Event, Gateway, Process};
use crate::error::RuntimeError;
use crate::greeting::{GREETING, hear, on_thread, refuse, say};
use crate::locks::lock;
use crate::tls::{Identity, Limits, Listener, ListenerEvent, PeerFacts, Reason, Role, TlsStream};
use crate::visits::{self, Jobs, Place, Visits};
use mesh_proto::control::Attachment;
use mesh_proto::hosts::gateway::Missed;
use mesh_proto::hosts::{Fate, Join, Look, PacketDecoder, Refusal};
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The controller leads one job.
impl<P: Process> Jobs for Gateway<P> {
    type Process = P;

    fn list(&self) -> Vec<u64> {
        vec![self.job()]
    }

    fn find(&self, job: u64) -> Option<Arc<Visits<P>>> {
        (job == self.job()).then(|| Arc::clone(&self.parts.visits))
    }
}

impl<P: Process> Gateway<P> {
    /// Returns the id of the job.
    pub(crate) fn job(&self) -> u64 {
        self.machine().job()
    }

    /// Accepts the hosts of `told` at this address. Several calls may wait at one address; they are served in order.
    pub(super) fn listen_for_dialers(
        self: &Arc<Self>,
        addr: SocketAddr,
        identity: Arc<Identity>,
        told: &Arc<Attachment>,
    ) -> Result<(), RuntimeError> {
        let wanted = (told.base..told.base + told.count).map(|host| (host, Arc::clone(told)));
        {
            // Held throughout, so that the second of two calls for one address finds the listener of the first.
            let mut doors = lock(&self.listeners.0);
            if let Some(door) = doors.iter().find(|door| door.addr == addr && addr.port() != 0) {
                lock(&door.seats).extend(wanted);
                return Ok(());
            }
            let seats: Arc<Seats> = Arc::new(Mutex::new(wanted.collect()));
            let (this, offered, looking) = (Arc::downgrade(self), Arc::clone(&seats), Arc::default());
            let on_event = move |event: ListenerEvent| {
                if let Some(this) = this.upgrade() {
                    this.on_listener_event(event, &offered, &looking);
                }
            };
            let listener = Listener::bind(&[addr], identity, Limits::default(), on_event)
                .map_err(|error| RuntimeError::Address(error.to_string()))?;
            doors.push(Door { addr, seats, listener });
        }
        if self.parts.standing.is_closed() {
            // `close` may have run just before.
            self.listeners.close();
        }
        Ok(())
    }

    fn on_listener_event(self: &Arc<Self>, event: ListenerEvent, seats: &Arc<Seats>, looking: &Arc<AtomicUsize>) {
        let (stream, facts, addr) = match event {
            ListenerEvent::Joined { stream, peer, addr } => (stream, peer, addr),
            // Probably a check whether this address is reachable, such as a host makes before it dials.
            ListenerEvent::Refused { reason: Reason::Left, .. } => return,
            ListenerEvent::Refused { addr, reason, .. } => {
                return self.log.warn(format!("refused a connection from {addr}: {reason}"));
            }
            ListenerEvent::Stuck { errno } => {
                return self.log.warn(format!("cannot accept hosts for the moment: {errno}"));
            }
        };
        let place = if facts.role.may_join() { None } else { Place::take(looking) };
        if place.is_none() && !facts.role.may_join() {
            return visits::turn_away(stream);
        }
        let (this, seats, looking) = (Arc::clone(self), Arc::clone(seats), Arc::clone(looking));
        let greeting = move || {
            let place = || place.or_else(|| Place::take(&looking));
            this.take_offer(stream, facts, place, &seats);
        };
        if let Err(error) = on_thread("mesh-greet", greeting) {
            self.log.warn(format!("refused a connection from {addr}: failed to start a thread for it: {error}"));
        }
    }

    /// Handles a host that offers itself or comes back, or a visitor of the job.
    fn take_offer(
        self: &Arc<Self>,
        mut stream: TlsStream,
        facts: PeerFacts,
        place: impl FnOnce() -> Option<Place>,
        seats: &Seats,
    ) {
        let until = Instant::now() + GREETING;
        let mut decoder = PacketDecoder::default();
        let Ok(packet) = hear(&mut stream, &mut decoder, until) else { return };
        if let Ok(look) = Look::read(&packet) {
            return match (place(), self.credentials.get()) {
                (Some(_place), Some(identity)) => {
                    visits::receive(&**self, look, stream, decoder, (&facts, &identity), &|text| {
                        self.log.tell(text.to_owned());
                    });
                }
                _ => visits::turn_away(stream),
            };
        }
        let Ok(join) = Join::read(&packet) else { return };
        if join.job == 0 {
            return self.seat(stream, decoder, facts, until, seats);
        }
        if join.job != self.job() {
            return refuse(stream, Refusal::NoSuchJob, visits::NO_SUCH_JOB.to_owned());
        }
        self.admit(&join, stream, decoder, facts);
    }

    /// Attaches a host that belongs to no job.
    fn seat(
        self: &Arc<Self>,
        mut stream: TlsStream,
        mut decoder: PacketDecoder,
        facts: PeerFacts,
        until: Instant,
        seats: &Seats,
    ) {
        let seat = if facts.role == Role::Host { lock(seats).pop_first() } else { None };
        let Some((host, told)) = seat else {
            return refuse(stream, Refusal::Busy, "no more hosts are wanted".to_owned());
        };
        let join = {
            let mut machine = self.machine();
            machine.seat(host, Some(told));
            machine.join(host)
        };
        let greeted = say(&mut stream, &join.packet(), until)
            .and_then(|()| hear(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_good(Fate::NotAttached, error.to_string()))
            .and_then(|answer| self.answered(host, "a host that has dialed", (stream, decoder, facts), &answer));
        match greeted {
            Ok(Some(greeted)) => self.adopt(host, greeted, false),
            Ok(None) => {}
            Err(Missed { fate, why, .. }) => self.on(Event::Lost { host, fate, why }),
        }
    }
}
