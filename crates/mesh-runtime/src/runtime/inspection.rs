//! What others ask of this process, and what it tells them of what happens; see [`crate::inspect`].

use super::Runtime;
use crate::error::RuntimeError;
use crate::inbox::LoopWaker;
use crate::inspect::{self, Note, Sight, addr, list, quoted};
use crate::journal::Entries;
use crate::link::Link;
use crate::usage::{self, stage_name};
use crate::waits::Awaited;
use mesh_proto::control::{Inspect, Question};
use mesh_proto::messages::Answer;
use mesh_proto::{ActorId, Ended, Exit, Frame, Header, MeshId, ProcAddr, Undelivered};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Runtime {
    fn sight(&self) -> Sight<'_> {
        Sight {
            age: self.started.elapsed(),
            calls: self.calls.len(),
            shm_bytes: self.memory.bytes(),
            queued: self.switch.links().iter().map(|link| link.queued()).sum(),
            promises: &self.promises,
            system: &self.inboxes.system,
            inboxes: self.inboxes.all(),
        }
    }

    /// Who waits in this process, and what its actors run.
    fn waits(&self) -> String {
        let (calls, promises, meters) = (&self.calls, &self.promises, &self.meters);
        let awaited = Awaited { me: self.me, calls, promises, meters, inboxes: self.inboxes.all() };
        awaited.tell(|call| self.waits_here(call))
    }

    // What others ask.

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
        let mut out = String::from(r#"{"procs":"#);
        list(&mut out, procs, |out, (who, stage, pid, owner)| {
            let queued = self.switch.link_of(who).map_or(0, |link| link.queued());
            let pid = pid.map_or("null".to_owned(), |pid| pid.to_string());
            let (who, stage, owner) = (addr(who), stage_name(stage), addr(owner));
            let _ = write!(out, r#"[{who},"{stage}",{pid},{owner},{queued}]"#);
        });
        if self.me == ProcAddr::CONTROLLER {
            out.push_str(r#","hosts":"#);
            list(&mut out, self.roll(), |out, one| {
                let _ = write!(out, r#"[{},"{}",{},"#, one.host, one.state.word(), one.pid);
                quoted(out, &one.name);
                out.push(',');
                quoted(out, &one.address);
                out.push(',');
                quoted(out, &one.why);
                out.push(']');
            });
        }
        out.push_str(r#","titles":"#);
        list(&mut out, titles, |out, (mesh, title)| {
            let _ = write!(out, "[{mesh},");
            quoted(out, &title);
            out.push(']');
        });
        out.push_str(r#","failures":"#);
        list(&mut out, self.inspector.journal.failures(), |out, one| quoted(out, &one));
        out.push('}');
        out
    }

    /// Answers on a thread of its own: to ask the kernel about many processes takes a while, and calls are to go on.
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

    /// Procs of this host are being made. Called with the agent's lock held, before anything is sent to them.
    pub(crate) fn note_spawn(&self, mesh: MeshId, n: usize, title: &str, owner: ProcAddr, links: &[Arc<Link>]) {
        let note = Note::new("procs_spawned", ProcAddr { mesh, rank: 0, host: self.me.host })
            .text("title", title)
            .number("count", n as u64);
        self.note(note.number("owner_mesh", owner.mesh).number("owner_rank", owner.rank), false);
        for link in links {
            if let Some(frame) = self.inspector.watch_frame(link.peer) {
                link.send(&self.reactor, &frame);
            }
        }
    }

    /// A proc of this host has ended.
    pub(crate) fn note_end(&self, who: ProcAddr, ended: &Ended, title: &str) {
        let kind = if ended.orderly { "proc_stopped" } else { "proc_died" };
        let mut note = Note::new(kind, who).text("title", title).text("text", &ended.reason.to_string());
        if let Some(pid) = ended.pid {
            note = note.number("pid", pid);
        }
        note = match ended.exit {
            Exit::Code(code) => note.number("exitcode", code),
            Exit::Signal(signal) => note.number("signal", signal),
            Exit::OutOfMemory => note.number("signal", rustix::process::Signal::KILL.as_raw()),
            Exit::Unknown => note,
        };
        self.note(note, !ended.orderly);
    }

    /// An actor of this process: it was made, could not be made, or has stopped.
    pub(crate) fn note_actor(&self, kind: &str, inbox: &crate::Inbox, failure: bool) {
        if failure || self.inspector.is_watched() {
            let title = String::from_utf8_lossy(&inbox.gauge.title);
            let note = Note::new(kind, self.me).number("actor", inbox.actor).text("actor_title", &title);
            self.note(note.text("class", inbox.gauge.class()).number("rank", inbox.gauge.rank), failure);
        }
    }

    /// An actor's constructor has returned, or has raised.
    pub(crate) fn on_constructed(&self, actor: ActorId, failed: bool) {
        let Some(inbox) = self.inbox(actor) else { return };
        if !failed {
            inbox.gauge.set_up();
        }
        self.note_actor(if failed { "actor_failed" } else { "actor_created" }, &inbox, failed);
    }

    /// Puts an event that is text already into the controller's journal.
    pub fn note_text(&self, text: &str, failure: bool) {
        if let Some(event) = self.inspector.note(text.to_owned(), failure) {
            self.dispatch(event, None);
        }
    }

    /// Has `waker` told of the event after those that were `seen`.
    pub fn tell_events(&self, waker: &Arc<LoopWaker>, token: u64, seen: u64) {
        self.inspector.journal.tell(&self.reactor, waker, token, seen);
    }

    /// An event, into the controller's journal.
    pub(crate) fn note(&self, note: Note, failure: bool) {
        if let Some(event) = self.inspector.note(note.finish(), failure) {
            self.dispatch(event, None);
        }
    }

    /// A reader of events begins to follow, or ends.
    pub fn watch(&self, begin: bool) {
        if !self.inspector.count_watcher(begin) || self.is_closed() {
            return;
        }
        self.on_watch(begin);
        if let Some(agents) = self.gateway.other_agents() {
            self.dispatch(Inspect::Watch(begin).frame(self.me, ProcAddr::CONTROLLER, Some(&agents)), None);
        }
    }

    /// Somebody follows events now, or nobody does any more.
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

    /// Stacks are written to `file` by the handler that is registered for `signal`.
    ///
    /// # Errors
    /// If there is none.
    pub fn catch_dumps(&self, signal: i32, file: OwnedFd) -> Result<(), RuntimeError> {
        self.inspector.catch_dumps(signal, file)
    }

    /// At most `limit` events from number `from` on.
    pub fn events(&self, from: u64, limit: usize) -> Entries {
        self.inspector.journal.read(from, limit)
    }

    /// The number of the next event.
    pub fn next_event(&self) -> u64 {
        self.inspector.journal.next()
    }

    /// Whether no more events will come.
    pub fn events_over(&self) -> bool {
        self.inspector.journal.is_closed()
    }
}
