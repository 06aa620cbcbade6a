//! The inboxes of a process: its own, and one for each of its actors.
//!
//! There are several paths between hosts, and between the procs of one, so a message may overtake the spawn of the actor that it is for: it waits
//! here. The code that opens the inbox hands it over under the lock under which it was put aside (ERL-1).

use super::early::{MOST_BYTES, WITHIN};
use crate::inbox::Inbox;
use crate::locks::{lock, read, write};
use crate::message::Message;
use crate::reactor::Reactor;
use crate::shm::Memory;
use mesh_proto::messages::{Failure, StopActor};
use mesh_proto::{ActorId, Early, Frame, Header, ProcAddr};
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub(crate) struct Inboxes {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    memory: Arc<Memory>,
    /// Spawns, stops, cancellations: for the event loop of this process.
    pub(super) system: Arc<Inbox>,
    /// At a script: deaths and failures, for the owners of what they are about.
    pub(super) notices: Arc<Inbox>,
    actors: RwLock<FxHashMap<ActorId, Arc<Inbox>>>,
    early: Mutex<Early<ActorId, Message>>,
    /// The job has had other hosts, or this process direct links: messages may overtake spawns.
    abroad: AtomicBool,
}

impl Inboxes {
    pub(super) fn new(
        me: ProcAddr,
        reactor: &Arc<Reactor>,
        memory: &Arc<Memory>,
        (system, notices): (Arc<Inbox>, Arc<Inbox>),
    ) -> Self {
        Self {
            me,
            reactor: Arc::clone(reactor),
            memory: Arc::clone(memory),
            system,
            notices,
            actors: RwLock::default(),
            early: Mutex::new(Early::new(WITHIN, MOST_BYTES)),
            abroad: AtomicBool::new(false),
        }
    }

    /// A frame as its receiver holds it.
    pub(super) fn message(&self, frame: Frame) -> Message {
        Message::new(frame, &self.memory)
    }

    fn word(&self, header: Header) -> Message {
        self.message(Frame::build(header, None, b"", &[]))
    }

    // The process itself.

    /// The inbox that counts the messages of extensions.
    pub(super) fn own(&self) -> &Arc<Inbox> {
        if self.me.is_script() { &self.notices } else { &self.system }
    }

    /// Sends a frame to the event loop of this process.
    pub(crate) fn tell_system(&self, frame: Frame) {
        self.system.push(&self.reactor, self.message(frame));
    }

    /// For the process itself: for a worker's event loop, or whatever takes a script's notices.
    pub(super) fn notice(&self, frame: Frame) {
        let message = self.message(frame);
        if self.me.is_script() || !self.me.is_agent() {
            self.own().push(&self.reactor, message);
        }
    }

    // Actors.

    /// An actor's inbox.
    pub(crate) fn of(&self, actor: ActorId) -> Option<Arc<Inbox>> {
        read(&self.actors).get(&actor).cloned()
    }

    /// An actor's inbox, made by `make` if there is none.
    pub(super) fn of_or(&self, actor: ActorId, make: impl FnOnce() -> Arc<Inbox>) -> Arc<Inbox> {
        Arc::clone(write(&self.actors).entry(actor).or_insert_with(make))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Inbox>> {
        read(&self.actors).values().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        read(&self.actors).len()
    }

    /// Opens the inbox of an actor that is about to be made, with what waited for it.
    pub(super) fn open(&self, inbox: Inbox) {
        let inbox = Arc::new(inbox);
        let mut early = lock(&self.early);
        for message in early.come(inbox.actor) {
            inbox.push(&self.reactor, message);
        }
        write(&self.actors).insert(inbox.actor, Arc::clone(&inbox));
    }

    /// Closes an actor's inbox. Returns what still waits there; none if it was closed already.
    pub(super) fn close(&self, inbox: &Arc<Inbox>) -> Option<Vec<Message>> {
        {
            let mut actors = write(&self.actors);
            // An actor that was made again has a new one by now.
            if actors.get(&inbox.actor).is_some_and(|one| Arc::ptr_eq(one, inbox)) {
                actors.remove(&inbox.actor);
            }
        }
        (!inbox.is_closed()).then(|| inbox.close(&self.reactor))
    }

    /// From now on messages to this process may overtake spawns.
    pub(super) fn expect_early(&self) {
        self.abroad.store(true, Ordering::Relaxed);
    }

    /// Keeps a message for an actor that is not here. False if it must not wait either.
    pub(super) fn wait_for(&self, actor: ActorId, message: Message, now: Duration) -> bool {
        let header = *message.header();
        // In a job of one host nothing comes before its spawn, without direct links.
        let abroad = header.is_abroad() || self.abroad.load(Ordering::Relaxed);
        if self.me.host == 0 && header.src.host == 0 && !abroad {
            return false;
        }
        let kept = {
            let mut early = lock(&self.early);
            // It may have just appeared.
            match self.of(actor) {
                Some(inbox) => return inbox.push(&self.reactor, message),
                None => early.keep(actor, message, header.body_len as usize, header.deadline(), now),
            }
        };
        self.reactor.ring_io();
        kept.is_ok()
    }

    /// Returns what has waited long enough, and when that is next the case.
    pub(super) fn turn(&self, now: Duration) -> (Vec<Message>, Option<Duration>) {
        let mut early = lock(&self.early);
        (early.on_tick(now), early.next_deadline())
    }

    /// Puts a stop behind what waits in an inbox, without a message to anyone.
    pub(super) fn finish(&self, inbox: &Inbox) {
        // A closed inbox has ended already.
        if inbox.push(&self.reactor, self.word(StopActor::of(inbox.actor).header(self.me, self.me))) {
            self.announce_stop(inbox.actor);
        }
    }

    /// Tells the process itself that a stop waits in an actor's inbox: the actor may never come to it.
    pub(super) fn announce_stop(&self, actor: ActorId) {
        self.system.push(&self.reactor, self.word(StopActor::of(actor).header(self.me, self.me)));
    }

    /// Puts an empty notice of a failure before what waits in an inbox, so that its actor looks.
    pub(super) fn nudge(&self, inbox: &Inbox) {
        inbox.push_first(&self.reactor, self.word(Failure { owner: inbox.actor }.header(self.me, self.me)));
    }
}
