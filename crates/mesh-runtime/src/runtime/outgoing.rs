//! Messages out: what a call, a tell, a reply and a cancellation do with the parts of a runtime.

use super::Runtime;
use super::answers::{Sent, holds_back};
use crate::buffer::Buffer;
use crate::call::Call;
use crate::call::Outcome;
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::message::Message;
use crate::refs::Hold;
use mesh_proto::control::Undeliverable;
use mesh_proto::messages::{Answer, Asked, Call as TaskCall, Cancel, Cancelled, Reply, Request, Spawn};
use mesh_proto::{ActorId, CallId, Carried, Frame, Header, Kind, MESSAGE_COST, Piece, ProcAddr, Target, Undelivered};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The contents of a message.
#[derive(Clone, Copy, Debug, Default)]
pub struct Body<'a> {
    /// The envelope.
    pub payload: &'a [u8],
    /// Out-of-band buffers.
    pub buffers: &'a [&'a [u8]],
    /// How many of them, in turn, are laid side by side and become one part; empty if each is a part.
    pub joined: &'a [usize],
    /// The holds on the values that it references; none if it has no references.
    pub refs: Option<&'a [Arc<Hold>]>,
}

impl<'a> Body<'a> {
    /// Contents without references.
    pub fn new(payload: &'a [u8], buffers: &'a [&'a [u8]]) -> Self {
        Self { payload, buffers, joined: &[], refs: None }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        let refs = self.refs.map_or(0, |refs| Carried::size(refs.len()));
        self.payload.len() + refs + self.parts().map(Buffer::len).sum::<usize>()
    }

    /// What becomes its out-of-band parts.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Buffer<'a>> + Clone {
        let (buffers, joined) = (self.buffers, self.joined);
        let mut from = 0;
        let count = if joined.is_empty() { buffers.len() } else { joined.len() };
        (0..count).map(move |i| {
            let to = from + joined.get(i).copied().unwrap_or(1);
            let pieces = &buffers[from..to];
            from = to;
            Buffer::of(pieces)
        })
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A message on its way out.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Its purpose.
    pub request: Request,
    /// Its receivers.
    pub target: &'a Target,
    /// The actor there.
    pub actor: ActorId,
    /// The endpoint.
    pub name: &'a [u8],
    /// Its contents.
    pub body: Body<'a>,
}

impl Outgoing<'_> {
    /// What the message costs of its receivers' budgets; the same as its frame (`Frame::cost`).
    pub fn cost(&self) -> u64 {
        MESSAGE_COST + (self.name.len() + self.body.len()) as u64
    }

    /// The same message, marked if it is a call whose caller takes any number of values.
    pub(super) fn streamed(self, stream: bool) -> Self {
        match self.request {
            Request::Call { task, .. } if stream => Self { request: Request::Call { stream, task }, ..self },
            _ => self,
        }
    }
}

/// The terms on which a message is sent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// It was counted ([`Runtime::admit_all`]), and its bytes must be given back.
    pub charged: bool,
    /// Nobody wants the answer after this many milliseconds; 0 for no limit.
    pub deadline_ms: u32,
    /// How many bytes the senders of its stream may be ahead of its reader; 0 for the process's default.
    pub ahead: u64,
}

impl Terms {
    pub(super) fn mark(self, mut frame: Frame) -> Frame {
        frame.header.set_charged(self.charged);
        frame.header.set_deadline_ms(self.deadline_ms);
        frame
    }
}

impl Runtime {
    /// The receiver named in a message's header.
    pub(super) fn aim(&self, target: &Target) -> ProcAddr {
        match target {
            Target::One(addr) => *addr,
            // The region says which. The header only names the mesh, and no host.
            Target::Many(mesh, ..) => ProcAddr { mesh: *mesh, rank: 0, host: 0 },
            // Each piece is composed separately.
            Target::Joined(_) => self.me,
        }
    }

    /// Composes a message; `place` is that of its first receiver in the whole target.
    fn compose(&self, out: &Outgoing<'_>, call: CallId, place: u32) -> Frame {
        let header = out.request.header(out.actor, call, place, self.me, self.aim(out.target));
        self.write(header, out.target, out.name, out.body)
    }

    /// Writes a message. The values that it refers to are given to its receivers.
    pub(super) fn write(&self, header: Header, target: &Target, name: &[u8], body: Body<'_>) -> Frame {
        let cast = match target {
            Target::One(_) | Target::Joined(_) => None,
            many @ Target::Many(..) => Some(many),
        };
        self.write_as(header, target, cast, name, body)
    }

    /// The same; `cast` is what the frame says of its receivers.
    fn write_as(
        &self,
        mut header: Header,
        target: &Target,
        cast: Option<&Target>,
        name: &[u8],
        body: Body<'_>,
    ) -> Frame {
        if let Some(refs) = body.refs {
            header.set_carries_refs();
            let payload = Carried::append(body.payload, &self.refs.give(refs, target, self));
            return self.write_as(header, target, cast, name, Body { payload: &payload, refs: None, ..body });
        }
        if body.buffers.is_empty() {
            return Frame::build_plain(header, cast, name, body.payload);
        }
        let distant = self.carry_past(header.kind, target, &body);
        header.set_distant(distant.is_some());
        let (parts, sharing) = self.packing.pack(target, body.payload, body.parts(), distant.unwrap_or_default());
        header.set_sharing(sharing);
        Frame::build(header, cast, name, &parts)
    }

    /// Composes and sends a message: for joined receivers, one for each piece. Returns how many bytes now wait for the
    /// slowest receiver.
    fn send_out(&self, out: &Outgoing<'_>, call: CallId, mark: impl Fn(Frame) -> Frame) -> usize {
        let joined = match out.target {
            Target::Joined(joined) => joined,
            Target::Many(mesh, region, placement) if self.me.is_agent() && placement.only() == Some(self.me.host) => {
                let header = out.request.header(out.actor, call, 0, self.me, self.aim(out.target));
                let frame = mark(self.write_as(header, out.target, None, out.name, out.body));
                return self.switch.cast_here(self, &frame, *mesh, (region, placement));
            }
            _ => return self.dispatch(mark(self.compose(out, call, 0)), None),
        };
        let frames = joined.pieces().iter().map(|piece| mark(self.compose_piece(out, piece, call)));
        frames.map(|frame| self.dispatch(frame, None)).max().unwrap_or(0)
    }

    fn compose_piece(&self, out: &Outgoing<'_>, piece: &Piece, call: CallId) -> Frame {
        let actor = piece.actor_of(out.actor);
        let first = u32::try_from(piece.first).unwrap_or(u32::MAX);
        self.compose(&Outgoing { target: &piece.target, actor, ..*out }, call, first)
    }

    /// The frames of a message: one, or for joined receivers one per piece.
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
        // Before it is sent, because its first value may arrive at once.
        call.limit_ahead(terms.ahead);
        let queued = self.send_out(&out.streamed(stream), call.id, |frame| terms.mark(frame));
        Ok((call, queued))
    }

    /// Like [`Runtime::call_on`], but one reply answers for all: the receivers combine theirs on the way up.
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

    /// Answers a call whose caller wants the answer until `due`. If too much waits here for callers that do not read,
    /// the actor must take no other message until the returned completion finishes.
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
        self.answering.send(self, frame, due, holds_back(to.kind)).full
    }

    /// Answers a task. If the caller would not get the reply if this process died now, because it waits here or refers
    /// to memory of this process, it holds up the tasks that the caller has sent ahead (TAK-2).
    fn answer_task(&self, frame: Frame, due: Option<Instant>, actor: ActorId) -> Option<Arc<Completion>> {
        let (by, shared) = (frame.header.dst, frame.header.sharing().shared || frame.header.is_distant());
        let Sent { is_out, full } = self.answering.send(self, frame, due, holds_back(Kind::Call));
        if (shared || !is_out)
            && let Some(inbox) = self.inbox(actor)
        {
            for task in inbox.hold_up(&self.reactor, by) {
                self.undeliverable(task.header(), Undelivered::NotBegun);
            }
        }
        full
    }

    /// Whether the queues on the way to all of these are within budget.
    ///
    /// # Errors
    /// [`RuntimeError::Full`], naming a receiver behind a queue that is not.
    pub fn admit(&self, target: &Target) -> Result<(), RuntimeError> {
        let budget = self.options.link_budget;
        if self.me.is_agent() && !target.is_on(self.me.host) {
            let queued = self.gateway.outstanding_to(&target.hosts());
            if queued > budget {
                let addr = target.place(0).unwrap_or(self.me);
                return Err(RuntimeError::Full { addr, queued, budget });
            }
        }
        for addr in target.procs() {
            if let Some(link) = self.switch.link_of(addr) {
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

    /// Waits a moment for the queues towards `target` to be within budget. Returns whether they are.
    pub fn wait_room(&self, target: &Target, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        if self.me.is_agent()
            && !target.is_on(self.me.host)
            && !self.gateway.wait_for_room(&target.hosts(), self.options.link_budget, end)
        {
            return false;
        }
        target.procs().all(|addr| {
            self.switch.link_of(addr).is_none_or(|link| {
                link.wait_room(self.options.link_budget, end.saturating_duration_since(Instant::now()))
            })
        })
    }

    /// Cancels a call, and tells its receivers so that they can stop working on it.
    pub fn cancel(&self, call: &Call, target: &Target, actor: ActorId) -> bool {
        if self.usable().is_err() || !self.calls.cancel(&self.reactor, call) {
            return false;
        }
        if self.deferred.take_back_call(self, call.id) {
            return true; // It was never sent.
        }
        let what = call.reduced().map_or(Cancelled::Call, |_| Cancelled::Combined);
        self.send_cancel(target, Cancel { actor, call: call.id, place: 0, what });
        true
    }

    /// Takes a task back. Its call continues until its receiver has answered: that the task has not begun, or its
    /// result. With `begun`, a coroutine that has begun is ended too, and its answer is that it was cancelled.
    pub fn take_back_task(&self, call: &Call, target: &Target, actor: ActorId, begun: bool) {
        if self.usable().is_err() || call.is_done() {
            return;
        }
        if self.deferred.take_back_call(self, call.id) {
            // It was never sent.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_buffers_become_one_part_each_and_count_with_what_lies_between() {
        let buffers: [&[u8]; 5] = [b"alone", b"a", b"bc", b"def", b"last"];
        let parts = |joined: &[usize]| -> Vec<Vec<u8>> {
            let body = Body { payload: b"envelope", buffers: &buffers, joined, refs: None };
            assert_eq!(body.len(), 8 + body.parts().map(Buffer::len).sum::<usize>());
            body.parts().map(|part| part.to_bytes().to_vec()).collect()
        };
        assert_eq!(parts(&[]), buffers.map(<[u8]>::to_vec));
        let found = parts(&[1, 3, 1]);
        assert_eq!((&found[0][..], &found[2][..]), (&b"alone"[..], &b"last"[..]));
        assert_eq!(
            (found[1].len(), found[1][0], &found[1][64..66], &found[1][128..]),
            (131, b'a', &b"bc"[..], &b"def"[..])
        );
    }
}
