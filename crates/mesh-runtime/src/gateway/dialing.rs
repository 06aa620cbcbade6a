//! Outgoing connections. The machine decides what both sides say.

use super::joining::Greeted;
use super::{Event, Gateway, Process};
use crate::greeting::{AGAIN, GREETING, hear, on_thread, say};
use crate::tls::{DialError, Dialed, Identity, Pace, PeerFacts, Reason, Role, TlsStream, dial};
use mesh_proto::HostNo;
use mesh_proto::hosts::gateway::Missed;
use mesh_proto::hosts::{Fate, Packet, PacketDecoder};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often an attempt looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);
/// The shortest time limit of an attempt.
const SHORTEST: Duration = Duration::from_millis(200);

/// Converts a dial error. `is_known` says whether this side was connected to the host before.
fn missed_by(error: &DialError, is_known: bool) -> Missed {
    match error {
        // The machine answers, but nobody listens.
        DialError::Refused { .. } => Missed::for_good(Fate::Unreachable, error.to_string()),
        DialError::BadAddress { .. } => Missed::for_good(Fate::NotAttached, error.to_string()),
        // A host that breaks off may be ending, or be overloaded. Where a member was reached before, what cannot be read was
        // damaged on its way. A host that rejects a certificate means it.
        DialError::NotAuthenticated { reason, .. } => match reason {
            Reason::Left | Reason::Broke(_) | Reason::TooSlow(_) | Reason::Crowded(_) => {
                Missed::for_now(error.to_string())
            }
            reason if is_known && reason.may_be_damage() => Missed::for_now(error.to_string()),
            _ => Missed::for_good(Fate::NotAuthenticated, error.to_string()),
        },
        _ => Missed::for_now(error.to_string()),
    }
}

impl<P: Process> Gateway<P> {
    /// Connects to a host on a new thread.
    pub(super) fn dial(self: &Arc<Self>, host: HostNo, address: String, window: Duration) {
        if self.machine().is_over() {
            return;
        }
        let missed = |why: &str| self.on(Event::Missed { host, missed: Missed::for_now(why) });
        let Some(identity) = self.credentials.get() else {
            return missed("this side has no credentials");
        };
        let this = Arc::clone(self);
        let started = on_thread("mesh-dial", move || {
            // An attempt that takes longer than the window is useless.
            let timeout = window.clamp(SHORTEST, GREETING);
            let again = (window / 20).clamp(AGAIN[0], AGAIN[1]);
            let pace = Pace { timeout, again, over: Some(&this.over) };
            match this.greet(host, &address, &identity, pace) {
                Ok(Some(greeted)) => this.adopt(host, greeted, true),
                // It is already connected, or refused in a way that the machine handled.
                Ok(None) => this.on(Event::Missed { host, missed: Missed::for_now("") }),
                Err(missed) => this.on(Event::Missed { host, missed }),
            }
        });
        if let Err(error) = started {
            missed(&format!("failed to start a thread to connect to it: {error}"));
        }
    }

    /// Connects and exchanges greetings.
    fn greet(
        self: &Arc<Self>,
        host: HostNo,
        address: &str,
        identity: &Identity,
        pace: Pace<'_>,
    ) -> Result<Option<Greeted>, Missed> {
        let until = Instant::now() + pace.timeout;
        let expect = if host == 0 { Role::Controller } else { Role::Host };
        let Dialed { mut stream, peer: facts, .. } = dial(address, identity, Some(expect), pace)
            .map_err(|error| missed_by(&error, self.machine().was_connected(host)))?;
        let mut decoder = PacketDecoder::default();
        let join = self.machine().join(host);
        let answer = say(&mut stream, &join.packet(), until)
            .and_then(|()| self.hear_while_wanted(&mut stream, &mut decoder, until))
            .map_err(|error| Missed::for_now(format!("{address} did not answer as a Mesh host does: {error}")))?;
        self.answered(host, address, (stream, decoder, facts), &answer)
    }

    /// Waits for the next packet, as long as this gateway is not closed.
    fn hear_while_wanted(
        &self,
        stream: &mut TlsStream,
        decoder: &mut PacketDecoder,
        until: Instant,
    ) -> std::io::Result<Packet> {
        loop {
            let now = Instant::now();
            match hear(stream, decoder, until.min(now + LOOK)) {
                Err(error)
                    if error.kind() == ErrorKind::TimedOut && now < until && !self.over.load(Ordering::Relaxed) => {}
                heard => return heard,
            }
        }
    }

    /// Handles the answer to this side's greeting. Returns `None` if there is nothing to do for now.
    pub(super) fn answered(
        self: &Arc<Self>,
        host: HostNo,
        address: &str,
        (stream, decoder, facts): (TlsStream, PacketDecoder, PeerFacts),
        answer: &Packet,
    ) -> Result<Option<Greeted>, Missed> {
        let (answer, action) = self.machine().answered(host, address, answer);
        self.carry_out(action.into_iter().collect());
        Ok(answer?.map(|(incarnation, terms)| Greeted { stream, decoder, facts, incarnation, terms }))
    }
}
