//! Answers about this process, given without the interpreter: they come while an actor, the event loop or whoever holds
//! the GIL is stuck.
//!
//! [`Inspect`] says what can be asked and told.
//!
//! Answers are JSON: they are made for people and read seldom.

use crate::dump::Dumper;
use crate::error::RuntimeError;
use crate::gauge::Running;
use crate::inbox::LoopWaker;
use crate::journal::Entries;
use crate::link::Link;
use crate::runtime::{Runtime, lock};
use crate::usage::{self, Used, stage_name};
use mesh_proto::control::{Inspect, Question};
use mesh_proto::messages::Answer;
use mesh_proto::{ActorId, Ended, Exit, Frame, Header, MeshId, ProcAddr, Stage, Undelivered};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// How many promises that are waited for are told of; the oldest of them.
const MOST_PROMISES: usize = 100;

/// What inspection keeps in a runtime.
#[derive(Debug, Default)]
pub(crate) struct Inspection {
    /// At the controller: what has happened.
    pub(crate) journal: crate::journal::Journal,
    /// At the controller: how many readers follow.
    watchers: AtomicUsize,
    /// Whether somebody wants to hear of this process's actors.
    watched: AtomicBool,
    dumper: OnceLock<Dumper>,
}

pub(crate) fn quoted(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

pub(crate) fn addr(addr: ProcAddr) -> String {
    format!("[{},{},{}]", addr.mesh, addr.rank, addr.host)
}

pub(crate) fn list<T>(out: &mut String, items: impl IntoIterator<Item = T>, mut item: impl FnMut(&mut String, T)) {
    out.push('[');
    for (n, one) in items.into_iter().enumerate() {
        if n > 0 {
            out.push(',');
        }
        item(out, one);
    }
    out.push(']');
}

fn endpoint(name: &[u8]) -> std::borrow::Cow<'_, str> {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end])
}

pub(crate) fn write_running(out: &mut String, one: &Running, now: Instant) {
    out.push('[');
    quoted(out, &endpoint(&one.name));
    let since = now.saturating_duration_since(one.since).as_secs_f64();
    let _ = write!(out, ",{since},{}]", addr(one.src));
}

/// An event on its way to text.
pub(crate) struct Note(String);

impl Note {
    pub(crate) fn new(kind: &str, who: ProcAddr) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        Self(format!(r#"{{"time":{now},"kind":"{kind}","proc":{}"#, addr(who)))
    }

    pub(crate) fn text(mut self, key: &str, value: &str) -> Self {
        let _ = write!(self.0, r#","{key}":"#);
        quoted(&mut self.0, value);
        self
    }

    pub(crate) fn number(mut self, key: &str, value: impl Into<i128>) -> Self {
        let _ = write!(self.0, r#","{key}":{}"#, value.into());
        self
    }

    fn finish(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

impl Runtime {
    // What others ask.

    pub(crate) fn on_inspect(&self, frame: &Frame) {
        let header = frame.header;
        let answer = match Inspect::read(frame) {
            Some(Inspect::Ask(Question::State)) => self.state(),
            Some(Inspect::Ask(Question::Threads)) => self.threads(),
            Some(Inspect::Ask(Question::Dump)) => self.dump(),
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
                    self.inspection.journal.push(&self.reactor, text.into(), failure);
                }
                return;
            }
            Some(Inspect::Visit(visit)) => return self.on_visit(header.src, visit),
            Some(_) | None => return self.undeliverable(&header, Undelivered::UnknownQuestion),
        };
        self.reply(&header, Answer::Value, answer.as_bytes(), &[]);
    }

    fn state(&self) -> String {
        let now = Instant::now();
        let counts = self.counts();
        let queued: usize = self.switch.links().iter().map(|link| link.queued()).sum();
        let mut out = format!(
            r#"{{"pid":{},"age":{},"calls":{},"shm":{},"queued":{queued},"loop":{},"promises":"#,
            std::process::id(),
            self.started.elapsed().as_secs_f64(),
            counts.calls,
            counts.shm_bytes,
            self.system_inbox().gauge.thread(),
        );
        list(&mut out, self.promises.awaited().into_iter().take(MOST_PROMISES), |out, (name, age)| {
            out.push('[');
            quoted(out, &name);
            let _ = write!(out, ",{age}]");
        });
        out.push_str(r#","actors":"#);
        list(&mut out, self.inboxes.all(), |out, inbox| {
            let gauge = &inbox.gauge;
            let reading = gauge.read();
            let (length, queued, received, bytes) = inbox.flow();
            let _ = write!(out, r#"{{"id":{},"title":"#, inbox.actor);
            quoted(out, &String::from_utf8_lossy(&gauge.title));
            out.push_str(r#","class":"#);
            quoted(out, gauge.class());
            let _ = write!(
                out,
                concat!(
                    r#","rank":{},"owner":{},"thread":{},"up":{},"age":{},"queue":{},"queue_bytes":{},"received":{},"#,
                    r#""bytes":{},"handled":{},"failed":{},"rate":{},"mean":{},"waited":{},"longest":{},"running":"#
                ),
                gauge.rank,
                addr(gauge.owner),
                gauge.thread(),
                gauge.is_up(),
                gauge.born.elapsed().as_secs_f64(),
                length,
                queued,
                received,
                bytes,
                reading.handled,
                reading.failed,
                reading.rate,
                reading.mean.as_secs_f64(),
                reading.waited.as_secs_f64(),
                reading.longest.as_secs_f64(),
            );
            list(out, &reading.running, |out, one| write_running(out, one, now));
            out.push('}');
        });
        out.push('}');
        out
    }

    fn dump(&self) -> String {
        let dump = match self.inspection.dumper.get() {
            Some(dumper) => dumper.dump().map_err(|error| error.to_string()),
            None => Err("this process has not set up what writes its stacks".to_owned()),
        };
        let (key, text) = match dump {
            Ok(text) if text.is_empty() => {
                ("error", "the process changes too fast for its stacks to be walked".to_owned())
            }
            Ok(text) => ("text", text),
            Err(why) => ("error", why),
        };
        let mut out = format!(r#"{{"{key}":"#);
        quoted(&mut out, &text);
        out.push('}');
        out
    }

    fn threads(&self) -> String {
        let (pid, on_loop) = (std::process::id(), self.system_inbox().gauge.thread());
        let mut out = format!(r#"{{"pid":{pid},"loop":{on_loop},"actors":"#);
        let now = Instant::now();
        let actors = self.inboxes.all().into_iter().map(|inbox| (inbox.gauge.read().running, inbox));
        let of_interest = actors.filter(|(running, inbox)| inbox.gauge.thread() != 0 || !running.is_empty());
        list(&mut out, of_interest, |out, (running, inbox)| {
            let _ = write!(out, "[{},", inbox.gauge.thread());
            quoted(out, &endpoint(&inbox.gauge.title));
            out.push(',');
            list(out, &running, |out, one| write_running(out, one, now));
            out.push(']');
        });
        out.push('}');
        out
    }

    fn tree(&self) -> String {
        let (procs, titles) = lock(&self.agent).overview();
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
        list(&mut out, self.inspection.journal.failures(), |out, one| quoted(out, &one));
        out.push('}');
        out
    }

    /// Answers on a thread of its own: to ask the kernel about many processes takes a while, and calls are to go on.
    fn tell_usage(&self, to: Header, shares: bool) {
        let this = self.this();
        let made = std::thread::Builder::new().name("mesh-look".to_owned()).stack_size(256 * 1024).spawn(move || {
            if let Some(runtime) = this.filter(|runtime| !runtime.is_closed()) {
                let answer = runtime.usage(shares);
                runtime.reply(&to, Answer::Value, answer.as_bytes(), &[]);
            }
        });
        if made.is_err() {
            self.undeliverable(&to, Undelivered::NoThread);
        }
    }

    fn usage(&self, shares: bool) -> String {
        let mut out = String::new();
        usage::write_host(self.me.host, &mut out);
        out.push_str(r#","name":"#);
        let name = if self.me == ProcAddr::CONTROLLER { usage::machine() } else { self.host_name() };
        quoted(&mut out, &name);
        out.push_str(r#","procs":"#);
        let procs = lock(&self.agent).overview().0;
        let pids = procs.into_iter().filter_map(|(_, _, pid, _)| pid).chain([std::process::id()]);
        list(&mut out, pids.filter_map(|pid| Some((pid, Used::of(pid, shares)?))), |out, (pid, used)| {
            let _ = write!(out, "[{pid},");
            used.write(out);
            out.push(']');
        });
        out.push('}');
        out
    }

    /// Stacks are written to `file` by the handler that is registered for `signal`.
    ///
    /// # Errors
    /// If there is none.
    pub fn catch_dumps(&self, signal: i32, file: OwnedFd) -> Result<(), RuntimeError> {
        let dumper = Dumper::find(signal, file)?;
        // Done once, by the first lines of a worker.
        let _ = self.inspection.dumper.set(dumper);
        Ok(())
    }

    // Events.

    /// Whether somebody wants to hear of this process's actors.
    pub(crate) fn is_watched(&self) -> bool {
        self.inspection.watched.load(Ordering::Relaxed)
    }

    /// An event, into the controller's journal.
    pub(crate) fn note(&self, note: Note, failure: bool) {
        self.post_note(note.finish(), failure);
    }

    fn post_note(&self, text: String, failure: bool) {
        if self.me == ProcAddr::CONTROLLER {
            self.inspection.journal.push(&self.reactor, text.into(), failure);
            return;
        }
        let event = Inspect::Event { text: text.into(), failure };
        self.dispatch(event.frame(self.me, ProcAddr::CONTROLLER, None), None);
    }

    /// Procs of this host are being made. Called with the agent's lock held, before anything is sent to them.
    pub(crate) fn note_spawn(&self, mesh: MeshId, n: usize, title: &str, owner: ProcAddr, links: &[Arc<Link>]) {
        let note = Note::new("procs_spawned", ProcAddr { mesh, rank: 0, host: self.me.host })
            .text("title", title)
            .number("count", n as u64);
        self.note(note.number("owner_mesh", owner.mesh).number("owner_rank", owner.rank), false);
        for link in links {
            if let Some(frame) = self.watch_frame(link.peer) {
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
        if failure || self.is_watched() {
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
        self.post_note(text.to_owned(), failure);
    }

    /// What a new proc is told first, if somebody watches.
    pub(crate) fn watch_frame(&self, who: ProcAddr) -> Option<Frame> {
        (self.inspection.watchers.load(Ordering::SeqCst) > 0).then(|| Inspect::Watch(true).frame(self.me, who, None))
    }

    /// A reader of events begins to follow, or ends.
    pub fn watch(&self, begin: bool) {
        let watchers = &self.inspection.watchers;
        let before =
            if begin { watchers.fetch_add(1, Ordering::SeqCst) } else { watchers.fetch_sub(1, Ordering::SeqCst) - 1 };
        if before > 0 || self.is_closed() {
            return;
        }
        self.on_watch(begin);
        if let Some(agents) = self.other_agents() {
            self.dispatch(Inspect::Watch(begin).frame(self.me, ProcAddr::CONTROLLER, Some(&agents)), None);
        }
    }

    /// Somebody follows events now, or nobody does any more.
    fn on_watch(&self, begin: bool) {
        self.inspection.watched.store(begin, Ordering::Relaxed);
        if !self.me.is_agent() {
            return;
        }
        if self.me != ProcAddr::CONTROLLER {
            self.inspection.watchers.store(usize::from(begin), Ordering::SeqCst);
        }
        let (procs, _) = lock(&self.agent).overview();
        for (who, ..) in procs {
            self.dispatch(Inspect::Watch(begin).frame(self.me, who, None), None);
        }
    }

    /// At most `limit` events from number `from` on.
    pub fn events(&self, from: u64, limit: usize) -> Entries {
        self.inspection.journal.read(from, limit)
    }

    /// The number of the next event.
    pub fn next_event(&self) -> u64 {
        self.inspection.journal.next()
    }

    /// Whether no more events will come.
    pub fn events_over(&self) -> bool {
        self.inspection.journal.is_closed()
    }

    /// Has `waker` told of the event after those that were `seen`.
    pub fn tell_events(&self, waker: &Arc<LoopWaker>, token: u64, seen: u64) {
        self.inspection.journal.tell(&self.reactor, waker, token, seen);
    }
}

/// What [`crate::agent::Agent::overview`] tells of a proc: its address, stage, pid and owner.
pub(crate) type ProcView = (ProcAddr, Stage, Option<u32>, ProcAddr);

/// The names of meshes of procs.
pub(crate) type Titles = Vec<(MeshId, Arc<str>)>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_quoted_for_json() {
        let mut out = String::new();
        quoted(&mut out, "a\"b\\c\n\0é");
        assert_eq!(out, r#""a\"b\\c\u000a\u0000é""#);
    }

    #[test]
    fn a_note_is_one_object() {
        let note = Note::new("proc_died", ProcAddr { mesh: 3, rank: 1, host: 0 })
            .text("text", "it's \"over\"")
            .number("signal", 9);
        let text = note.finish();
        assert!(text.starts_with(r#"{"time":"#));
        assert!(text.ends_with(r#""kind":"proc_died","proc":[3,1,0],"text":"it's \"over\"","signal":9}"#), "{text}");
    }
}
