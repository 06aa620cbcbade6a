//! Messages in: what each kind of message for this process does, from a link or from this process itself.

use super::Runtime;
use crate::call::Outcome;
use crate::gauge::Gauge;
use crate::inbox::{Inbox, Put};
use crate::link::{Link, ReadEnd};
use crate::message::Message;
use crate::meter::MailboxCredits;
use mesh_proto::control::{Down, Undeliverable};
use mesh_proto::messages::{Cancel, Cancelled, Meaning, ProcUp, Spawn, SpawnPart, Tell};
use mesh_proto::{ActorId, EndReason, Ended, Event, Exit, Frame, PortEnd, ProcAddr, Undelivered};
use std::sync::Arc;

/// The id of the actor that spawns a job's singletons; known to every process.
const REGISTRY: ActorId = 1;
/// Shorter replies take hardly more memory than the caller's open calls.
const LARGE_REPLY: u64 = 4096;

impl Runtime {
    /// An outcome of a call of this process.
    pub(super) fn on_answer(&self, said: Meaning, frame: Frame) {
        let header = frame.header;
        if header.name_len != 0
            && let Some(up) = ProcUp::read(&frame)
        {
            self.remote_spawns.on_up(up.proc, up.pid);
        }
        let mut reply = self.inboxes.message(frame);
        if header.is_charged() {
            self.charge_stream(&mut reply);
        }
        if reply.is_torn() {
            return; // The notice of its sender's end follows, and is the answer.
        }
        let is_large = header.body_len >= LARGE_REPLY || header.sharing().shared;
        if is_large && !said.is_for_port() && !reply.stock(&self.held_replies, self.options.reply_budget) {
            return self.drop_reply(&reply);
        }
        let reply = Arc::new(reply);
        let failed = !matches!(said, Meaning::Reply(reply) if !reply.answer.is_error());
        if !self.calls.offer(&self.reactor, said.call(), said.place() as usize, Outcome::Replied(reply)) {
            if said.is_for_port() {
                self.refuse_post(&header, PortEnd::CallerGone);
            }
        } else if failed {
            self.forget_fallen();
        }
    }

    /// A message for an actor of this process.
    pub(super) fn on_message(&self, said: Meaning, frame: Frame) {
        let header = frame.header;
        let actor = said.actor();
        let inbox = self.inbox(actor);
        let message = self.inboxes.message(frame);
        let refused = match inbox.or_else(|| self.reserved(actor)) {
            Some(inbox) => match inbox.put(&self.reactor, message, false) {
                Put::Done => false,
                Put::Closed => true,
                Put::NotAhead => return self.undeliverable(&header, Undelivered::NotBegun),
            },
            None => !self.inboxes.wait_for(actor, message, self.started.elapsed()),
        };
        if refused {
            self.refuse(&header);
            self.undeliverable(&header, Undelivered::NoActor);
        } else if let Meaning::StopActor(stop) = said {
            self.inboxes.announce_stop(actor);
            if self.announced.is_orphan(stop, header.src)
                && let Some(inbox) = self.inbox(actor)
            {
                self.close_inbox(&inbox);
            }
        }
    }

    /// Begins a spawn. From now on the actor has an inbox.
    pub(super) fn on_spawn(&self, spawn: Spawn, frame: Frame) {
        // A living actor keeps its inbox: a second spawn makes no other actor.
        if self.inbox(spawn.actor).is_none_or(|inbox| inbox.is_free()) {
            let gauge = Gauge::new(Some((&frame, spawn)));
            let mailbox = MailboxCredits::new(spawn.actor, self.options.mailbox_budget, Some(self.weak()));
            self.inboxes.open(Inbox::of(mailbox, gauge));
        }
        match spawn.part {
            SpawnPart::Whole => {}
            SpawnPart::Announced => return self.announced.add(spawn.actor, frame.header.src),
            SpawnPart::Arguments => self.announced.complete(spawn.actor),
        }
        self.inboxes.tell_system(frame);
    }

    /// A caller no longer waits, or takes a task back.
    pub(super) fn on_cancel(&self, cancel: Cancel, frame: Frame) {
        let src = frame.header.src;
        if !cancel.what.is_answered() {
            self.answering.cancel(self, src, cancel.call);
            return self.inboxes.tell_system(frame);
        }
        match self.inbox(cancel.actor).and_then(|inbox| inbox.take_back(&self.reactor, src, cancel.call)) {
            Some(task) => self.undeliverable(task.header(), Undelivered::NotBegun),
            None if cancel.what == Cancelled::Unbegun => {}
            None => self.inboxes.tell_system(frame),
        }
    }

    /// A process has ended, as its agent reports.
    pub(super) fn on_down(&self, frame: &Frame) {
        let Some(Down { who: addr, ended, answer, .. }) = Down::read(frame) else { return };
        self.switch.direct.lose(addr);
        self.ended.note(addr);
        if self.me.is_agent() {
            self.agent.owner_died(self, addr);
        }
        self.remote_spawns.on_down(addr);
        self.note_death(addr, &ended);
        let ended = Arc::new(ended);
        self.forget_debts(addr, &ended);
        let lost = self.lose_proc(addr, &ended);
        if !answer {
            self.remote_meshes.ended(addr);
            self.notice_down(addr, &ended, lost);
        }
    }

    /// A process has ended: it holds nothing of this one any more, and nothing waits for it.
    pub(crate) fn forget_debts(&self, addr: ProcAddr, ended: &Ended) {
        self.meters.end(|at| at == addr);
        self.answers_end(|at| at == addr);
        self.memory.on_death(addr, ended.pid);
    }

    /// A process has ended: what this one had there is lost. Returns how many of its calls are.
    pub(crate) fn lose_proc(&self, addr: ProcAddr, ended: &Arc<Ended>) -> usize {
        let lost = self.calls.on_down(&self.reactor, addr, ended);
        self.forget_fallen();
        self.ports.on_down(addr);
        self.refs_end(|one| one == addr, ended);
        lost
    }

    /// A reply is too large for what this process may still hold: its call fails instead.
    #[cold]
    fn drop_reply(&self, reply: &Message) {
        let said = reply.meaning();
        let (call, place) = (said.call(), said.place());
        let end = Undeliverable { call, place, actor: said.actor(), why: Undelivered::NoRoom(reply.bytes()) };
        let message = Message::new(end.frame(reply.header().src, self.me), &self.memory);
        self.calls.on_outcome(&self.reactor, call, place as usize, Outcome::Replied(Arc::new(message)));
        self.forget_fallen();
    }

    /// Takes what has come by a link. `polled`: because a poll has reported it.
    pub(crate) fn read_link(&self, link: &Arc<Link>, polled: bool) {
        let agent = self.me.is_agent();
        // Of the first one, the poll has something to say (LOG-9).
        let mut quiet = polled && agent && self.logs.get().is_some_and(|logs| logs.pipe_watch().is_quiet());
        let end = link.read(|mut frame| {
            if agent {
                frame.header.set_quiet(std::mem::take(&mut quiet));
                // A proc speaks only for itself.
                if frame.header.src != link.peer {
                    return;
                }
            }
            if frame.header.is_abroad() {
                self.inboxes.expect_early();
            }
            self.dispatch(frame, Some(link.id));
        });
        match end {
            ReadEnd::Drained => {}
            ReadEnd::HasPage => self.read_in_order(),
            ReadEnd::Closed(why) => self.link_ended(link, why),
        }
    }

    /// A link to or from an agent has ended.
    pub(super) fn link_ended(&self, link: &Arc<Link>, why: EndReason) {
        link.close(&self.reactor);
        if self.me.is_agent() {
            self.on_proc(link.peer, Event::LinkClosed(why));
            if link.peer.is_guest() {
                // Nobody reaps a guest for this process, which only knows that the link has ended.
                self.on_proc(link.peer, Event::Exited(Exit::Unknown));
            }
        } else if self.me.is_guest() {
            self.lose_job();
        } else if !self.standing.is_over() {
            // The agent is gone. A worker never outlives it, whatever its own code is doing.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }

    /// The inbox of an actor of the controller that is made when it is first called.
    fn reserved(&self, actor: ActorId) -> Option<Arc<Inbox>> {
        if actor != REGISTRY || self.me != ProcAddr::CONTROLLER || self.standing.is_over() {
            return None;
        }
        let inbox = self.inboxes.of_or(actor, || Arc::new(Inbox::new(actor, Gauge::new(None))));
        let header = Tell { actor, place: 0 }.header(self.me, self.me);
        self.inboxes.notice(Frame::build(header, None, b"", &[]));
        Some(inbox)
    }

    // Notices.

    /// Notifies this process, which may own the proc, of an end that made `lost` calls of this process fail.
    pub(crate) fn notice_down(&self, addr: ProcAddr, ended: &Ended, lost: usize) {
        let down = Down { calls: lost as u64, ..Down::notice(addr, ended) };
        // As its own agent would report it: the host is the sender's.
        self.inboxes.notice(down.frame(ProcAddr::agent(addr.host), self.me));
    }

    /// The inbox of notices for owners in this process.
    pub fn notices(&self) -> Arc<Inbox> {
        Arc::clone(&self.inboxes.notices)
    }

    // Inboxes.

    /// The inbox of the process itself: spawns, stops, cancellations.
    pub fn system_inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inboxes.system)
    }

    /// An actor's inbox.
    pub fn inbox(&self, actor: ActorId) -> Option<Arc<Inbox>> {
        self.inboxes.of(actor)
    }

    /// Closes an actor's inbox. What still waits there goes back to its senders.
    pub fn close_inbox(&self, inbox: &Arc<Inbox>) {
        let Some(left) = self.inboxes.close(inbox) else { return };
        self.note_actor("actor_stopped", inbox, false);
        for message in left {
            self.undeliverable(message.header(), Undelivered::ActorStopped);
        }
    }

    /// Puts a stop behind what waits in an inbox, without a message to anyone.
    pub fn finish_inbox(&self, inbox: &Inbox) {
        self.inboxes.finish(inbox);
    }

    /// Puts an empty notice of a failure before what waits in an inbox, so that its actor looks.
    pub fn nudge_inbox(&self, inbox: &Inbox) {
        self.inboxes.nudge(inbox);
    }
}
