//! The sending end of a port: what it may still send, and what its end means.

use super::state::PortState;
use super::{MOST_HOLDERS, Ports};
use crate::locks::lock;
use mesh_proto::control::{Held, Holding, PortAddr, Undeliverable};
use mesh_proto::{ActorId, CallId, Frame, PortEnd, ProcAddr, Target, Ticket, Undelivered};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Distinguishes the ids under which values of streamed calls are counted from the ids of mailboxes.
pub(crate) const STREAM: ActorId = 1 << 63;

/// Where a port leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To a channel's receiver.
    Channel {
        /// The port's id.
        id: u64,
        /// Whether it takes only one message.
        once: bool,
    },
    /// To whoever waits for a call; 0 for nobody.
    Response {
        /// The caller's number of the call.
        call: CallId,
        /// The actor that was called.
        actor: ActorId,
        /// The answering rank's place in the target.
        index: u32,
        /// Whether the caller takes any number of values.
        stream: bool,
    },
}

impl Way {
    fn address(self, owner: ProcAddr) -> PortAddr {
        match self {
            Self::Channel { id, .. } => PortAddr { owner, id, place: 0, response: false },
            Self::Response { call, index, .. } => PortAddr { owner, id: call, place: index, response: true },
        }
    }
}

/// One sending end. It composes what to send; its holder sends it.
#[derive(Debug)]
pub(crate) struct SendingEnd {
    me: ProcAddr,
    owner: ProcAddr,
    way: Way,
    state: Arc<PortState>,
    /// Made for the endpoint that was called. If it goes and nobody else has the port, the call ends.
    first: bool,
}

impl SendingEnd {
    /// An end, in the process `me`, of a port at which `owner` receives. It came under `ticket`, or was made here.
    pub(crate) fn new(
        ports: &Ports,
        me: ProcAddr,
        owner: ProcAddr,
        way: Way,
        (first, ticket): (bool, Option<Ticket>),
    ) -> Self {
        let state = ports.state(way.address(owner));
        if let Some(ticket) = ticket {
            let mut tickets = lock(&state.tickets);
            if !tickets.contains(&ticket) {
                tickets.push(ticket);
            }
        }
        Self { me, owner, way, state, first }
    }

    /// The receiving process.
    pub(crate) fn owner(&self) -> ProcAddr {
        self.owner
    }

    /// Where it leads.
    pub(crate) fn way(&self) -> Way {
        self.way
    }

    /// Whether it takes only one value.
    fn is_single(&self) -> bool {
        match self.way {
            Way::Channel { once, .. } => once,
            Way::Response { stream, .. } => !stream,
        }
    }

    /// The id under which the receiver's process counts values, if any number may come.
    pub(crate) fn counted(&self) -> Option<ActorId> {
        match self.way {
            Way::Channel { id, once: false } => Some(id),
            Way::Response { call, stream: true, .. } if call != 0 => Some(call | STREAM),
            _ => None,
        }
    }

    /// Whether it is an end of the same port.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// Why it takes no more, if the receiver said so.
    pub(crate) fn closed(&self) -> Option<PortEnd> {
        self.state.closed.get().copied()
    }

    /// Whether a value would still be sent.
    pub(crate) fn is_open(&self) -> bool {
        self.closed().is_none() && !(self.is_single() && self.state.used.load(Ordering::SeqCst))
    }

    /// Whether the receiver may still wait for what comes this way.
    fn is_awaited(&self) -> bool {
        self.is_open() && !self.state.ended.load(Ordering::SeqCst)
    }

    /// A value or an exception is about to be sent: the only one, if the port takes one. False if nobody waits for it.
    pub(crate) fn begin(&self, error: bool) -> Result<bool, PortEnd> {
        if let Way::Response { call: 0, .. } = self.way {
            return Ok(false);
        }
        if let Some(why) = self.closed() {
            return Err(why);
        }
        let response = matches!(self.way, Way::Response { .. });
        if self.is_single() && self.state.used.swap(true, Ordering::SeqCst) {
            return Err(if response { PortEnd::Answered } else { PortEnd::Used });
        }
        if response && error {
            self.state.ended.store(true, Ordering::SeqCst);
        }
        Ok(true)
    }

    /// Says that no more comes this way: the end of a stream, or of the hope for an answer. None if that is known, or
    /// nobody waits.
    pub(crate) fn end(&self) -> Option<Frame> {
        let Way::Response { call, actor, index, stream } = self.way else { return None };
        let answered = !stream && self.state.used.load(Ordering::SeqCst);
        if call == 0 || answered || self.state.ended.swap(true, Ordering::SeqCst) {
            return None;
        }
        let end = Undeliverable { call, place: index, actor, why: Undelivered::PortDropped };
        Some(end.frame(self.me, self.owner))
    }

    /// Tells the caller who holds the port of its call, if somebody waits for that.
    fn held(&self, news: Holding) -> Option<Frame> {
        match self.way {
            Way::Response { call, index, .. } if call != 0 => {
                Some(Held { call, place: index, news }.frame(self.me, self.owner))
            }
            _ => None,
        }
    }

    /// It is handed on in a way that cannot be tracked: from now on another process may send too.
    pub(crate) fn hand_on(&self) -> Option<Frame> {
        self.state.handed_on.fetch_add(1, Ordering::SeqCst);
        self.held(Holding::Loose)
    }

    /// A message with the port in it is being sent: from here on the end of this process's port is not the end of all.
    pub(crate) fn begin_handing_on(&self) {
        self.state.handed_on.fetch_add(1, Ordering::SeqCst);
    }

    /// That message was not sent.
    pub(crate) fn not_handed_on(&self) {
        self.state.handed_on.fetch_sub(1, Ordering::SeqCst);
    }

    /// That message was sent, to the actors that people call `who`.
    pub(crate) fn handed_on(&self, ticket: Ticket, to: &Target, who: &str) -> Option<Frame> {
        if to.len() > MOST_HOLDERS {
            return self.held(Holding::Loose);
        }
        self.held(Holding::Given { ticket, to: to.procs().collect(), name: who.to_owned() })
    }

    /// It was dropped. Returns the message for its receiver: that no more comes, or that this process has let go of it.
    pub(crate) fn on_dropped(&self, ports: &Ports) -> Option<Frame> {
        let end = if self.first && self.state.handed_on.load(Ordering::SeqCst) == 0 { self.end() } else { None };
        let tickets = ports.let_go(&self.way.address(self.owner), &self.state);
        end.or_else(|| {
            let news = !tickets.is_empty() && self.is_awaited();
            news.then(|| self.held(Holding::LetGo(tickets))).flatten()
        })
    }

    /// Whether it is the last end of its port in this process.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.state) == 1
    }
}
