//! Messages in: from a link or from this very process, to whoever they are for.

use super::{Runtime, lock, read, write};
use crate::agent;
use crate::calls::Outcome;
use crate::inbox::Inbox;
use crate::link::{Link, ReadEnd};
use crate::message::Message;
use crate::meter::Mailbox;
use mesh_proto::{ActorId, Credit, Ended, Event, Exit, Frame, Header, Kind, LinkId, ProcAddr, flags};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

impl Runtime {
    pub(super) fn deliver(&self, frame: Frame, from: Option<LinkId>) {
        let header = frame.header;
        match header.kind {
            Kind::Reply | Kind::Undeliverable => {
                let index = header.index as usize;
                let reply = Arc::new(Message::new(frame, &self.memory));
                if reply.is_torn() {
                    return; // The notice of its sender's end follows, and is the answer.
                }
                self.calls.on_outcome(&self.reactor, header.call, index, Outcome::Replied(reply));
            }
            Kind::Call | Kind::Tell | Kind::StopActor => {
                let inbox = read(&self.inboxes).get(&header.actor).cloned();
                let message = Message::new(frame, &self.memory);
                let refused = match inbox {
                    Some(inbox) => !inbox.push(&self.reactor, message),
                    None => true,
                };
                if refused {
                    self.refuse(&header);
                    self.undeliverable(&header, "the actor has stopped, or was never spawned there");
                }
            }
            Kind::Spawn => {
                let mailbox = Mailbox::new(header.actor, self.options.mailbox_budget, Weak::clone(&self.this));
                write(&self.inboxes).insert(header.actor, Arc::new(Inbox::of(mailbox)));
                self.system.push(&self.reactor, Message::new(frame, &self.memory));
            }
            Kind::StopProc | Kind::Cancel => {
                self.system.push(&self.reactor, Message::new(frame, &self.memory));
            }
            Kind::Credit => {
                if header.flags & flags::QUESTION == 0 {
                    self.meters.on_credit(&self.reactor, header.src, header.actor, Credit::read(&header));
                } else if let Some(inbox) = self.inbox(header.actor) {
                    inbox.mailbox().on_question(header.src);
                } else {
                    self.dispatch(Credit::LAST.frame(header.actor, self.me, header.src), None);
                }
            }
            Kind::Down => {
                if let Some((addr, ended)) = agent::read_down(&frame) {
                    self.meters.end(&self.reactor, Some(addr));
                    self.memory.on_death(addr, ended.pid);
                    self.calls.on_down(&self.reactor, addr, &Arc::new(ended));
                }
            }
            Kind::SpawnProcs => {
                let Some((mesh, n, spec)) = agent::request::decode(&frame) else { return };
                if let Some(from) = from {
                    lock(&self.agent).interest(mesh, from);
                }
                if let Err(error) = self.make_procs(mesh, n, &spec, (header.src, header.call)) {
                    let ended = Ended { pid: None, exit: Exit::Unknown, orderly: false, reason: error.to_string() };
                    for rank in 0..n {
                        let frame = agent::down_frame(self.me, header.src, ProcAddr { mesh, rank }, &ended);
                        self.dispatch(frame, None);
                    }
                }
            }
            Kind::StopProcs => {
                if let Some(from) = from {
                    lock(&self.agent).interest(header.actor, from);
                }
                self.end_procs(header.actor, Duration::from_millis(u64::from(header.index)));
            }
            Kind::Hello => self.on_proc(header.src, Event::Hello),
            Kind::Goodbye => {
                self.on_proc(header.src, Event::Goodbye);
                if let Some(link) = self.link_of(header.src) {
                    link.hang_up();
                }
            }
            Kind::Gathered => {}
        }
    }

    pub(crate) fn read_link(&self, link: &Arc<Link>) {
        let end = link.read(|frame| {
            // A proc speaks for itself only.
            if self.me == ProcAddr::CONTROLLER && frame.header.src != link.peer {
                return;
            }
            self.dispatch(frame, Some(link.id));
        });
        if let ReadEnd::Closed(why) = end {
            link.close(&self.reactor);
            if self.me == ProcAddr::CONTROLLER {
                self.on_proc(link.peer, Event::LinkClosed(why));
            } else if !self.closed.load(Ordering::SeqCst) {
                // The agent is gone: a worker never outlives it, whatever its own code is doing just now.
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        }
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
    pub fn close_inbox(&self, actor: ActorId) {
        let Some(inbox) = write(&self.inboxes).remove(&actor) else { return };
        for message in inbox.close(&self.reactor) {
            self.undeliverable(message.header(), "the actor stopped before it came to this message");
        }
    }

    /// Puts a stop behind what waits in an inbox; nobody hears of it.
    pub fn finish_inbox(&self, inbox: &Inbox) {
        let mut header = Header::new(Kind::StopActor, self.me, self.me);
        header.actor = inbox.actor;
        let stop = Message::new(Frame::build(header, None, b"", &[]), &self.memory);
        // A closed inbox has ended already.
        inbox.push(&self.reactor, stop);
    }
}
