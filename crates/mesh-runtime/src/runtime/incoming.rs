//! Messages in: from a link or from this very process, to whoever they are for.

use super::ports::STREAM;
use super::{Runtime, lock, read, write};
use crate::agent::SpawnSpec;
use crate::calls::Outcome;
use crate::gauge::Gauge;
use crate::inbox::{Inbox, Put};
use crate::link::{Link, ReadEnd};
use crate::message::Message;
use crate::meter::MailboxCredits;
use mesh_proto::control::{Down, Goodbye, Hello, SpawnProcs, StopProcs, Undeliverable, Watch, ranks_of};
use mesh_proto::messages::{Cancelled, Failure, Meaning, ProcUp, SpawnPart, StopActor, Tell};
use mesh_proto::{
    ActorId, Credit, EndReason, Ended, Event, Exit, Flow, Frame, Kind, MeshId, PortEnd, ProcAddr, Route, Undelivered,
};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// The id of the actor that spawns what a job has one of each; known to every process.
const REGISTRY: ActorId = 1;
/// Shorter replies take hardly more of the caller's memory than the calls that it has begun.
const LARGE_REPLY: u64 = 4096;
/// More than any mesh of procs has on one host; nobody is to count further through a number that came in a frame.
pub(super) const MOST_PROCS: u32 = 1 << 20;

impl Runtime {
    /// Takes in what has arrived; behind what its sender has sent before.
    pub(crate) fn deliver(&self, frame: Frame) {
        if self.landings.is_busy() || frame.header.is_distant() {
            self.land(frame);
        } else {
            self.take_in(frame);
        }
    }

    pub(super) fn take_in(&self, frame: Frame) {
        let header = frame.header;
        if self.is_outdated(header.src) {
            self.memory.let_go(&frame);
            return;
        }
        let Ok(said) = Meaning::read(&frame) else {
            // No process of Mesh has made it (MSG-1).
            self.memory.let_go(&frame);
            return;
        };
        match said {
            Meaning::Reply(_) | Meaning::Undeliverable(_) => {
                if header.name_len != 0
                    && let Some(up) = ProcUp::read(&frame)
                {
                    lock(&self.pids).insert(up.proc, up.pid);
                }
                let mut reply = Message::new(frame, &self.memory);
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
            Meaning::Post(post) => self.on_post(post, frame),
            Meaning::Control(Kind::Closed) => self.on_closed(&frame),
            Meaning::Control(Kind::Held) => self.on_held(&frame),
            Meaning::Control(Kind::Fetch) => self.on_fetch(&header),
            Meaning::Call(_) | Meaning::Tell(_) | Meaning::StopActor(_) => {
                let actor = said.actor();
                let inbox = read(&self.inboxes).get(&actor).cloned();
                let message = Message::new(frame, &self.memory);
                let inbox = inbox.or_else(|| self.reserved(actor));
                let refused = match inbox {
                    Some(inbox) => match inbox.put(&self.reactor, message, false) {
                        Put::Done => false,
                        Put::Closed => true,
                        Put::NotAhead => return self.undeliverable(&header, Undelivered::NotBegun),
                    },
                    None => !self.await_actor(actor, message),
                };
                if header.kind == Kind::StopActor && !refused {
                    self.announce_stop(actor);
                    if let Meaning::StopActor(stop) = said {
                        self.stop_announced(stop, header.src);
                    }
                }
                if refused {
                    self.refuse(&header);
                    self.undeliverable(&header, Undelivered::NoActor);
                }
            }
            Meaning::Spawn(spawn) => {
                // What is sent to one that lives is not to wait for one that will not be made.
                let before = read(&self.inboxes).get(&spawn.actor).cloned();
                if before.is_none_or(|inbox| inbox.is_free()) {
                    let gauge = Gauge::new(Some((&frame, spawn)));
                    let mailbox =
                        MailboxCredits::new(spawn.actor, self.options.mailbox_budget, Weak::clone(&self.this));
                    self.open_inbox(spawn.actor, &Arc::new(Inbox::of(mailbox, gauge)));
                }
                match spawn.part {
                    SpawnPart::Whole => {}
                    SpawnPart::Announced => return self.note_announced(spawn.actor, header.src),
                    SpawnPart::Arguments => self.note_arguments(spawn.actor),
                }
                self.system.push(&self.reactor, Message::new(frame, &self.memory));
            }
            Meaning::Cancel(cancel) if cancel.what.is_answered() => {
                let task = self.inbox(cancel.actor).and_then(|inbox| inbox.take_back(header.src, cancel.call));
                match task {
                    Some(task) => self.undeliverable(task.header(), Undelivered::NotBegun),
                    None if cancel.what == Cancelled::Unbegun => {}
                    None => {
                        self.system.push(&self.reactor, Message::new(frame, &self.memory));
                    }
                }
            }
            Meaning::Cancel(cancel) => {
                self.answer_unwanted(header.src, cancel.call);
                self.system.push(&self.reactor, Message::new(frame, &self.memory));
            }
            Meaning::Control(Kind::StopProc) | Meaning::Partial(_) => {
                self.system.push(&self.reactor, Message::new(frame, &self.memory));
            }
            Meaning::Credit(Flow::Asks(progress)) => {
                // What came before it has been read.
                self.dispatch(progress.answer(self.me, header.src), None);
            }
            Meaning::Credit(Flow::HasRead(progress)) => self.on_progress(progress, header.src),
            Meaning::Credit(Flow::ReaderEnded(_)) => self.answers_end(|addr| addr == header.src),
            Meaning::Credit(Flow::Credit { mailbox, credit }) => {
                self.meters.on_credit(&self.reactor, header.src, mailbox, credit);
            }
            Meaning::Credit(Flow::Question { mailbox }) => {
                if mailbox == 0 {
                    let own = if self.me.is_script() { &self.notices } else { &self.system };
                    own.mailbox().on_question(header.src);
                } else if let Some(inbox) = self.inbox(mailbox) {
                    inbox.mailbox().on_question(header.src);
                } else if let Some(inlet) = self.ports.inlet(mailbox) {
                    inlet.account.on_question(header.src);
                } else if let Some(account) = self.calls.known_account(mailbox & !STREAM) {
                    account.on_question(header.src);
                } else {
                    self.dispatch(Credit::LAST.frame(mailbox, self.me, header.src), None);
                }
            }
            Meaning::Control(Kind::Down) => {
                if let Some(Down { who: addr, ended, answer, .. }) = Down::read(&frame) {
                    self.note_ended(addr);
                    if self.me.is_agent() {
                        let aftermath = lock(&self.agent).family.died(addr);
                        self.end_orphans(aftermath.end);
                    }
                    self.meters.end(&self.reactor, Some(addr));
                    self.answers_end(|at| at == addr);
                    self.memory.on_death(addr, ended.pid);
                    lock(&self.pids).remove(&addr);
                    let ended = Arc::new(ended);
                    let lost = self.calls.on_down(&self.reactor, addr, &ended);
                    self.forget_fallen();
                    self.ports.on_down(addr);
                    self.refs_end(|one| one == addr, &ended);
                    if !answer {
                        lock(&self.remote_meshes).ended(addr);
                        self.notice_down(addr, &ended, lost);
                    }
                }
            }
            Meaning::Control(Kind::SpawnProcs) => {
                let (Some(order), Some(ranks)) = (SpawnProcs::read(&frame), ranks_of(&frame, u32::MAX)) else { return };
                let (mesh, call) = (order.mesh, order.call);
                let mut spec = SpawnSpec::ordered(order);
                // Where no interpreter is named, it is that of whatever host the procs are on.
                if spec.fork_server.argv.first().is_some_and(|program| program.is_empty()) {
                    self.settle_in(&mut spec.fork_server);
                }
                let made = match self.leaving() {
                    Some(ended) => Err(ended),
                    None => self
                        .make_procs(mesh, ranks.clone(), &spec, (header.src, call))
                        .map_err(|error| Arc::new(Ended::unmade(EndReason::NotMade(error.to_string())))),
                };
                if let Err(ended) = made {
                    for rank in ranks {
                        let who = ProcAddr { mesh, rank, host: self.me.host };
                        self.dispatch(Down::notice(who, &ended).frame(self.me, header.src), None);
                    }
                    self.procs_failed(mesh, &ended);
                }
            }
            Meaning::Control(Kind::StopProcs) => {
                let Some(StopProcs { mesh, within, ranks, .. }) = StopProcs::read(&frame) else { return };
                if mesh == 0 {
                    return self.on_release(header, within);
                }
                lock(&self.agent).family.asked(header.src, mesh);
                if let Some(here) = ranks_of(&frame, MOST_PROCS) {
                    self.tell_ended(header.src, mesh, here.filter(|rank| ranks.contains(*rank as usize)));
                }
                self.end_procs(mesh, Some(&ranks), within);
            }
            Meaning::Control(Kind::Hello) => self.on_hello(header.src, Hello::read(&header).pid),
            Meaning::Control(Kind::Goodbye) => {
                let Goodbye { reason } = Goodbye::read(&frame).unwrap_or_default();
                self.on_proc(header.src, Event::Goodbye(reason));
                if let Some(link) = self.link_of(header.src) {
                    link.hang_up();
                }
            }
            Meaning::Control(Kind::Watch) if self.me.is_agent() => {
                let Watch { mesh, rank } = Watch::read(&header);
                if mesh == 0 {
                    // The agent itself: a proc of its host asks about all that it has.
                    lock(&self.agent).family.listens(header.src);
                    return;
                }
                let whom = ProcAddr { mesh, rank, host: self.me.host };
                lock(&self.agent).family.asked(header.src, whom.mesh);
                let route = read(&self.router).route(whom);
                let gone = match route {
                    Route::Gone(ended) => ended,
                    Route::Unknown => Arc::new(Ended::unmade(EndReason::LongAgo)),
                    Route::Here | Route::Via(_) | Route::Remote(_) => return,
                };
                self.dispatch(Down::notice(whom, &gone).frame(self.me, header.src), None);
            }
            Meaning::Control(Kind::Watch) => {} // For its agent, which has seen it.
            Meaning::Extend(_) if self.me.is_agent() && self.me != ProcAddr::CONTROLLER => {
                self.refuse(&header);
                self.undeliverable(&header, Undelivered::NoExtensions);
            }
            Meaning::Failure(_) | Meaning::Extend(_) => self.notice(Message::new(frame, &self.memory)),
            Meaning::Control(Kind::Inspect) => self.on_inspect(&frame),
            Meaning::Control(Kind::Moved) => self.on_news(&frame),
            Meaning::Control(Kind::Lines) => self.on_lines(&frame),
            Meaning::Control(_) => self.on_gateway_frame(frame),
            // Taken apart where it arrives; and what a process tells itself does not come this way.
            Meaning::Gathered(_) | Meaning::Unseen(_) => {}
        }
    }

    /// A reply has come for which this process has no room: its call fails instead.
    #[cold]
    fn drop_reply(&self, reply: &Message) {
        let said = reply.meaning();
        let (call, place) = (said.call(), said.place());
        let end = Undeliverable { call, place, actor: said.actor(), why: Undelivered::NoRoom(reply.bytes()) };
        let message = Message::new(end.frame(reply.header().src, self.me), &self.memory);
        self.calls.on_outcome(&self.reactor, call, place as usize, Outcome::Replied(Arc::new(message)));
        self.forget_fallen();
    }

    pub(crate) fn read_link(&self, link: &Arc<Link>) {
        let end = link.read(|frame| {
            // A proc speaks for itself only.
            if self.me.is_agent() && frame.header.src != link.peer {
                return;
            }
            if frame.header.is_abroad() {
                self.abroad.store(true, Ordering::Relaxed);
            }
            self.dispatch(frame, Some(link.id));
        });
        if let ReadEnd::Closed(why) = end {
            link.close(&self.reactor);
            if self.me.is_agent() {
                self.on_proc(link.peer, Event::LinkClosed(why));
                if link.peer.is_guest() {
                    // Nobody reaps it for this process: the link's end is all that there is to know.
                    self.on_proc(link.peer, Event::Exited(Exit::Unknown));
                }
            } else if self.me.is_guest() {
                self.lose_job();
            } else if !self.closed.load(Ordering::SeqCst) {
                // The agent is gone: a worker never outlives it, whatever its own code is doing just now.
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        }
    }

    /// A proc's process, where that is known here.
    pub fn pid_of(&self, addr: ProcAddr) -> Option<u32> {
        if self.me.is_agent() && addr.host == self.me.host {
            // It knows which have ended.
            return self.pid_here(addr);
        }
        lock(&self.pids).get(&addr).copied()
    }

    /// The inbox of an actor of the controller's own that is made when it is first called.
    fn reserved(&self, actor: ActorId) -> Option<Arc<Inbox>> {
        if actor != REGISTRY || self.me != ProcAddr::CONTROLLER || self.closed.load(Ordering::SeqCst) {
            return None;
        }
        let inbox = Arc::clone(
            write(&self.inboxes).entry(actor).or_insert_with(|| Arc::new(Inbox::new(actor, Gauge::new(None)))),
        );
        let header = Tell { actor, place: 0 }.header(self.me, self.me);
        self.notice(Message::new(Frame::build(header, None, b"", &[]), &self.memory));
        Some(inbox)
    }

    /// Tells a proc which of these ranks of a mesh have ended already: it waits for the end of all.
    fn tell_ended(&self, to: ProcAddr, mesh: MeshId, ranks: impl Iterator<Item = u32>) {
        let long_ago = || Ended { orderly: true, ..Ended::unmade(EndReason::LongAgo) };
        for rank in ranks {
            let addr = ProcAddr { mesh, rank, host: self.me.host };
            let route = read(&self.router).route(addr);
            let ended = match route {
                Route::Gone(ended) => Some(ended),
                Route::Unknown => Some(Arc::new(long_ago())),
                Route::Here | Route::Via(_) | Route::Remote(_) => None,
            };
            if let Some(ended) = ended {
                self.dispatch(Down::answer(addr, &ended).frame(self.me, to), None);
            }
        }
    }

    // Notices.

    /// A proc that somebody here may own has ended, and with it `lost` calls of this process.
    pub(crate) fn notice_down(&self, addr: ProcAddr, ended: &Ended, lost: usize) {
        let down = Down { calls: lost as u64, ..Down::notice(addr, ended) };
        self.notice(Message::new(down.frame(self.me, self.me), &self.memory));
    }

    /// For the process itself: a worker's event loop hears of it, or whoever takes a controller's notices.
    pub(super) fn notice(&self, message: Message) {
        if self.me.is_script() {
            self.notices.push(&self.reactor, message);
        } else if !self.me.is_agent() {
            self.system.push(&self.reactor, message);
        }
    }

    /// What an owner at the controller has to hear of.
    pub fn notices(&self) -> Arc<Inbox> {
        Arc::clone(&self.notices)
    }

    // Inboxes.

    /// The inbox of the process itself: spawns, stops, cancellations.
    pub fn system_inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.system)
    }

    /// An actor's inbox.
    pub fn inbox(&self, actor: ActorId) -> Option<Arc<Inbox>> {
        read(&self.inboxes).get(&actor).cloned()
    }

    /// Closes an actor's inbox; what still waits there goes back to its senders.
    pub fn close_inbox(&self, inbox: &Arc<Inbox>) {
        {
            let mut inboxes = write(&self.inboxes);
            // An actor that was made again has another one by now.
            if inboxes.get(&inbox.actor).is_some_and(|one| Arc::ptr_eq(one, inbox)) {
                inboxes.remove(&inbox.actor);
            }
        }
        if inbox.is_closed() {
            return;
        }
        self.note_actor("actor_stopped", inbox, false);
        for message in inbox.close(&self.reactor) {
            self.undeliverable(message.header(), Undelivered::ActorStopped);
        }
    }

    /// Puts a stop behind what waits in an inbox; nobody hears of it.
    pub fn finish_inbox(&self, inbox: &Inbox) {
        let header = StopActor::of(inbox.actor).header(self.me, self.me);
        let stop = Message::new(Frame::build(header, None, b"", &[]), &self.memory);
        // A closed inbox has ended already.
        if inbox.push(&self.reactor, stop) {
            self.announce_stop(inbox.actor);
        }
    }

    /// Tells the process itself that a stop waits in an actor's inbox: the actor may never come to it.
    fn announce_stop(&self, actor: ActorId) {
        let header = StopActor::of(actor).header(self.me, self.me);
        self.system.push(&self.reactor, Message::new(Frame::build(header, None, b"", &[]), &self.memory));
    }

    /// Puts an empty notice of a failure before what waits in an inbox: there is something to see to.
    pub fn nudge_inbox(&self, inbox: &Inbox) {
        let header = Failure { owner: inbox.actor }.header(self.me, self.me);
        inbox.push_first(&self.reactor, Message::new(Frame::build(header, None, b"", &[]), &self.memory));
    }
}
