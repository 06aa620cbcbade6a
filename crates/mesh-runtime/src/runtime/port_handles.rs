//! Ports as their holders use them, and what connects [`crate::ports`] to the calls, the meters and the backlog.

use super::backlog::{self, Deferral, Enclosed};
use super::{Body, Runtime};
use crate::error::RuntimeError;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::ports::{Inlet, Receive, STREAM, SendingEnd, Way};
use mesh_proto::control::{Closed, Held};
use mesh_proto::messages::{Answer, Post, Reply};
use mesh_proto::{ActorId, Frame, Header, Holders, MESSAGE_COST, PortEnd, ProcAddr, Target, Ticket};
use std::sync::Arc;
use std::time::Duration;

impl Runtime {
    /// Opens a port that receives here.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn open_port(self: &Arc<Self>, once: bool) -> Result<Mailbox, RuntimeError> {
        self.usable()?;
        let account = Account::new(self.new_id(), self.options.mailbox_budget, Some(self.weak()));
        let inlet = Arc::new(Inlet::new(once, account));
        self.ports.open(&inlet);
        Ok(Mailbox { runtime: Arc::clone(self), inlet })
    }

    /// The sending end of a port; `first` for the one that an endpoint gets.
    pub fn outlet(self: &Arc<Self>, owner: ProcAddr, way: Way, first: bool) -> Outlet {
        self.outlet_of(owner, way, (first, first.then_some(Holders::FIRST)))
    }

    /// The sending end of the port of a call that came from another process, under `ticket`.
    pub fn outlet_under(self: &Arc<Self>, owner: ProcAddr, way: Way, ticket: Ticket) -> Outlet {
        self.outlet_of(owner, way, (false, Some(ticket)))
    }

    fn outlet_of(self: &Arc<Self>, owner: ProcAddr, way: Way, how: (bool, Option<Ticket>)) -> Outlet {
        Outlet { runtime: Arc::clone(self), end: SendingEnd::new(&self.ports, self.me, owner, way, how) }
    }

    /// Sends a frame about a port, behind values of it that wait for room.
    fn dispatch_behind(&self, end: &SendingEnd, frame: Option<Frame>) {
        let Some(frame) = frame.filter(|_| self.usable().is_ok()) else { return };
        let target = Target::One(end.owner());
        match end.counted().filter(|place| self.behind(&target, *place).is_some()) {
            Some(place) => {
                // Dropped if the runtime closes first.
                self.dispatch_later(vec![frame], &Arc::new(target), place, Later::default());
            }
            None => {
                self.dispatch(frame, None);
            }
        }
    }

    /// Counts a value of a stream against the budget of its reader.
    pub(super) fn charge_stream(&self, reply: &mut Message) {
        let header = *reply.header();
        let (budget, call) = (self.options.mailbox_budget, reply.meaning().call());
        match self.calls.account(call, |own| {
            Account::new(call | STREAM, own.map_or(budget, |own| own.min(budget)), Some(self.weak()))
        }) {
            Some(account) => reply.charge_to(&account),
            None => self.refuse(&header),
        }
    }

    /// Takes in a value for a port.
    pub(super) fn on_post(&self, post: Post, frame: Frame) {
        let header = frame.header;
        let message = self.inboxes.message(frame);
        if message.is_torn() {
            return; // Its sender is dead, so there is nobody to tell.
        }
        if !self.ports.take(post.port, message, &self.calls) {
            self.refuse(&header);
            self.refuse_post(&header, PortEnd::Closed);
        }
    }

    /// Tells the sender of a value that nobody receives at its port.
    pub(super) fn refuse_post(&self, header: &Header, why: PortEnd) {
        self.ports.refuse(header, why, self);
    }

    pub(super) fn on_closed(&self, frame: &Frame) {
        if let Some(closed) = Closed::read(frame) {
            self.ports.on_closed(closed);
        }
    }

    /// Handles news of who holds a value of this process, or the port of one of its calls.
    pub(super) fn on_held(&self, frame: &Frame) {
        let Some(held) = Held::read(frame) else { return };
        if self.refs.keeps(held.call) {
            self.refs.on_held(held.call, frame.header.src, held.news, self);
        } else {
            self.ports.on_held(held, frame.header.src, &self.calls, self);
        }
    }
}

/// The receiving end of a port. Dropping it closes the port.
#[derive(Debug)]
pub struct Mailbox {
    runtime: Arc<Runtime>,
    inlet: Arc<Inlet>,
}

impl Mailbox {
    /// The port's id.
    pub fn id(&self) -> u64 {
        self.inlet.id
    }

    /// Begins to wait for the next value.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn receive(&self) -> Result<Arc<Receive>, RuntimeError> {
        let call = self.runtime.open(Target::One(self.runtime.me), false)?;
        Ok(self.inlet.receive(&self.runtime.reactor, &self.runtime.calls, call))
    }

    /// Ends the wait. False if the value had come.
    pub fn cancel(&self, receive: &Receive) -> bool {
        self.runtime.calls.cancel(&self.runtime.reactor, &receive.call)
    }

    /// Gives up `receive`, which nobody will look at any more.
    pub fn give_up(&self, receive: &Arc<Receive>) {
        self.inlet.give_up(&self.runtime.reactor, &self.runtime.calls, receive);
    }

    /// Takes no more in, and drops what nobody has received.
    pub fn close(&self) {
        self.runtime.ports.close(&self.inlet, &self.runtime.calls, &*self.runtime);
    }

    /// Whether nothing can be received any more.
    pub fn is_over(&self) -> bool {
        self.inlet.is_over()
    }

    /// How many values have arrived that nobody has received.
    pub fn len(&self) -> usize {
        self.inlet.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.close();
    }
}

/// The sending end of a port.
#[derive(Debug)]
pub struct Outlet {
    runtime: Arc<Runtime>,
    end: SendingEnd,
}

impl Outlet {
    /// The receiving process.
    pub fn owner(&self) -> ProcAddr {
        self.end.owner()
    }

    /// Where it leads.
    pub fn way(&self) -> Way {
        self.end.way()
    }

    /// The id under which the receiver's process counts values, if any number may come.
    pub fn counted(&self) -> Option<ActorId> {
        self.end.counted()
    }

    /// Whether a message would still be sent.
    pub fn is_open(&self) -> bool {
        self.end.is_open()
    }

    /// The process's runtime.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Says that no more comes this way: the end of a stream, or of the hope for an answer.
    pub fn end(&self) {
        if self.runtime.usable().is_ok() {
            self.runtime.dispatch_behind(&self.end, self.end.end());
        }
    }

    // Handing it on.

    /// It is handed on in a way that cannot be tracked: from now on another process may send too.
    pub fn hand_on(&self) {
        self.runtime.dispatch_behind(&self.end, self.end.hand_on());
    }

    /// A ticket that distinguishes one handing on from all others.
    pub fn new_ticket(&self) -> Ticket {
        self.runtime.new_id()
    }

    /// The port is about to be part of a message.
    pub fn packed(&self) -> Packed {
        let (owner, way) = (self.owner(), self.way());
        Packed { outlet: self.runtime.outlet(owner, way, false), ticket: self.new_ticket() }
    }

    // Room.

    /// Makes somebody wait until the queue towards the receiver is within budget. What is sent there meanwhile waits
    /// behind.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn turn(&self, place: ActorId) -> Result<Deferral, RuntimeError> {
        self.runtime.turn(&Arc::new(Target::One(self.owner())), place, None, 0)
    }

    /// Bytes that may wait for the receiver before its senders do.
    pub fn budget(&self) -> usize {
        self.runtime.link_budget()
    }

    /// Waits a moment for the queue towards the receiver to be within budget. Returns whether it is.
    pub fn wait_room(&self, limit: Duration) -> bool {
        self.runtime.wait_room(&Target::One(self.owner()), limit)
    }

    // Values.

    /// What a value of this many bytes costs of its receiver's budget; the same as its frame (`Frame::cost`).
    pub fn cost(&self, said: &Said<'_>, bytes: usize) -> u64 {
        let name = match (self.way(), said.place) {
            (Way::Channel { .. }, Some((_, shape))) => Post::name_len(shape),
            _ => 0,
        };
        MESSAGE_COST + (name + bytes) as u64
    }

    /// Sends a value.
    ///
    /// # Errors
    /// If the receiver is known to be gone or to take no more, or the runtime is closed.
    pub fn send(&self, said: Said<'_>, body: Body<'_>, how: Posting) -> Result<Posted, RuntimeError> {
        let runtime = &self.runtime;
        let mut frame = match self.compose(said, body) {
            Ok(Some(frame)) => frame,
            refused => {
                if let Posting::Later(later) = how {
                    runtime.unreserve(later.cost);
                }
                return refused.map(|_| Posted::Sent(0)); // Nobody waits.
            }
        };
        match how {
            Posting::Now(counted) => {
                frame.header.set_charged(counted);
                let queued = runtime.dispatch(frame, None);
                // The receiver may be here, or this process may know that it is gone.
                match self.end.closed() {
                    Some(why) => Err(RuntimeError::PortClosed(why)),
                    None => Ok(Posted::Sent(queued)),
                }
            }
            Posting::Later(later) => {
                let target = Arc::new(Target::One(self.owner()));
                let place = self.counted().unwrap_or(0);
                Ok(Posted::Waits(runtime.dispatch_later(vec![frame], &target, place, later)))
            }
        }
    }

    fn compose(&self, said: Said<'_>, body: Body<'_>) -> Result<Option<Frame>, RuntimeError> {
        let (runtime, owner) = (&self.runtime, self.owner());
        runtime.usable()?;
        if !self.end.begin(said.error).map_err(RuntimeError::PortClosed)? {
            return Ok(None);
        }
        let target = Target::One(owner);
        Ok(Some(match self.way() {
            Way::Channel { id, .. } => {
                let rank = said.place.map_or(0, |(rank, _)| rank);
                let header = Post { port: id, error: said.error, rank }.header(runtime.me, owner);
                runtime.write(header, &target, &said.name(), body)
            }
            Way::Response { call, actor, index, .. } => {
                let answer = if said.error { Answer::Raised } else { Answer::More };
                let header = Reply { actor, call, place: index, answer }.header(runtime.me, owner);
                runtime.write(header, &target, b"", body)
            }
        }))
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        let Self { runtime, end } = self;
        let told = end.on_dropped(&runtime.ports);
        runtime.dispatch_behind(end, told);
        // Each stream call has its own meter, which must not be kept for long.
        if let (Way::Response { .. }, Some(place)) = (end.way(), end.counted())
            && end.is_last()
            && runtime.behind(&Target::One(end.owner()), place).is_none()
        {
            runtime.meters.forget(end.owner(), place);
        }
    }
}

/// The port of a call in a message that is about to be sent.
#[derive(Debug)]
pub struct Packed {
    outlet: Outlet,
    ticket: Ticket,
}

impl Packed {
    /// Whether it belongs to that port.
    pub fn is_of(&self, outlet: &Outlet) -> bool {
        self.outlet.end.is_of(&outlet.end)
    }

    /// The ticket under which it travels.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// The message is being sent: from here on the end of this process's port is not the end of all.
    pub fn begin(&self) {
        self.outlet.end.begin_handing_on();
    }

    /// The message was not sent.
    pub fn unsent(&self) {
        self.outlet.end.not_handed_on();
    }

    /// The message was sent to `to`, which people call `who`.
    pub fn sent(&self, to: &Target, who: &str) {
        let Outlet { runtime, end } = &self.outlet;
        runtime.dispatch_behind(end, end.handed_on(self.ticket, to, who));
    }
}

impl Enclosed for Packed {
    fn sent(&self, to: &Target, who: &str) {
        Self::sent(self, to, who);
    }

    fn unsent(&self) {
        Self::unsent(self);
    }
}

/// What a message needs to be sent later.
pub type Later = backlog::Later<Packed>;

/// What accompanies a value.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said<'a> {
    /// The payload is an encoded exception.
    pub error: bool,
    /// The sender's rank, and the shape of the mesh that it is a rank of.
    pub place: Option<(u32, &'a [u8])>,
}

impl Said<'_> {
    /// The name under which the value travels to a channel.
    fn name(&self) -> Vec<u8> {
        self.place.map_or_else(Vec::new, |(_, shape)| Post::name(shape))
    }
}

/// How a value gets to its port.
#[derive(Debug)]
pub enum Posting {
    /// At once, and whether meters have counted it.
    Now(bool),
    /// Once there is room.
    Later(Later),
}

/// The result of sending a value.
#[derive(Debug)]
pub enum Posted {
    /// It is on its way. This many bytes now wait for its receiver.
    Sent(usize),
    /// It waits for room.
    Waits(Deferral),
}
