//! Connects [`crate::inspect`] to the other parts: which of them answers which question, and what is reported as an
//! event.

use super::Runtime;
use crate::awaited::Awaited;
use crate::error::RuntimeError;
use crate::inbox::Inbox;
use crate::inspect::{self, Note, Sight};
use crate::journal::Journal;
use crate::link::Link;
use crate::usage;
use mesh_proto::control::{Inspect, Question};
use mesh_proto::messages::Answer;
use mesh_proto::{ActorId, Ended, Frame, Header, MeshId, ProcAddr, Undelivered, is_host_mesh};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Runtime {
    fn sight(&self) -> Sight<'_> {
        Sight {
            age: self.started.elapsed(),
            calls: self.calls.len(),
            shm_bytes: self.memory.bytes(),
            queued: self.switch.links().iter().map(|link| link.queued()).sum(),
            dead: self.dead_ranks(),
            promises: &self.promises,
            system: &self.inboxes.system,
            inboxes: self.inboxes.all(),
        }
    }

    /// The dead ranks of this process's own meshes, except for those of hosts' extensions.
    fn dead_ranks(&self) -> Vec<(ProcAddr, Arc<str>)> {
        let mut dead = self.dead_ranks.now(|addr| self.moving.is_outdated(addr));
        dead.retain(|(addr, _)| !is_host_mesh(self.seat(*addr).mesh));
        dead
    }

    /// Who waits in this process, and what its actors run.
    fn waits(&self) -> String {
        let (calls, promises, meters) = (&self.calls, &self.promises, &self.meters);
        let awaited = Awaited { me: self.me, calls, promises, meters, inboxes: self.inboxes.all() };
        awaited.tell(|call| self.waits_here(call))
    }

    // Questions from others.

    pub(crate) fn on_inspect(&self, frame: &Frame) {
        let header = frame.header;
        let answer = match Inspect::read(frame) {
            Some(Inspect::Ask(Question::State)) => self.sight().state(),
            Some(Inspect::Ask(Question::Threads)) => self.sight().threads(),
            Some(Inspect::Ask(Question::Dump)) => self.inspector.dump(),
            Some(Inspect::Ask(Question::Waits)) => self.waits(),
            Some(Inspect::Ask(Question::Stacks)) => {
                self.inboxes.tell_system(frame.clone());
                return;
            }
            Some(Inspect::Ask(Question::Tree)) if self.me.is_agent() => self.tree(),
            Some(Inspect::Ask(Question::Usage)) if self.me.is_agent() => return self.tell_usage(header, false),
            Some(Inspect::Ask(Question::Shares)) if self.me.is_agent() => return self.tell_usage(header, true),
            Some(Inspect::Watch(begin)) => return self.on_watch(begin),
            Some(Inspect::Event { text, failure }) if self.me == ProcAddr::CONTROLLER => {
                if let Ok(text) = std::str::from_utf8(&text) {
                    self.note_text(text, failure);
                }
                return;
            }
            Some(Inspect::Visit(visit)) => return self.visits.on_visit(header.src, visit),
            Some(_) | None => return self.undeliverable(&header, Undelivered::UnknownQuestion),
        };
        self.reply(&header, Answer::Value, answer.as_bytes(), &[]);
    }

    fn tree(&self) -> String {
        let (procs, titles) = self.agent.overview();
        let queued = |who| self.switch.link_of(who).map_or(0, |link| link.queued());
        let hosts = (self.me == ProcAddr::CONTROLLER).then(|| self.roll());
        inspect::tree(procs, self.agent.fork_servers(), queued, hosts, titles, &self.inspector.journal)
    }

    /// Answers on a separate thread: asking the kernel about many processes takes a while, and calls must go on.
    fn tell_usage(&self, to: Header, shares: bool) {
        let this = self.this();
        let made = std::thread::Builder::new().name("mesh-look".to_owned()).stack_size(256 * 1024).spawn(move || {
            if let Some(runtime) = this.filter(|runtime| !runtime.is_closed()) {
                let name = if runtime.me == ProcAddr::CONTROLLER { usage::machine() } else { runtime.host_name() };
                let procs = runtime.agent.overview().0;
                let pids = procs.into_iter().filter_map(|(_, _, pid, _)| pid).chain([std::process::id()]);
                let answer = inspect::usage(runtime.me.host, &name, pids, shares);
                runtime.reply(&to, Answer::Value, answer.as_bytes(), &[]);
            }
        });
        if made.is_err() {
            self.undeliverable(&to, Undelivered::NoThread);
        }
    }

    // Events.

    /// Puts an event into the controller's journal.
    pub(crate) fn note(&self, note: Note, failure: bool) {
        self.inspector.note(note, failure, self);
    }

    /// Like [`Self::note`], for an event that is already JSON.
    pub fn note_text(&self, text: &str, failure: bool) {
        self.inspector.note_text(text.to_owned(), failure, self);
    }

    /// Notes that procs of this host are being made. Called with the agent's lock held, before anything is sent to
    /// them.
    pub(crate) fn note_spawn(&self, mesh: MeshId, title: &str, owner: ProcAddr, links: &[Arc<Link>]) {
        self.inspector.note_spawn((mesh, title), owner, links, self);
    }

    /// Notes that a proc of this host has ended.
    pub(crate) fn note_end(&self, who: ProcAddr, ended: &Ended, title: &str) {
        self.inspector.note_end(who, ended, title, self);
    }

    /// Notes that an actor of this process was made, could not be made, or has stopped.
    pub(crate) fn note_actor(&self, kind: &str, inbox: &Inbox, failure: bool) {
        self.inspector.note_actor(kind, inbox, failure, self);
    }

    /// An actor's constructor has returned or raised.
    pub(crate) fn on_constructed(&self, actor: ActorId, failed: bool) {
        let Some(inbox) = self.inbox(actor) else { return };
        if !failed {
            inbox.gauge.set_up();
        }
        self.note_actor(if failed { "actor_failed" } else { "actor_created" }, &inbox, failed);
    }

    /// A reader of events begins or ends.
    pub fn watch(&self, begin: bool) {
        if !self.inspector.count_watcher(begin) || self.is_closed() {
            return;
        }
        self.on_watch(begin);
        if let Some(agents) = self.gateway.other_agents() {
            self.dispatch(Inspect::Watch(begin).frame(self.me, ProcAddr::CONTROLLER, Some(&agents)), None);
        }
    }

    /// Somebody follows events now, or nobody any more.
    fn on_watch(&self, begin: bool) {
        self.inspector.on_watch(begin);
        if !self.me.is_agent() {
            return;
        }
        let (procs, _) = self.agent.overview();
        for (who, ..) in procs {
            self.dispatch(Inspect::Watch(begin).frame(self.me, who, None), None);
        }
    }

    /// Makes the handler that is registered for `signal` write stacks to `file`.
    ///
    /// # Errors
    /// If there is no such handler.
    pub fn catch_dumps(&self, signal: i32, file: OwnedFd) -> Result<(), RuntimeError> {
        self.inspector.catch_dumps(signal, file)
    }

    /// The events recorded by this process; at the controller, those of the job.
    pub fn journal(&self) -> &Journal {
        &self.inspector.journal
    }
}
