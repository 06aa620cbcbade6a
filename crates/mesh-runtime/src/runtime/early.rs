//! Messages that are quicker than the spawn that they depend on: between hosts there is more than one way.
//!
//! At an agent they wait for the mesh of procs that they are for, in a process for the actor. Whoever makes what they
//! wait for hands them over under the lock under which they were put aside, so that none is forgotten, and nothing that
//! comes later is before them (ERL-1).

use super::{Runtime, lock, read, write};
use crate::agent;
use crate::calls::Outcome;
use crate::inbox::Inbox;
use crate::link::Link;
use crate::message::Message;
use mesh_proto::{ActorId, Early, EndReason, Ended, Frame, Header, LinkId, MeshId, Undelivered};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a message waits for a spawn. Where that is on its way at all it comes within a few round trips, unless a
/// connection was lost meanwhile.
const WITHIN: Duration = Duration::from_secs(5);
/// Bytes that may wait so, in each process.
const MOST_BYTES: usize = 64 << 20;
/// Of so many meshes that could not be made the reason is known; of older ones, that they are not there.
const MOST_FAILED: usize = 64;

/// What waits, for procs and for actors.
#[derive(Debug)]
pub(super) struct Waiting {
    procs: Mutex<Early<MeshId, Frame>>,
    actors: Mutex<Early<ActorId, Message>>,
    /// Why procs could not be made, the oldest first: messages for them may be under way for a while.
    failed: Mutex<VecDeque<(MeshId, Arc<Ended>)>>,
}

impl Default for Waiting {
    fn default() -> Self {
        let (procs, actors) = (Early::new(WITHIN, MOST_BYTES), Early::new(WITHIN, MOST_BYTES));
        Self { procs: Mutex::new(procs), actors: Mutex::new(actors), failed: Mutex::default() }
    }
}

impl Runtime {
    /// A message has come for a mesh of procs that is not known here.
    pub(super) fn await_procs(&self, frame: Frame, from: Option<LinkId>) {
        let header = frame.header;
        let mesh = header.dst.mesh;
        let now = self.started.elapsed();
        let kept = {
            let mut procs = lock(&self.early.procs);
            // It may have come just now.
            let known = self.switch.local(mesh).is_some();
            match known {
                true => Err(None),
                false => {
                    procs.keep(mesh, frame.clone(), header.body_len as usize, header.deadline(), now).map_err(Some)
                }
            }
        };
        match kept {
            Ok(()) => self.reactor.ring_io(),
            Err(None) => {
                self.dispatch(frame, from);
            }
            Err(Some(frame)) => self.refuse_unknown(&frame),
        }
    }

    /// Makes these links the procs of a mesh, and gives them what has waited for them. Returns what it was about, and what
    /// was for ranks that are not among them.
    pub(crate) fn open_routes(&self, mesh: MeshId, base: u32, fresh: &[Arc<Link>]) -> (Vec<Header>, Vec<Frame>) {
        let mut procs = lock(&self.early.procs);
        let mut heard = Vec::new();
        let mut strays = Vec::new();
        for frame in procs.come(mesh) {
            let header = frame.header;
            match header.dst.rank.checked_sub(base).and_then(|at| fresh.get(at as usize)) {
                Some(link) => {
                    link.send(&self.reactor, &frame);
                    heard.push(header);
                }
                None => strays.push(frame),
            }
        }
        self.switch.add(mesh, base, fresh);
        (heard, strays)
    }

    /// These procs could not be made: nothing waits for them, and who has sent something hears why.
    pub(crate) fn procs_failed(&self, mesh: MeshId, ended: &Arc<Ended>) {
        {
            let mut failed = lock(&self.early.failed);
            if failed.len() == MOST_FAILED {
                failed.pop_front();
            }
            failed.push_back((mesh, Arc::clone(ended)));
        }
        let early = lock(&self.early.procs).come(mesh);
        early.iter().for_each(|frame| self.refuse_unknown(frame));
    }

    /// A message has come for an actor that is not here. False if it is not to wait either.
    pub(super) fn await_actor(&self, actor: ActorId, message: Message) -> bool {
        let header = *message.header();
        // In a job of one host nothing comes before its spawn.
        let abroad = header.is_abroad() || self.abroad.load(Ordering::Relaxed);
        if self.me.host == 0 && header.src.host == 0 && !abroad {
            return false;
        }
        let now = self.started.elapsed();
        let kept = {
            let mut actors = lock(&self.early.actors);
            // It may have come just now.
            let inbox = read(&self.inboxes).get(&actor).cloned();
            match inbox {
                Some(inbox) => return inbox.push(&self.reactor, message),
                None => actors.keep(actor, message, header.body_len as usize, header.deadline(), now),
            }
        };
        self.reactor.ring_io();
        kept.is_ok()
    }

    /// An actor is about to be made, and has what waited for it.
    pub(super) fn open_inbox(&self, actor: ActorId, inbox: &Arc<Inbox>) {
        let mut actors = lock(&self.early.actors);
        for message in actors.come(actor) {
            inbox.push(&self.reactor, message);
        }
        write(&self.inboxes).insert(actor, Arc::clone(inbox));
    }

    /// What has waited long enough goes back. Returns when that is next.
    pub(super) fn early_turn(&self) -> Option<Instant> {
        let now = self.started.elapsed();
        let (frames, first) = {
            let mut procs = lock(&self.early.procs);
            (procs.on_tick(now), procs.next_deadline())
        };
        let (messages, second) = {
            let mut actors = lock(&self.early.actors);
            (actors.on_tick(now), actors.next_deadline())
        };
        frames.iter().for_each(|frame| self.refuse_unknown(frame));
        for message in messages {
            self.refuse(message.header());
            self.undeliverable(message.header(), Undelivered::NeverSpawned);
        }
        [first, second].into_iter().flatten().min().map(|at| self.started + at)
    }

    pub(crate) fn refuse_unknown(&self, frame: &Frame) {
        let mesh = frame.header.dst.mesh;
        let failed = lock(&self.early.failed).iter().find(|one| one.0 == mesh).map(|one| Arc::clone(&one.1));
        if let Some(ended) = failed {
            return self.bounce(frame, Outcome::Lost(ended));
        }
        self.bounce(frame, agent::lost(EndReason::NoSuchProc(frame.header.dst)));
    }
}
