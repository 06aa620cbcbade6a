//! Messages out: composed, taken one step on their way, or brought back to whoever sent them.

use super::answers::holds_back;
use super::incoming::MOST_PROCS;
use super::{Runtime, lock, read};
use crate::calls::{Call, Outcome};
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::gateway::GATEWAY;
use crate::message::Message;
use crate::refs::Hold;
use bytes::Bytes;
use mesh_proto::control::{Down, Undeliverable, Watch, mesh_of, ranks_of};
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::{
    Answer, Asked, Call as TaskCall, Cancel, Cancelled, Meaning, Reply, Request, Spawn, SpawnPart,
};
use mesh_proto::{
    ActorId, CallId, Carried, Ended, Family, Frame, Header, Kind, LinkId, MESSAGE_COST, Part, Piece, PortEnd, ProcAddr,
    Route, Sharing, Target, Undelivered,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How many receivers a cast to a mesh may name that is not known here; each is answered for.
const MOST_UNKNOWN: usize = 1 << 20;

/// What a message carries.
#[derive(Clone, Copy, Debug, Default)]
pub struct Body<'a> {
    /// The envelope.
    pub payload: &'a [u8],
    /// Out-of-band buffers.
    pub buffers: &'a [&'a [u8]],
    /// What holds the values that references in it are to; none if it has no references.
    pub refs: Option<&'a [Arc<Hold>]>,
}

impl<'a> Body<'a> {
    /// One without references.
    pub fn new(payload: &'a [u8], buffers: &'a [&'a [u8]]) -> Self {
        Self { payload, buffers, refs: None }
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        let refs = self.refs.map_or(0, |refs| Carried::size(refs.len()));
        self.payload.len() + refs + self.buffers.iter().map(|buffer| buffer.len()).sum::<usize>()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A message on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// What it is for.
    pub request: Request,
    /// Who shall have it.
    pub target: &'a Target,
    /// Which actor there.
    pub actor: ActorId,
    /// The endpoint.
    pub name: &'a [u8],
    /// What it carries.
    pub body: Body<'a>,
}

impl Outgoing<'_> {
    /// What the message counts against its receivers' budgets; the same that its frame will (`Frame::cost`).
    pub fn cost(&self) -> u64 {
        MESSAGE_COST + (self.name.len() + self.body.len()) as u64
    }

    /// The same; of a call, whether its caller takes as many values as come.
    pub(super) fn streamed(self, stream: bool) -> Self {
        match self.request {
            Request::Call { task, .. } if stream => Self { request: Request::Call { stream, task }, ..self },
            _ => self,
        }
    }
}

/// On what terms a message is sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// It was counted ([`Runtime::admit_all`]), and its bytes are to be given back.
    pub charged: bool,
    /// So many milliseconds from now nobody wants the answer any more; 0 for no such time.
    pub deadline_ms: u32,
    /// What those who send to its stream may be ahead of its reader, in bytes; 0 for what the process has set.
    pub ahead: u64,
}

impl Terms {
    pub(super) fn mark(self, mut frame: Frame) -> Frame {
        frame.header.set_charged(self.charged);
        frame.header.set_deadline_ms(self.deadline_ms);
        frame
    }
}

/// What a message says of who owns whom, and of who has to hear of whose end. Returns owners on other hosts that are to be
/// watched.
pub(crate) fn relate(family: &mut Family, header: &Header) -> Vec<ProcAddr> {
    let (src, dst) = (header.src, header.dst);
    match Meaning::of(header) {
        Ok(Meaning::Spawn(spawn)) => {
            family.asked(src, dst.mesh);
            // Arguments that follow an announcement may come after the actor's stop.
            if spawn.part != SpawnPart::Arguments {
                family.actor_made(dst, spawn.actor, src);
            }
            return family.to_watch();
        }
        Ok(Meaning::StopActor(stop)) => {
            family.asked(src, dst.mesh);
            family.actor_stopped(dst, stop.actor);
        }
        Ok(
            Meaning::Call(_)
            | Meaning::Post(_)
            | Meaning::Extend(_)
            | Meaning::Control(Kind::Inspect | Kind::Watch | Kind::Fetch),
        ) => {
            family.asked(src, dst.mesh);
        }
        // Who has something there that is to come back.
        Ok(said) if said.is_for_port() || header.is_owed() || header.is_charged() => {
            family.asked(src, dst.mesh);
        }
        Ok(_) | Err(_) => {}
    }
    Vec::new()
}

impl Runtime {
    /// The parts of a message. What is `distant` of its buffers is there already.
    fn pack(
        &self,
        target: &Target,
        payload: &[u8],
        buffers: &[&[u8]],
        distant: Vec<Option<Part>>,
    ) -> (Vec<Part>, Sharing) {
        let mut parts = Vec::with_capacity(1 + buffers.len());
        parts.push(Part::Inline(Bytes::copy_from_slice(payload)));
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let agent = Target::One(ProcAddr::agent(self.me.host));
        // What goes to other hosts goes through this one's agent. A mixture is written out: its receivers here map nothing.
        let near = match target.is_on(self.me.host) {
            true => Some(target),
            false if !self.me.is_agent() && target.hosts().contains(self.me.host) => None,
            false => Some(&agent),
        };
        let mut distant = distant.into_iter();
        for data in buffers {
            if let Some(part) = distant.next().flatten() {
                parts.push(part);
                continue;
            }
            let near = near.filter(|_| data.len() >= self.options.shm_threshold);
            let shared = near.and_then(|near| self.memory.put(data, near, self.board.spare()));
            parts.push(match shared {
                Some(at) => {
                    sharing.shared = true;
                    Part::Shared { at, len: data.len() as u64 }
                }
                None => Part::Inline(Bytes::copy_from_slice(data)),
            });
        }
        if self.sends.fetch_add(1, Ordering::Relaxed) % 64 == 63 {
            self.memory.trim();
        }
        (parts, sharing)
    }

    /// Who a header names of such a target.
    pub(super) fn aim(&self, target: &Target) -> ProcAddr {
        match target {
            Target::One(addr) => *addr,
            // The region says which; the header, for whoever reads only that, names no host of its own.
            Target::Many(mesh, ..) => ProcAddr { mesh: *mesh, rank: 0, host: 0 },
            // Each piece is composed by itself.
            Target::Joined(_) => self.me,
        }
    }

    /// A message; `place` is that of its first receiver in what is messaged.
    fn compose(&self, out: &Outgoing<'_>, call: CallId, place: u32) -> Frame {
        let header = out.request.header(out.actor, call, place, self.me, self.aim(out.target));
        self.write(header, out.target, out.name, out.body)
    }

    /// Writes a message; what its references are to is given to its receivers.
    pub(super) fn write(&self, mut header: Header, target: &Target, name: &[u8], body: Body<'_>) -> Frame {
        let Body { payload, buffers, refs } = body;
        if let Some(refs) = refs {
            header.set_carries_refs();
            let payload = Carried::append(payload, &self.give_refs(refs, target));
            return self.write(header, target, name, Body::new(&payload, buffers));
        }
        let cast = match target {
            Target::One(_) | Target::Joined(_) => None,
            many @ Target::Many(..) => Some(many),
        };
        if buffers.is_empty() {
            return Frame::build_plain(header, cast, name, payload);
        }
        let distant = self.carry_past(header.kind, target, buffers);
        header.set_distant(distant.is_some());
        let (parts, sharing) = self.pack(target, payload, buffers, distant.unwrap_or_default());
        header.set_sharing(sharing);
        Frame::build(header, cast, name, &parts)
    }

    /// Composes a message and takes it on its way: to joined receivers one for each piece. Returns how many bytes now wait
    /// for the slowest receiver.
    fn send_out(&self, out: &Outgoing<'_>, call: CallId, mark: impl Fn(Frame) -> Frame) -> usize {
        let Target::Joined(joined) = out.target else { return self.dispatch(mark(self.compose(out, call, 0)), None) };
        let frames = joined.pieces().iter().map(|piece| mark(self.compose_piece(out, piece, call)));
        frames.map(|frame| self.dispatch(frame, None)).max().unwrap_or(0)
    }

    fn compose_piece(&self, out: &Outgoing<'_>, piece: &Piece, call: CallId) -> Frame {
        let actor = piece.actor_of(out.actor);
        let first = u32::try_from(piece.first).unwrap_or(u32::MAX);
        self.compose(&Outgoing { target: &piece.target, actor, ..*out }, call, first)
    }

    /// The frames of a message: one, or for joined receivers one for each piece.
    pub(super) fn compose_all(&self, out: &Outgoing<'_>, call: CallId) -> Vec<Frame> {
        match out.target {
            Target::Joined(joined) => {
                joined.pieces().iter().map(|piece| self.compose_piece(out, piece, call)).collect()
            }
            Target::One(_) | Target::Many(..) => vec![self.compose(out, call, 0)],
        }
    }

    /// Sends a message that somebody waits for. Returns the call, and how many bytes now wait for the slowest receiver.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call(&self, out: &Outgoing<'_>, stream: bool) -> Result<(Arc<Call>, usize), RuntimeError> {
        self.call_on(out, stream, Terms::default())
    }

    /// [`Runtime::call`] on these terms.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_on(&self, out: &Outgoing<'_>, stream: bool, terms: Terms) -> Result<(Arc<Call>, usize), RuntimeError> {
        self.usable()?;
        let call = self.open(out.target.clone(), stream)?;
        // Before it is sent: its first value may be here at once.
        call.limit_ahead(terms.ahead);
        let queued = self.send_out(&out.streamed(stream), call.id, |frame| terms.mark(frame));
        Ok((call, queued))
    }

    /// As [`Runtime::call_on`], but one reply answers for all: its receivers combine theirs on the way up.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_reduced(&self, out: &Outgoing<'_>, terms: Terms) -> Result<(Arc<Call>, usize), RuntimeError> {
        self.usable()?;
        let call = self.open(out.target.clone(), false)?;
        call.mark_reduced(out.target.clone(), out.actor);
        let queued = self.send_out(out, call.id, |frame| terms.mark(frame));
        Ok((call, queued))
    }

    /// Sends a message that nobody waits for. Returns how many bytes now wait for the slowest receiver.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell(&self, out: &Outgoing<'_>) -> Result<usize, RuntimeError> {
        self.tell_on(out, Terms::default())
    }

    /// [`Runtime::tell`] on these terms.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell_on(&self, out: &Outgoing<'_>, terms: Terms) -> Result<usize, RuntimeError> {
        self.usable()?;
        Ok(self.send_out(out, 0, |frame| terms.mark(frame)))
    }

    /// Answers a call.
    pub fn reply(&self, to: &Header, answer: Answer, payload: &[u8], buffers: &[&[u8]]) {
        self.reply_by(to, None, answer, Body::new(payload, buffers));
    }

    /// Answers a call, whose caller wants the answer until `due`. If too much waits here for callers that do not read,
    /// whoever answers is to take no other message until what is returned is finished.
    pub fn reply_by(
        &self,
        to: &Header,
        due: Option<Instant>,
        answer: Answer,
        body: Body<'_>,
    ) -> Option<Arc<Completion>> {
        if let Ok(spawn) = Spawn::read(to) {
            self.on_constructed(spawn.actor, answer.is_error());
        }
        let Asked { by, actor, call, place } = Asked::of(to)?;
        let header = Reply { actor, call, place, answer }.header(self.me, by);
        let frame = self.write(header, &Target::One(by), b"", body);
        if matches!(TaskCall::read(to), Ok(TaskCall { task: Some(_), .. })) {
            return self.answer_task(frame, due, actor);
        }
        self.answer(frame, due, holds_back(to.kind)).0
    }

    /// Answers a task. What its caller may not get, should this process die now, holds up what it sends ahead (TAK-2): a
    /// reply that waits here, and one that refers to memory of this process.
    fn answer_task(&self, frame: Frame, due: Option<Instant>, actor: ActorId) -> Option<Arc<Completion>> {
        let (by, shared) = (frame.header.dst, frame.header.sharing().shared || frame.header.is_distant());
        let (held, is_out) = self.answer(frame, due, holds_back(Kind::Call));
        if (shared || !is_out)
            && let Some(inbox) = self.inbox(actor)
        {
            for task in inbox.hold_up(by) {
                self.undeliverable(task.header(), Undelivered::NotBegun);
            }
        }
        held
    }

    /// The queue towards a receiver that is above its budget, if there is one.
    ///
    /// # Errors
    /// [`RuntimeError::Full`], naming it.
    pub fn admit(&self, target: &Target) -> Result<(), RuntimeError> {
        let budget = self.options.link_budget;
        if self.me.is_agent() && !target.is_on(self.me.host) {
            let queued = self.outstanding_to(&target.hosts());
            if queued > budget {
                let addr = target.place(0).unwrap_or(self.me);
                return Err(RuntimeError::Full { addr, queued, budget });
            }
        }
        for addr in target.procs() {
            if let Some(link) = self.link_of(addr) {
                let queued = link.queued();
                if queued > budget {
                    return Err(RuntimeError::Full { addr, queued, budget });
                }
            }
        }
        Ok(())
    }

    /// Bytes that may wait for one receiver before its senders do.
    pub fn link_budget(&self) -> usize {
        self.options.link_budget
    }

    /// Waits a moment for the queues towards `target` to be within budget; true once they are.
    pub fn wait_room(&self, target: &Target, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        if self.me.is_agent()
            && !target.is_on(self.me.host)
            && !self.wait_room_remote(&target.hosts(), self.options.link_budget, end)
        {
            return false;
        }
        target.procs().all(|addr| {
            self.link_of(addr).is_none_or(|link| {
                link.wait_room(self.options.link_budget, end.saturating_duration_since(Instant::now()))
            })
        })
    }

    /// The caller no longer waits: its receivers are told, so that they can stop working on it.
    pub fn cancel(&self, call: &Call, target: &Target, actor: ActorId) -> bool {
        if self.usable().is_err() || !self.calls.cancel(&self.reactor, call) {
            return false;
        }
        if self.take_back_call(call.id) {
            return true; // Its receivers have never heard of it.
        }
        let what = call.reduced().map_or(Cancelled::Call, |_| Cancelled::Combined);
        self.send_cancel(target, Cancel { actor, call: call.id, place: 0, what });
        true
    }

    /// Takes a task back. Its call goes on until its receiver has answered: that it has not begun, or what it would have said
    /// anyway; of a coroutine that was begun, where `begun` is to be ended too, that it was cancelled.
    pub fn take_back_task(&self, call: &Call, target: &Target, actor: ActorId, begun: bool) {
        if self.usable().is_err() || call.is_done() {
            return;
        }
        if self.take_back_call(call.id) {
            // Its receiver has never heard of it.
            let end = Undeliverable { call: call.id, place: 0, actor, why: Undelivered::NotBegun };
            let outcome = Outcome::Replied(Arc::new(Message::plain(end.frame(self.me, self.me))));
            self.calls.on_outcome(&self.reactor, call.id, 0, outcome);
            return;
        }
        let what = if begun { Cancelled::Task } else { Cancelled::Unbegun };
        self.send_cancel(target, Cancel { actor, call: call.id, place: 0, what });
    }

    pub(super) fn send_cancel(&self, target: &Target, cancel: Cancel) {
        let write = |target: &Target, cancel: Cancel| {
            let frame = self.write(cancel.header(self.me, self.aim(target)), target, b"", Body::default());
            self.dispatch(frame, None);
        };
        let Target::Joined(joined) = target else { return write(target, cancel) };
        for piece in joined.pieces() {
            let place = u32::try_from(piece.first).unwrap_or(u32::MAX);
            write(&piece.target, Cancel { actor: piece.actor_of(cancel.actor), place, ..cancel });
        }
    }

    /// Takes a frame one step on its way. Returns how many bytes wait behind it.
    pub(crate) fn dispatch(&self, frame: Frame, from: Option<LinkId>) -> usize {
        if frame.header.target_len == 0 {
            return self.dispatch_one(frame, from);
        }
        let up = read(&self.router).up();
        if let Some(up) = up {
            return self.cast_up(&frame, up);
        }
        let Ok(target) = frame.target() else { return 0 };
        let Target::Many(mesh, region, placement) = &target else { return 0 };
        let here = self.me.host;
        // A proc takes its own share of its casts itself.
        let taken = from.filter(|link| *link != GATEWAY).map(|_| frame.header.src);
        let mut most = 0;
        if from != Some(GATEWAY) && placement.only() != Some(here) {
            let mut hosts = placement.hosts_of(region);
            hosts.remove(here);
            most = self.send_remote(&frame, hosts);
        }
        let known = read(&self.router).local(*mesh);
        let on = placement.ranks_on(here, region.len());
        if placement.only() == Some(here) {
            if region.len() > known.map_or(MOST_UNKNOWN, |ranks| ranks.len()) {
                // No region of that mesh: nobody made this cast by the usual road, and nobody is to count through it.
                return 0;
            }
            for (nth, rank) in (0..=u32::MAX).zip(region) {
                let to = placement.addr(*mesh, rank);
                if Some(to) != taken {
                    most = most.max(self.dispatch_one(frame.for_one(to, nth), from));
                }
            }
        } else if on.len() <= MOST_UNKNOWN {
            let places = on.filter_map(|rank| Some((region.position(rank)?, placement.addr(*mesh, rank))));
            for (index, to) in places.filter(|(_, to)| Some(*to) != taken) {
                let nth = u32::try_from(index).unwrap_or(u32::MAX);
                most = most.max(self.dispatch_one(frame.for_one(to, nth), from));
            }
        }
        most
    }

    /// A proc's cast goes to its agent as a whole. The proc's own share, if it has one, is delivered here and now, as are
    /// single messages to its own actors: on the way up and back it would be overtaken by them (ORD-1).
    fn cast_up(&self, frame: &Frame, up: LinkId) -> usize {
        let Some(link) = self.link(up) else { return 0 };
        let target = if frame.header.dst.mesh == self.me.mesh { frame.target().ok() } else { None };
        let own = target.as_ref().and_then(|target| Some((target.index_of(self.me)?, target.len())));
        let Some((index, count)) = own else { return link.send(&self.reactor, frame).unwrap_or(0) };
        let share = frame.for_one(self.me, u32::try_from(index).unwrap_or(u32::MAX));
        if count == 1 {
            self.deliver(share);
            return 0;
        }
        // Nobody sees an effect of one half before the other half is on its way: what the receiver here sends is behind
        // the rest of the cast, which is written only after the receiver here has its share.
        let held = link.hold(&self.reactor);
        let queued = link.send(&self.reactor, frame);
        self.deliver(share);
        drop(held);
        queued.map_or(0, |_| link.queued())
    }

    fn dispatch_one(&self, mut frame: Frame, from: Option<LinkId>) -> usize {
        if self.gateway.is_active() {
            frame.header.set_abroad();
        }
        if from.is_some() && self.me.is_agent() && frame.header.dst.host == self.me.host {
            self.overhear(&frame.header);
        }
        let carries = frame.header.carries_refs() || frame.header.is_distant();
        if carries && self.me.is_agent() && frame.header.dst.host == self.me.host {
            self.note_carried(&frame);
        }
        let route = read(&self.router).route(frame.header.dst);
        match route {
            Route::Via(id) => self.link(id).and_then(|link| link.send(&self.reactor, &frame)).unwrap_or(0),
            Route::Remote(_) if from == Some(GATEWAY) => 0, // Not for here, and nobody relays at this level.
            Route::Remote(_) if matches!(frame.header.kind, Kind::Fetch | Kind::Held) && self.ask_for_copy(&frame) => 0,
            Route::Remote(host) => self.send_remote(&frame, HostSet::one(host)),
            Route::Here => {
                self.deliver(frame);
                0
            }
            Route::Gone(ended) => {
                self.bounce(&frame, Outcome::Lost(ended));
                0
            }
            Route::Unknown => {
                let unknown = read(&self.router).local(frame.header.dst.mesh).is_none();
                if unknown && self.gateway.is_active() {
                    self.await_procs(frame, from);
                } else {
                    self.refuse_unknown(&frame);
                }
                0
            }
        }
    }

    /// What the agent learns of a message that it relays. Before the route is looked up: a death in between is then told
    /// one way or the other.
    fn overhear(&self, header: &Header) {
        let to_watch = relate(&mut lock(&self.agent).family, header);
        self.watch_owners(to_watch);
    }

    /// Has this process told when procs end: at once, of those that have ended.
    pub fn watch_procs(&self, target: &Target) {
        let addrs: Vec<ProcAddr> = target.procs().collect();
        // Nobody but this process can tell it what has ended with a host.
        self.note_target(target);
        let mut unknown = Vec::new();
        for addr in addrs {
            let route = read(&self.router).route(addr);
            match route {
                Route::Gone(ended) => self.notice_down(addr, &ended, 0),
                _ => unknown.push(addr),
            }
        }
        self.watch_owners(unknown);
    }

    /// Has the agents of owners on other hosts tell of their ends.
    pub(crate) fn watch_owners(&self, owners: Vec<ProcAddr>) {
        for owner in owners {
            self.dispatch(Watch::of(owner).frame(self.me, ProcAddr::agent(owner.host)), None);
        }
    }

    /// A message cannot reach its receiver: whoever waits for an answer gets one at once.
    pub(crate) fn bounce(&self, frame: &Frame, outcome: Outcome) {
        let header = frame.header;
        if header.kind == Kind::Failure && header.dst.is_guest() && self.me == ProcAddr::CONTROLLER {
            // The script that owns it has left: the next one is told.
            self.notice(Message::new(frame.clone(), &self.memory));
            return;
        }
        if header.is_owed() {
            self.memory.let_go(frame);
        }
        if self.unread(frame) {
            return;
        }
        self.refuse(&frame.header);
        if Meaning::of(&header).is_ok_and(|said| said.is_for_port()) {
            self.refuse_post(&header, PortEnd::ReceiverEnded);
            return;
        }
        if matches!(header.kind, Kind::SpawnProcs | Kind::StopProcs) {
            if let Outcome::Lost(ended) = &outcome {
                self.agent_lost(frame, ended);
            }
            return;
        }
        if header.kind == Kind::Watch {
            if let Outcome::Lost(ended) = &outcome {
                self.unwatched(&header, ended);
            }
            return;
        }
        let Some(asked) = Asked::of(&header) else { return };
        if header.kind == Kind::Fetch && header.src == self.me && self.unasked(asked.call) {
            return;
        }
        if header.src == self.me {
            self.calls.on_outcome(&self.reactor, asked.call, asked.place as usize, outcome);
            self.forget_fallen();
            return;
        }
        if let Outcome::Lost(ended) = &outcome {
            self.tell_lost(&header, ended);
        }
    }

    /// Tells a sender that its receiver has ended: an answer to this message, not the one notice of that end.
    fn tell_lost(&self, header: &Header, ended: &Ended) {
        let down = Down::answer(header.dst, ended);
        self.dispatch(down.frame(ProcAddr::agent(header.dst.host), header.src), None);
    }

    /// A process cannot be watched any more. An agent that asks for its own sake hears of the end of a host anyway.
    fn unwatched(&self, header: &Header, ended: &Ended) {
        if !header.dst.is_agent() {
            self.tell_lost(header, ended);
        } else if !header.src.is_agent() || header.src == ProcAddr::CONTROLLER {
            let Watch { mesh, rank } = Watch::read(header);
            let whom = ProcAddr { mesh, rank, host: header.dst.host };
            self.dispatch(Down::notice(whom, ended).frame(header.dst, header.src), None);
        }
    }

    /// An order cannot reach the agent that it is for: each of the procs that it is about is lost to whoever gave it.
    fn agent_lost(&self, order: &Frame, ended: &Ended) {
        let header = order.header;
        let (Some(mesh), Some(ranks)) = (mesh_of(&header), ranks_of(order, MOST_PROCS)) else { return };
        for rank in ranks {
            let addr = ProcAddr { mesh, rank, host: header.dst.host };
            let down = Down::answer(addr, ended);
            self.dispatch(down.frame(ProcAddr::agent(header.dst.host), header.src), None);
        }
    }

    /// Tells a sender that the actor it meant is not (or no longer) there.
    pub(crate) fn undeliverable(&self, header: &Header, why: Undelivered) {
        if let Some(asked) = Asked::of(header) {
            self.dispatch(Undeliverable::answer(&asked, why).frame(self.me, asked.by), None);
        }
    }
}
