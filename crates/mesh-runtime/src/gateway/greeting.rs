//! How connections between hosts come about: dialing, being dialed, and who is taken in. What is said and answered, the
//! machine decides (`mesh_proto::hosts::gateway`).

use super::Event;
use super::connection::HostConnection;
use super::visits::{self, Place};
use crate::error::RuntimeError;
use crate::reactor::timespec;
use crate::runtime::{Runtime, lock};
use crate::tls::{
    DialError, Dialed, Identity, Limits, Listener, ListenerEvent, Pace, PeerFacts, Reason, Role, TlsStream, dial,
};
use mesh_proto::control::{Attachment, Terms, Traits};
use mesh_proto::hosts::gateway::{Caller, Missed};
use mesh_proto::hosts::{Fate, Join, Look, Packet, PacketDecoder, Refusal, Refuse};
use mesh_proto::messages::{Answer, Reply};
use mesh_proto::{Frame, HostNo, ProcAddr};
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Places for hosts that dial, each with what such a host has to know.
pub(super) type Seats = Mutex<VecDeque<(HostNo, Arc<Attachment>)>>;

/// How long a member may take to say what it wants.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// How soon, at the earliest and at the latest, a connection that does not come up is tried beside the first attempt.
pub(super) const AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_millis(500)];

fn wait(stream: &TlsStream, flags: PollFlags, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    let mut fds = [PollFd::from_borrowed_fd(stream.as_fd(), flags)];
    match poll(&mut fds, Some(&timespec(left))) {
        Ok(0) => Err(ErrorKind::TimedOut.into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Sends a packet and waits until it is on its way.
pub(super) fn say(stream: &mut TlsStream, packet: &Packet, until: Instant) -> io::Result<()> {
    let mut bytes = packet.encode_head();
    packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
    let mut sent = 0;
    loop {
        let written = if sent < bytes.len() { stream.write(&[IoSlice::new(&bytes[sent..])]) } else { Ok(0) };
        match written {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if stream.flush()? && sent == bytes.len() {
            return Ok(());
        }
        wait(stream, PollFlags::OUT, until)?;
    }
}

/// Waits for the next packet.
pub(super) fn hear(stream: &mut TlsStream, decoder: &mut PacketDecoder, until: Instant) -> io::Result<Packet> {
    loop {
        match decoder.next_packet() {
            Ok(Some(packet)) => return Ok(packet),
            Ok(None) => {}
            Err(error) => return Err(io::Error::new(ErrorKind::InvalidData, error)),
        }
        match stream.read(decoder.room()) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => decoder.filled(n),
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(stream, PollFlags::IN, until)?,
            Err(error) => return Err(error),
        }
    }
}

pub(super) fn refuse(mut stream: TlsStream, code: Refusal, text: String) {
    let packet = Refuse { code, text }.packet(0);
    let _ = say(&mut stream, &packet, Instant::now() + Duration::from_secs(1));
    stream.close_notify();
    let _ = stream.flush();
}

/// Why a host was not reached, as an attempt to connect tells it.
fn missed_by(error: &DialError) -> Missed {
    match error {
        // Who refuses a connection is there, and nobody listens.
        DialError::Refused { .. } => Missed::for_good(Fate::Unreachable, error.to_string()),
        DialError::BadAddress { .. } => Missed::for_good(Fate::NotAttached, error.to_string()),
        // Who breaks off may be about to end, or have too much to do; who says no means it.
        DialError::NotAuthenticated { reason, .. }
            if !matches!(reason, Reason::Left | Reason::Broke(_) | Reason::TooSlow(_) | Reason::Crowded(_)) =>
        {
            Missed::for_good(Fate::NotAuthenticated, error.to_string())
        }
        _ => Missed::for_now(error.to_string()),
    }
}

/// A connection whose greetings are done.
struct Greeted {
    stream: TlsStream,
    decoder: PacketDecoder,
    facts: PeerFacts,
    incarnation: u64,
    terms: Option<Terms>,
}

impl Runtime {
    /// Connects to a host, on a thread of its own.
    pub(super) fn dial(&self, host: HostNo, address: String, window: Duration) {
        let missed = |why: &str| self.on_gateway(Event::Missed { host, missed: Missed::for_now(why) });
        let (Some(this), Some(identity)) = (self.this(), self.gateway.identity.get().cloned()) else {
            return missed("this side has no credentials, or has ended");
        };
        let thread = std::thread::Builder::new().name("mesh-dial".to_owned()).stack_size(512 * 1024).spawn(move || {
            // An attempt that takes long is no use where the window is short.
            let timeout = window.clamp(Duration::from_millis(200), GREETING);
            let pace = Pace { timeout, again: (window / 20).clamp(AGAIN[0], AGAIN[1]) };
            match this.greet(host, &address, &identity, pace) {
                Ok(Some(greeted)) => this.adopt(host, greeted, true),
                // It is connected to already, or was told off.
                Ok(None) => this.on_gateway(Event::Missed { host, missed: Missed::for_now("") }),
                Err(missed) => this.on_gateway(Event::Missed { host, missed }),
            }
        });
        if thread.is_err() {
            missed("no thread could be started to connect to it");
        }
    }

    /// Connects and says who this is.
    fn greet(&self, host: HostNo, address: &str, identity: &Identity, pace: Pace) -> Result<Option<Greeted>, Missed> {
        let until = Instant::now() + pace.timeout;
        let expect = if host == 0 { Role::Controller } else { Role::Host };
        let Dialed { mut stream, peer: facts, .. } =
            dial(address, identity, Some(expect), pace).map_err(|error| missed_by(&error))?;
        let mut decoder = PacketDecoder::default();
        let join = lock(&self.gateway.state).machine.join(host);
        let answer = say(&mut stream, &join.packet(), until)
            .and_then(|()| hear(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_now(format!("{address} did not answer as a host does: {error}")))?;
        self.answered(host, address, stream, decoder, facts, &answer)
    }

    fn answered(
        &self,
        host: HostNo,
        address: &str,
        stream: TlsStream,
        decoder: PacketDecoder,
        facts: PeerFacts,
        answer: &Packet,
    ) -> Result<Option<Greeted>, Missed> {
        let (answer, action) = lock(&self.gateway.state).machine.answered(host, address, answer);
        self.carry_out(action.into_iter().collect());
        Ok(answer?.map(|(incarnation, terms)| Greeted { stream, decoder, facts, incarnation, terms }))
    }

    /// Somebody has dialed this runtime's host, as a member of its job.
    pub(super) fn taken_in(&self, join: &Join, mut stream: TlsStream, decoder: PacketDecoder, facts: PeerFacts) {
        let admitted = if self.is_closed() {
            Err((Refusal::NoSuchJob, "the job has ended".to_owned()))
        } else {
            let caller = match facts.role {
                Role::Controller => Caller::Controller,
                role if role.may_join() => Caller::Host,
                _ => Caller::Observer,
            };
            lock(&self.gateway.state).machine.admit(join, caller)
        };
        let welcome = match admitted {
            Ok(welcome) => welcome.packet(self.me.host),
            Err((code, text)) => return refuse(stream, code, text),
        };
        if say(&mut stream, &welcome, Instant::now() + GREETING).is_ok() {
            let attached = Attachment::decode(&join.body).map(|told| Terms { window: told.window });
            let terms = attached.or_else(|| Terms::decode(&join.body));
            let incarnation = join.incarnation;
            self.adopt(join.from, Greeted { stream, decoder, facts, incarnation, terms }, false);
        }
    }

    /// Takes a connection whose greetings are done into use. What the last one may have lost is sent again.
    fn adopt(&self, host: HostNo, greeted: Greeted, dialed: bool) {
        let now = self.started.elapsed();
        let token = self.gateway.next_token.fetch_add(1, Ordering::Relaxed);
        let Greeted { stream, decoder, facts, incarnation, terms } = greeted;
        let connection = match HostConnection::new(token, host, facts, stream, decoder, now) {
            Ok(connection) => Arc::new(connection),
            Err(error) => {
                let missed = Missed::for_now(error.to_string());
                return self.on_gateway(Event::Missed { host, missed });
            }
        };
        let mut connections = self.gateway.connections.write().unwrap_or_else(PoisonError::into_inner);
        connections.insert(token, Arc::clone(&connection));
        drop(connections);
        let (registered, actions) = {
            let machine = &mut lock(&self.gateway.state).machine;
            // First, so that what the machine sends and the socket does not take is written later.
            let registered = connection.register(&self.reactor);
            let event = Event::Connected { host, connection: Arc::clone(&connection), incarnation, terms, dialed };
            (registered, machine.on(event, now, &self.reactor))
        };
        self.carry_out(actions);
        if registered {
            // What came with the greeting lies in the decoder already, and no descriptor tells of it.
            self.read_connection(&connection);
        } else {
            self.connection_lost(&connection, "its connection could not be watched");
        }
    }
}

impl Runtime {
    /// What a host that was attached knows of its job.
    pub(super) fn begin_job(
        &self,
        join: &Join,
        told: &Attachment,
        (identity, traits): (&Arc<Identity>, &Traits),
        ended: Box<dyn Fn(String) + Send + Sync>,
        log: Box<dyn Fn(String) + Send + Sync>,
    ) {
        let _ = self.gateway.identity.set(Arc::clone(identity));
        let _ = self.gateway.ended.set(super::Teller(ended));
        let _ = self.gateway.log.set(super::Teller(log));
        let begun = Event::Begun { job: join.job, told: Arc::new(told.clone()) };
        let actions = lock(&self.gateway.state).machine.on(begun, self.started.elapsed(), &self.reactor);
        self.gateway.active.store(true, Ordering::SeqCst);
        self.carry_out(actions);
        // The controller's call waits for this.
        let place = self.me.host - told.base;
        let reply = Reply { actor: 0, call: told.call, place, answer: Answer::Value };
        let said = Self::introduction(&self.host_name(), traits);
        self.dispatch(Frame::build_plain(reply.header(self.me, ProcAddr::CONTROLLER), None, b"", &said.encode()), None);
        self.reactor.ring_io();
    }

    /// Takes up to `count` hosts that dial this address; several calls may wait at one address, and the first is served first.
    pub(super) fn listen_for_dialers(
        &self,
        addr: SocketAddr,
        identity: Arc<Identity>,
        told: &Arc<Attachment>,
    ) -> Result<(), RuntimeError> {
        let wanted = (told.base..told.base + told.count).map(|host| (host, Arc::clone(told)));
        // Held throughout, so that of two calls for one address the second finds the listener of the first.
        let mut listeners = lock(&self.gateway.listeners);
        if let Some((_, seats, _)) = listeners.iter().find(|(at, ..)| *at == addr && addr.port() != 0) {
            lock(seats).extend(wanted);
            return Ok(());
        }
        let seats = Arc::new(Mutex::new(wanted.collect::<VecDeque<_>>()));
        let expected = Arc::clone(&seats);
        let looking = Arc::new(AtomicUsize::new(0));
        let this = self.weak();
        let on_event = move |event: ListenerEvent| {
            let Some(runtime) = this.upgrade() else { return };
            let (stream, peer) = match event {
                ListenerEvent::Joined { stream, peer, .. } => (stream, peer),
                // Probably somebody who looks whether this address can be reached, such as a host before it dials.
                ListenerEvent::Refused { reason: Reason::Left, .. } => return,
                ListenerEvent::Refused { addr, reason, .. } => {
                    return runtime.gateway.warn(format!("{addr} was refused: {reason}"));
                }
                ListenerEvent::Stuck { errno } => {
                    return runtime.gateway.warn(format!("no host can be let in for the moment: {errno}"));
                }
            };
            let place = if peer.role.may_join() { None } else { Place::take(&looking) };
            if place.is_none() && !peer.role.may_join() {
                return visits::turn_away(stream);
            }
            let (seats, looking) = (Arc::clone(&seats), Arc::clone(&looking));
            let greeting = move || {
                let place = || place.or_else(|| Place::take(&looking));
                runtime.take_offer((stream, peer), place, &seats);
            };
            let _ = std::thread::Builder::new().name("mesh-greet".to_owned()).stack_size(512 * 1024).spawn(greeting);
        };
        let listener = Listener::bind(&[addr], identity, Limits::default(), on_event)
            .map_err(|error| RuntimeError::Address(error.to_string()))?;
        listeners.push((addr, expected, listener));
        drop(listeners);
        if self.is_closed() {
            // Whoever closes may have looked just before.
            self.close_listeners();
        }
        Ok(())
    }

    /// A host offers itself, or comes back.
    fn take_offer(
        &self,
        (mut stream, facts): (TlsStream, PeerFacts),
        place: impl FnOnce() -> Option<Place>,
        seats: &Seats,
    ) {
        let until = Instant::now() + GREETING;
        let mut decoder = PacketDecoder::default();
        let Ok(packet) = hear(&mut stream, &mut decoder, until) else { return };
        if let Ok(look) = Look::read(&packet) {
            return match (place(), self.gateway.identity.get()) {
                (Some(_place), Some(identity)) => {
                    visits::receive(self, look, stream, decoder, (&facts, identity), &|text| {
                        self.gateway.tell(text.to_owned());
                    });
                }
                _ => visits::turn_away(stream),
            };
        }
        let Ok(join) = Join::read(&packet) else { return };
        if join.job != 0 {
            let job = lock(&self.gateway.state).machine.job();
            if join.job == job {
                self.taken_in(&join, stream, decoder, facts);
            } else {
                refuse(stream, Refusal::NoSuchJob, "there is no such job here, or not any more".to_owned());
            }
            return;
        }
        let seat = {
            let mut seats = lock(seats);
            if facts.role == Role::Host { seats.pop_front() } else { None }
        };
        let Some((host, attachment)) = seat else {
            return refuse(stream, Refusal::Busy, "no more hosts are wanted".to_owned());
        };
        let join = {
            let machine = &mut lock(&self.gateway.state).machine;
            machine.seat(host, Some(attachment));
            machine.join(host)
        };
        let greeted = say(&mut stream, &join.packet(), until)
            .and_then(|()| hear(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_good(Fate::NotAttached, error.to_string()))
            .and_then(|answer| self.answered(host, "a host that has dialed", stream, decoder, facts, &answer));
        match greeted {
            Ok(Some(greeted)) => self.adopt(host, greeted, false),
            Ok(None) => {}
            Err(Missed { fate, why, .. }) => self.on_gateway(Event::Lost { host, fate, why }),
        }
    }
}
