//! Taking connections into use, incoming ones included, and the one by which a host joins its job.

use super::connection::HostConnection;
use super::roster::introduction;
use super::teller::Tell;
use super::{Event, Gateway, Process};
use crate::greeting::{GREETING, refuse, say};
use crate::tls::{Identity, PeerFacts, Role, TlsStream};
use mesh_proto::control::{Attachment, Terms, Traits};
use mesh_proto::hosts::gateway::{Caller, Missed};
use mesh_proto::hosts::{HostSet, Join, PacketDecoder, Refusal};
use mesh_proto::messages::{Answer, Reply};
use mesh_proto::{Frame, HostNo, ProcAddr};
use std::sync::Arc;
use std::time::Instant;

/// A connection whose greetings are done.
pub(super) struct Greeted {
    pub(super) stream: TlsStream,
    /// Holds bytes that were read after the greeting.
    pub(super) decoder: PacketDecoder,
    pub(super) facts: PeerFacts,
    pub(super) incarnation: u64,
    pub(super) terms: Option<Terms>,
}

/// How a host takes part in a job that starts there.
pub(crate) struct JobBegun<'a> {
    pub(crate) identity: &'a Arc<Identity>,
    /// Properties of the host.
    pub(crate) traits: &'a Traits,
    /// Called once with the reason when the host's part in the job is over.
    pub(crate) ended: Tell,
    /// Shows messages to people.
    pub(crate) log: Tell,
}

impl<P: Process> Gateway<P> {
    /// The controller attached this host: its part in the job starts.
    pub(crate) fn begin(self: &Arc<Self>, join: &Join, told: &Attachment, begun: JobBegun<'_>) {
        let JobBegun { identity, traits, ended, log } = begun;
        let _ = self.credentials.agree(identity, HostSet::one(self.me.host), |_| false, || {});
        self.ended.set(ended);
        self.log.set(log);
        let event = Event::Begun { job: join.job, told: Arc::new(told.clone()) };
        let actions = {
            let mut machine = self.machine();
            if machine.is_over() {
                // It was closed meanwhile.
                return;
            }
            self.activate();
            machine.on(event, self.now(), self.reactor())
        };
        self.carry_out(actions);
        // The controller's call waits for this reply.
        let place = self.me.host - told.base;
        let reply = Reply { actor: 0, call: told.call, place, answer: Answer::Value };
        let said = introduction(&self.parts.home.called(self.me.host), traits).encode();
        self.dispatch(Frame::build_plain(reply.header(self.me, ProcAddr::CONTROLLER), None, b"", &said));
        self.reactor().ring_io();
    }

    /// Handles a member of the job that dialed this host.
    pub(crate) fn admit(
        self: &Arc<Self>,
        join: &Join,
        mut stream: TlsStream,
        decoder: PacketDecoder,
        facts: PeerFacts,
    ) {
        let admitted = if self.parts.standing.is_closed() {
            Err((Refusal::NoSuchJob, "the job has ended".to_owned()))
        } else {
            let caller = match facts.role {
                Role::Controller => Caller::Controller,
                role if role.may_join() => Caller::Host,
                _ => Caller::Observer,
            };
            self.machine().admit(join, caller)
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

    /// Takes a connection into use after its greetings. What the previous one may have lost is sent again.
    pub(super) fn adopt(self: &Arc<Self>, host: HostNo, greeted: Greeted, dialed: bool) {
        let now = self.now();
        let Greeted { stream, decoder, facts, incarnation, terms } = greeted;
        let make = |token| HostConnection::new(token, host, facts, stream, decoder, now);
        let connection = match self.connections.add(make) {
            Ok(connection) => connection,
            Err(error) => {
                let missed = Missed::for_now(error.to_string());
                return self.on(Event::Missed { host, missed });
            }
        };
        let (registered, actions) = {
            let mut machine = self.machine();
            // First, so that what the machine sends and the socket does not take is written later.
            let registered = connection.register(self.reactor());
            let event = Event::Connected { host, connection: Arc::clone(&connection), incarnation, terms, dialed };
            (registered, machine.on(event, now, self.reactor()))
        };
        self.carry_out(actions);
        if registered {
            // What came with the greeting is in the decoder already, and no descriptor reports it.
            self.read(&connection);
        } else {
            self.connection_lost(&connection, "its connection could not be watched");
        }
    }
}
