//! Values for ports on their way, and the notice that nobody listens there any more.

use super::Runtime;
use crate::calls::Call;
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::message::Message;
use crate::meter::MailboxCredits as Account;
use crate::ports::{Inlet, Mailbox, Outlet, Taken, Way};
use crate::runtime::{Body, Deferral, Later};
use mesh_proto::control::{Closed, Held, Holding, PortAddr, Undeliverable, Watch};
use mesh_proto::messages::{Answer, Asked, Cancel, Cancelled, Meaning, Partial, Post, Reply};
use mesh_proto::{ActorId, Frame, Header, Holders, MESSAGE_COST, PortEnd, ProcAddr, Target, Ticket, Undelivered};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A port that is sent to more at once is nobody's in particular.
const MOST_HOLDERS: usize = 1024;

/// What tells the id under which the values of a streamed call are counted from those of mailboxes.
pub(crate) const STREAM: ActorId = 1 << 63;

/// The port that a value is for.
fn address_of(header: &Header) -> Option<PortAddr> {
    let owner = header.dst;
    match Meaning::of(header).ok()? {
        Meaning::Post(post) => Some(PortAddr { owner, id: post.port, place: 0, response: false }),
        Meaning::Reply(reply) => Some(PortAddr { owner, id: reply.call, place: reply.place, response: true }),
        _ => None,
    }
}

impl Runtime {
    /// Opens a port that is received at here.
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

    pub(crate) fn open_receive(&self) -> Result<Arc<Call>, RuntimeError> {
        self.open(Target::One(self.me), false)
    }

    pub(crate) fn close_port(&self, inlet: &Inlet) {
        self.ports.shut(inlet.id);
        let left = inlet.close(&self.reactor, &self.calls);
        if self.usable().is_ok() {
            for message in left {
                self.refuse_post(message.header(), PortEnd::ClosedBefore);
            }
            // Whoever waits for room is to know by then.
            inlet.account.close();
        }
    }

    /// The sending end of a port; `first` for the one that an endpoint gets.
    pub fn outlet(self: &Arc<Self>, owner: ProcAddr, way: Way, first: bool) -> Outlet {
        let mut outlet = Outlet { runtime: Arc::clone(self), owner, way, known: Arc::default(), first };
        outlet.known = self.ports.known(outlet.address());
        if first {
            outlet.known.hold(Holders::FIRST);
        }
        outlet
    }

    /// The sending end of the port of a call that came from another process, under `ticket`.
    pub fn outlet_under(self: &Arc<Self>, owner: ProcAddr, way: Way, ticket: Ticket) -> Outlet {
        let outlet = self.outlet(owner, way, false);
        outlet.known.hold(ticket);
        outlet
    }

    /// Accounts for a value of a stream where that is read.
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

    /// Tells the caller who holds the port of its call, if there is one.
    fn tell_held(&self, outlet: &Outlet, news: Holding) {
        let Way::Response { call, index, .. } = outlet.way else { return };
        if call != 0 && self.usable().is_ok() {
            self.dispatch_behind(outlet, Held { call, place: index, news }.frame(self.me, outlet.owner));
        }
    }

    /// Sends what says something of a port: not before values of it that wait for room.
    fn dispatch_behind(&self, outlet: &Outlet, frame: Frame) {
        let target = Target::One(outlet.owner);
        match outlet.counted().filter(|place| self.behind(&target, *place).is_some()) {
            Some(place) => {
                // Whoever closes drops it.
                self.dispatch_later(vec![frame], &Arc::new(target), place, Later::default());
            }
            None => {
                self.dispatch(frame, None);
            }
        }
    }

    /// The port of a call has gone where nobody can follow it.
    pub(crate) fn tell_loose(&self, outlet: &Outlet) {
        self.tell_held(outlet, Holding::Loose);
    }

    /// The port of a call was sent to these.
    pub(crate) fn tell_given(&self, outlet: &Outlet, ticket: Ticket, to: &Target, who: &str) {
        if to.len() > MOST_HOLDERS {
            return self.tell_loose(outlet);
        }
        self.tell_held(outlet, Holding::Given { ticket, to: to.procs().collect(), name: who.to_owned() });
    }

    /// Nothing in this process holds the port of a call any more that came under these.
    pub(crate) fn tell_let_go(&self, outlet: &Outlet, tickets: &[Ticket]) {
        self.tell_held(outlet, Holding::LetGo(tickets.to_vec()));
    }

    /// Somebody tells who holds the port of a call of this process.
    pub(super) fn on_held(&self, frame: &Frame) {
        let Some(Held { call, place, news }) = Held::read(frame) else { return };
        let src = frame.header.src;
        if self.refs.keeps(call) {
            return self.on_ref_held(call, src, news);
        }
        let change = |change: &mut dyn FnMut(&mut Holders)| {
            self.calls.on_held(&self.reactor, call, place as usize, change);
        };
        let (ticket, to, name) = match news {
            Holding::Loose => return change(&mut Holders::loosen),
            Holding::LetGo(tickets) => {
                return change(&mut |holders| tickets.iter().for_each(|ticket| holders.let_go(src, *ticket)));
            }
            // Of references alone.
            Holding::Unsent { .. } => return,
            Holding::Given { ticket, to, name } => (ticket, to, Arc::<str>::from(name)),
        };
        let mut news = Vec::new();
        change(&mut |holders| {
            let given = to.iter().take(MOST_HOLDERS).copied();
            news.extend(given.filter(|addr| holders.given(*addr, ticket, &name)));
        });
        for holder in news {
            // This process's own end, or that of a whole host, is heard of anyway.
            if holder != self.me && !holder.is_agent() {
                self.dispatch(Watch::of(holder).frame(self.me, holder), None);
            }
        }
    }

    pub(super) fn on_post(&self, post: Post, frame: Frame) {
        let header = frame.header;
        let message = Message::new(frame, &self.memory);
        if message.is_torn() {
            return; // Its sender is dead, and nobody is to hear of it.
        }
        let inlet = self.ports.inlet(post.port);
        match inlet.map_or(Taken::Refused, |inlet| inlet.push(&self.reactor, &self.calls, message)) {
            Taken::In => {}
            Taken::Last => self.ports.shut(post.port),
            Taken::Refused => {
                self.refuse(&header);
                self.refuse_post(&header, PortEnd::Closed);
            }
        }
    }

    /// Tells a port's sender that nobody listens there any more.
    pub(super) fn refuse_post(&self, header: &Header, why: PortEnd) {
        let Some(port) = address_of(header) else { return };
        let closed = Closed { port, why };
        if header.src == self.me {
            self.ports.on_closed(closed);
        } else {
            self.dispatch(closed.frame(self.me, header.src), None);
        }
    }

    pub(super) fn on_closed(&self, frame: &Frame) {
        if let Some(closed) = Closed::read(frame) {
            self.ports.on_closed(closed);
        }
    }

    /// Calls with combined replies have failed: their receivers drop what they have gathered for them.
    pub(crate) fn forget_fallen(&self) {
        for call in self.calls.take_fallen() {
            let Some((target, actor)) = call.reduced() else { continue };
            let cancel = Cancel { actor: *actor, call: call.id, place: 0, what: Cancelled::Gathering };
            self.send_cancel(target, cancel);
        }
    }

    /// Nobody can look at the call any more. A stream may go on for ever: it ends here, and its senders hear so.
    /// Of another call a failure is told, though it may come later (UNS-1).
    pub fn abandon(&self, call: &Call) {
        if call.is_done() {
            if call.has_failed() && !self.is_forked() {
                self.calls.let_go(&self.reactor, call);
            }
        } else if call.is_stream() {
            self.calls.abandon(call);
        } else if !self.is_forked() {
            self.calls.let_go(&self.reactor, call);
        }
    }

    /// Notices of calls that have failed and that nobody has looked at, though somebody holds them.
    pub fn unseen(&self) -> Vec<Message> {
        self.calls.unseen()
    }

    /// Sends a rank's share of a combined reply to the rank above it, on the terms of [`Runtime::reply_by`]. `to` is the
    /// call that it answers.
    pub fn pass_on(&self, to: &Header, parent: ProcAddr, body: Body<'_>) -> Option<Arc<Completion>> {
        let Asked { by, actor, call, place } = Asked::of(to)?;
        let header = Partial { actor, call, place }.header(self.me, parent);
        let frame = self.write(header, &Target::One(parent), Partial::name(by).as_bytes(), body);
        self.answering.send(self, frame, None, true).full
    }
}

/// What a value says beside itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Said<'a> {
    /// The payload is an encoded exception.
    pub error: bool,
    /// The sender's rank, and the shape of the mesh that it is a rank of.
    pub place: Option<(u32, &'a [u8])>,
}

impl Said<'_> {
    /// As what the value travels to a channel.
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

/// What became of a value that was sent.
#[derive(Debug)]
pub enum Posted {
    /// It is on its way. So many bytes wait for its receiver now.
    Sent(usize),
    /// It waits for room.
    Waits(Deferral),
}

impl Outlet {
    /// What a value with so many bytes counts against its receiver's budget; the same that its frame will
    /// (`Frame::cost`).
    pub fn cost(&self, said: &Said<'_>, bytes: usize) -> u64 {
        let name = match (self.way, said.place) {
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
        let frame = match self.made(said, body) {
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
                let mut frame = frame;
                frame.header.set_charged(counted);
                let queued = runtime.dispatch(frame, None);
                // The receiver may be here, or this process may know that it is not.
                match self.known.closed() {
                    Some(why) => Err(RuntimeError::PortClosed(why)),
                    None => Ok(Posted::Sent(queued)),
                }
            }
            Posting::Later(later) => {
                let target = Arc::new(Target::One(self.owner));
                let place = self.counted().unwrap_or(0);
                Ok(Posted::Waits(runtime.dispatch_later(vec![frame], &target, place, later)))
            }
        }
    }

    fn made(&self, said: Said<'_>, body: Body<'_>) -> Result<Option<Frame>, RuntimeError> {
        let runtime = &self.runtime;
        runtime.usable()?;
        if let Way::Response { call: 0, .. } = self.way {
            return Ok(None);
        }
        if let Some(why) = self.known.closed() {
            return Err(RuntimeError::PortClosed(why));
        }
        if self.is_single() && self.known.used.swap(true, Ordering::SeqCst) {
            let why = match self.way {
                Way::Channel { .. } => PortEnd::Used,
                Way::Response { .. } => PortEnd::Answered,
            };
            return Err(RuntimeError::PortClosed(why));
        }
        let target = Target::One(self.owner);
        Ok(Some(match self.way {
            Way::Channel { id, .. } => {
                let rank = said.place.map_or(0, |(rank, _)| rank);
                let header = Post { port: id, error: said.error, rank }.header(runtime.me, self.owner);
                runtime.write(header, &target, &said.name(), body)
            }
            Way::Response { call, actor, index, .. } => {
                if said.error {
                    self.known.ended.store(true, Ordering::SeqCst);
                }
                let answer = if said.error { Answer::Raised } else { Answer::More };
                let header = Reply { actor, call, place: index, answer }.header(runtime.me, self.owner);
                runtime.write(header, &target, b"", body)
            }
        }))
    }

    /// Says that no more comes this way: the end of a stream, or of the hope for an answer.
    pub fn end(&self) {
        let Way::Response { call, actor, index, stream } = self.way else { return };
        let answered = !stream && self.known.used.load(Ordering::SeqCst);
        if call == 0 || answered || self.runtime.usable().is_err() || self.known.ended.swap(true, Ordering::SeqCst) {
            return;
        }
        let end = Undeliverable { call, place: index, actor, why: Undelivered::PortDropped };
        self.runtime.dispatch_behind(self, end.frame(self.runtime.me, self.owner));
    }
}
