//! How connections between hosts come about: dialing, being dialed, and who is taken in.
//!
//! Whoever dials says [`Join`] and sends nothing else until it is welcome. A host above another dials it, for the first time
//! with what it has to know ([`Attachment`]); the two ends of any other connection may dial, and the lower number's
//! attempt counts if both do. A host that only can dial out offers itself to the controller, which then joins it over
//! that very connection.

use super::connection::HostConnection;
use super::verdict::Missed;
use super::visits::{self, Place};
use super::{Peer, State};
use crate::error::RuntimeError;
use crate::reactor::timespec;
use crate::runtime::{Runtime, lock};
use crate::tls::{
    DialError, Dialed, Identity, Limits, Listener, ListenerEvent, Pace, PeerFacts, Reason, Role, TlsStream, dial,
};
use mesh_proto::control::{Attachment, Report, Terms, Traits};
use mesh_proto::hosts::{
    Fate, Heartbeat, Join, Look, Packet, PacketDecoder, PacketKind, Parting, Refusal, Refuse, Standing, Welcome,
};
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
    pub(super) fn dial(&self, host: HostNo) {
        let Some(this) = self.this() else { return };
        let Some(identity) = self.gateway.identity.get().cloned() else { return };
        let (address, window) = {
            let mut state = lock(&self.gateway.state);
            if state.is_pending(host) {
                return;
            }
            let window = state.window_of(host);
            let Some(peer) = state.peers.get_mut(&host) else { return };
            // Beside a connection that is silent another one may come up.
            let wanted = peer.connection.is_none() || peer.heartbeat.as_ref().is_some_and(Heartbeat::is_suspect);
            let Some(address) = peer.address.clone().filter(|_| !peer.dialing && wanted) else { return };
            peer.dialing = true;
            (address, window)
        };
        let thread = std::thread::Builder::new().name("mesh-dial".to_owned()).stack_size(512 * 1024).spawn(move || {
            // An attempt that takes long is no use where the window is short.
            let timeout = window.clamp(Duration::from_millis(200), GREETING);
            let pace = Pace { timeout, again: (window / 20).clamp(AGAIN[0], AGAIN[1]) };
            match this.greet(host, &address, &identity, pace) {
                Ok(Some(greeted)) => this.adopt(host, greeted, true),
                // It is connected to already, or was told off.
                Ok(None) => this.dial_failed(host, Missed::for_now("")),
                Err(missed) => this.dial_failed(host, missed),
            }
        });
        if thread.is_err() {
            self.dial_failed(host, Missed::for_now("no thread could be started to connect to it"));
        }
    }

    /// Connects and says who this is.
    fn greet(&self, host: HostNo, address: &str, identity: &Identity, pace: Pace) -> Result<Option<Greeted>, Missed> {
        let until = Instant::now() + pace.timeout;
        let expect = if host == 0 { Role::Controller } else { Role::Host };
        let Dialed { mut stream, peer: facts, .. } =
            dial(address, identity, Some(expect), pace).map_err(|error| missed_by(&error))?;
        let mut decoder = PacketDecoder::default();
        let join = self.join(host);
        let answer = say(&mut stream, &join.packet(), until)
            .and_then(|()| hear(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_now(format!("{address} did not answer as a host does: {error}")))?;
        self.answered(host, address, stream, decoder, facts, &answer)
    }

    fn join(&self, host: HostNo) -> Join {
        let mut state = lock(&self.gateway.state);
        let below = Self::hosts_below(&state, host);
        let terms = Terms { window: state.window_of(host) };
        let State { job, incarnation, peers, .. } = &mut *state;
        let peer = peers.entry(host).or_default();
        let body = peer.attachment.as_ref().map(|told| Attachment { below, ..(**told).clone() }.encode());
        Join {
            job: *job,
            from: self.me.host,
            to: host,
            incarnation: *incarnation,
            expected: peer.incarnation,
            body: body.unwrap_or_else(|| terms.encode()),
        }
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
        let strange = || Missed::for_now(format!("{address} answers what nobody understands"));
        match answer.kind {
            PacketKind::Welcome => {
                let Ok(welcome) = Welcome::read(answer) else { return Err(strange()) };
                let known = lock(&self.gateway.state).peers.get(&host).map_or(0, |peer| peer.incarnation);
                if known != 0 && known != welcome.incarnation {
                    let why = format!("{address} was started anew, and what ran there is gone");
                    return Err(Missed::for_good(Fate::Restarted, why));
                }
                let terms = Terms::decode(&welcome.body);
                Ok(Some(Greeted { stream, decoder, facts, incarnation: welcome.incarnation, terms }))
            }
            PacketKind::Refuse => match Refuse::read(answer) {
                Ok(Refuse { code: Refusal::Busy, .. }) => Ok(None),
                Ok(Refuse { code: Refusal::Dead, text })
                    if lock(&self.gateway.state).topology.is_above(host, self.me.host) =>
                {
                    self.end_job(Parting::CutOff, &text);
                    Ok(None)
                }
                Ok(Refuse { code, text }) => {
                    let fate = match code {
                        Refusal::NoSuchJob | Refusal::NotMe => Fate::Restarted,
                        _ => Fate::Refused,
                    };
                    Err(Missed::for_good(fate, format!("{address} refuses: {text}")))
                }
                Err(_) => Err(Missed::for_good(Fate::Refused, format!("{address} refuses"))),
            },
            _ => Err(strange()),
        }
    }

    /// Somebody has dialed this runtime's host, as a member of its job.
    pub(super) fn taken_in(&self, join: &Join, mut stream: TlsStream, decoder: PacketDecoder, facts: PeerFacts) {
        let refusal = {
            let state = lock(&self.gateway.state);
            let peer = state.peers.get(&join.from);
            if state.over || self.is_closed() {
                Some((Refusal::NoSuchJob, "the job has ended".to_owned()))
            } else if !facts.role.may_join() {
                Some((Refusal::NotAllowed, "an observer can look into jobs, and not join them".to_owned()))
            } else if join.from == 0 && facts.role != Role::Controller {
                Some((Refusal::Other, "it is a host, where a controller is expected".to_owned()))
            } else if join.to != self.me.host {
                let me = self.me.host;
                Some((
                    Refusal::NotMe,
                    format!("it is host {me} of this job already, and cannot be host {} too", join.to),
                ))
            } else if join.expected != 0 && join.expected != state.incarnation {
                Some((Refusal::NotMe, "this host was started anew; what ran here is gone".to_owned()))
            } else if state.topology.standing(join.from) == Standing::Dead {
                let why = peer.and_then(|peer| peer.verdict.as_ref()).map(ToString::to_string);
                Some((Refusal::Dead, format!("declared dead: {}", why.unwrap_or_default())))
            } else if peer.is_some_and(|peer| peer.incarnation != 0 && peer.incarnation != join.incarnation) {
                Some((Refusal::NotMe, format!("host {} was started anew; what ran there is gone", join.from)))
            } else if self.me.host < join.from && peer.is_some_and(|peer| peer.dialing && peer.dials) {
                Some((Refusal::Busy, "a connection is being made the other way".to_owned()))
            } else {
                None
            }
        };
        if let Some((code, text)) = refusal {
            return refuse(stream, code, text);
        }
        let (incarnation, own) = {
            let state = lock(&self.gateway.state);
            (state.incarnation, Terms { window: state.window_of(join.from) })
        };
        let welcome = Welcome { incarnation, body: own.encode() }.packet(self.me.host);
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
            Err(error) => return self.dial_failed(host, Missed::for_now(error.to_string())),
        };
        let (old, registered, recovered) = {
            let mut connections = self.gateway.connections.write().unwrap_or_else(PoisonError::into_inner);
            connections.insert(token, Arc::clone(&connection));
            drop(connections);
            let mut state = lock(&self.gateway.state);
            let window = Terms::agree(state.window_of(host), terms);
            let over = state.over;
            let dead = state.topology.standing(host) == Standing::Dead;
            state.topology.reachable(host);
            state.back_again(self.me.host, now);
            let peer: &mut Peer = state.peers.entry(host).or_default();
            let old = if over || dead {
                Some(Arc::clone(&connection))
            } else {
                peer.connection.replace(Arc::clone(&connection))
            };
            peer.dialing = false;
            // The controller's address is known only to who has dialed it at first; nobody else could make it again.
            peer.dials = dialed || host == 0 && peer.address.is_some();
            peer.redial_at = None;
            peer.lost_since = None;
            peer.attempts = 0;
            peer.why.clear();
            peer.incarnation = incarnation;
            peer.heartbeat = Some(Heartbeat::new(window, now));
            peer.agreed = Some(window);
            peer.kept_bytes = 0;
            let kept = std::mem::take(&mut peer.kept);
            for packet in kept {
                connection.send(&self.reactor, &packet, now);
            }
            let registered = connection.register(&self.reactor);
            let recovered = state.topology.standing(host) == Standing::Suspect;
            if recovered {
                self.stand(&mut state, host, Standing::Live);
            }
            let recovered = recovered && state.topology.children(self.me.host).contains(host);
            let through = state.peer_streams.through(host);
            self.reroute(&mut state, &through);
            self.pump(&mut state, host);
            state.armed = Duration::ZERO;
            (old, registered, recovered)
        };
        if let Some(old) = old {
            old.close(&self.reactor);
            self.gateway.connections.write().unwrap_or_else(PoisonError::into_inner).remove(&old.token);
        }
        if recovered {
            // Others may still go around it.
            self.report_lost(host, Report::Well);
        }
        self.reactor.ring_io();
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
        {
            let mut state = lock(&self.gateway.state);
            let now = self.started.elapsed();
            state.job = join.job;
            state.window = told.window;
            state.hold = told.hold;
            state.fan_out = told.fan_out;
            if told.dialed {
                state.topology.add_dialed(self.me.host);
            } else {
                state.topology.add_group(told.base, told.count, told.fan_out);
            }
            state.orphaned = Some(now);
            let children = state.topology.children(self.me.host);
            for (host, address) in &told.below {
                let peer = state.peers.entry(*host).or_default();
                peer.address = Some(address.clone());
                peer.lost_since = children.contains(*host).then_some(now);
                if *host == 0 {
                    peer.dials = true;
                    continue;
                }
                let attachment = Attachment { below: Vec::new(), ..told.clone() };
                peer.attachment = Some(Arc::new(attachment));
            }
        }
        self.gateway.active.store(true, Ordering::SeqCst);
        self.reach_out();
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
        (told, base, count, options): (u64, HostNo, u32, super::GatewayOptions),
    ) -> Result<(), RuntimeError> {
        let attachment = Arc::new(Attachment {
            call: told,
            base,
            count,
            fan_out: options.fan_out,
            window: options.window,
            patience: options.patience,
            hold: options.hold,
            dialed: true,
            below: Vec::new(),
        });
        let wanted = (base..base + count).map(|host| (host, Arc::clone(&attachment)));
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
            let job = lock(&self.gateway.state).job;
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
        {
            let mut state = lock(&self.gateway.state);
            state.topology.add_dialed(host);
            let peer = state.peers.entry(host).or_default();
            peer.attachment = Some(attachment);
        }
        let join = self.join(host);
        let greeted = say(&mut stream, &join.packet(), until)
            .and_then(|()| hear(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_good(Fate::NotAttached, error.to_string()))
            .and_then(|answer| self.answered(host, "a host that has dialed", stream, decoder, facts, &answer));
        match greeted {
            Ok(Some(greeted)) => self.adopt(host, greeted, false),
            Ok(None) => {}
            Err(missed) => self.on_host_lost(host, Report::dead(missed.fate, missed.why)),
        }
    }
}
