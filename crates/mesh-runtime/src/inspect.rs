//! Answers about this process, and its events for those who follow them.
//!
//! Answers need no interpreter, so they come even while an actor, the event loop or a thread that holds the GIL is
//! stuck. [`Inspect`] lists the questions. Answers are JSON: they are for people, and rarely read.

use crate::dispatch::Dispatch;
use crate::dump::Dumper;
use crate::error::RuntimeError;
use crate::gateway::HostView;
use crate::gauge::Running;
use crate::inbox::Inbox;
use crate::journal::Journal;
use crate::link::Link;
use crate::promises::Promises;
use crate::reactor::Reactor;
use crate::usage::{self, Used, stage_name};
use mesh_proto::control::Inspect;
use mesh_proto::{Ended, Exit, Frame, HostNo, MeshId, ProcAddr, Stage};
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// At most this many promises are listed, the oldest ones.
const MOST_PROMISES: usize = 100;

/// Events of this process; at the controller, of the whole job.
#[derive(Debug)]
pub(crate) struct Inspector {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    /// At the controller: past events.
    pub(crate) journal: Journal,
    /// At an agent, whether anyone follows (0 or 1); at the controller, how many readers do.
    watchers: AtomicUsize,
    /// Whether anyone follows events of this process's actors.
    watched: AtomicBool,
    dumper: OnceLock<Dumper>,
}

impl Inspector {
    pub(crate) fn new(me: ProcAddr, reactor: &Arc<Reactor>) -> Self {
        Self {
            me,
            reactor: Arc::clone(reactor),
            journal: Journal::default(),
            watchers: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
            dumper: OnceLock::new(),
        }
    }

    /// Makes the handler that is registered for `signal` write stacks to `file`.
    pub(crate) fn catch_dumps(&self, signal: i32, file: OwnedFd) -> Result<(), RuntimeError> {
        // Done once, by the first lines of a worker.
        let _ = self.dumper.set(Dumper::find(signal, file)?);
        Ok(())
    }

    /// The stacks of this process.
    pub(crate) fn dump(&self) -> String {
        let dump = match self.dumper.get() {
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

    // Events.

    /// Puts an event into the controller's journal.
    pub(crate) fn note(&self, note: Note, failure: bool, out: &impl Dispatch) {
        self.note_text(note.finish(), failure, out);
    }

    /// Like [`Self::note`], for an event that is already JSON.
    pub(crate) fn note_text(&self, text: String, failure: bool, out: &impl Dispatch) {
        if self.me == ProcAddr::CONTROLLER {
            self.journal.push(&self.reactor, text.into(), failure);
        } else {
            out.dispatch(Inspect::Event { text: text.into(), failure }.frame(self.me, ProcAddr::CONTROLLER, None));
        }
    }

    /// Notes that procs of this host are being made, before anything is sent to them.
    pub(crate) fn note_spawn(
        &self,
        (mesh, title): (MeshId, &str),
        owner: ProcAddr,
        links: &[Arc<Link>],
        out: &impl Dispatch,
    ) {
        let note = Note::new("procs_spawned", ProcAddr { mesh, rank: 0, host: self.me.host })
            .text("title", title)
            .number("count", links.len() as u64)
            .number("owner_mesh", owner.mesh)
            .number("owner_rank", owner.rank);
        self.note(note, false, out);
        for link in links {
            if let Some(frame) = self.watch_frame(link.peer) {
                link.send(&self.reactor, &frame);
            }
        }
    }

    /// Notes that a proc of this host has ended.
    pub(crate) fn note_end(&self, who: ProcAddr, ended: &Ended, title: &str, out: &impl Dispatch) {
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
        self.note(note, !ended.orderly, out);
    }

    /// Notes that an actor of this process was made, could not be made, or has stopped. Unless it is a failure, this is
    /// reported only while somebody follows.
    pub(crate) fn note_actor(&self, kind: &str, inbox: &Inbox, failure: bool, out: &impl Dispatch) {
        if failure || self.watched.load(Ordering::Relaxed) {
            let title = String::from_utf8_lossy(&inbox.gauge.title);
            let note = Note::new(kind, self.me).number("actor", inbox.actor).text("actor_title", &title);
            self.note(note.text("class", inbox.gauge.class()).number("rank", inbox.gauge.rank), failure, out);
        }
    }

    // Followers.

    /// What a new process is told first, if somebody follows events.
    pub(crate) fn watch_frame(&self, who: ProcAddr) -> Option<Frame> {
        (self.watchers.load(Ordering::SeqCst) > 0).then(|| Inspect::Watch(true).frame(self.me, who, None))
    }

    /// At the controller: a reader of events begins or ends. True if that changes whether anyone follows.
    pub(crate) fn count_watcher(&self, begin: bool) -> bool {
        let watchers = &self.watchers;
        let before =
            if begin { watchers.fetch_add(1, Ordering::SeqCst) } else { watchers.fetch_sub(1, Ordering::SeqCst) - 1 };
        before == 0
    }

    /// Somebody follows events now, or nobody any more.
    pub(crate) fn on_watch(&self, begin: bool) {
        self.watched.store(begin, Ordering::Relaxed);
        if self.me.is_agent() && self.me != ProcAddr::CONTROLLER {
            self.watchers.store(usize::from(begin), Ordering::SeqCst);
        }
    }
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

/// An event being written as text.
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

    pub(crate) fn finish(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// What there is to see in a process, gathered from its parts.
#[derive(Debug)]
pub(crate) struct Sight<'a> {
    pub(crate) age: Duration,
    /// Calls that wait.
    pub(crate) calls: usize,
    pub(crate) shm_bytes: usize,
    /// Bytes that wait in links.
    pub(crate) queued: usize,
    /// Ranks of its own meshes whose processes have died, with the titles of the meshes.
    pub(crate) dead: Vec<(ProcAddr, Arc<str>)>,
    pub(crate) promises: &'a Promises,
    pub(crate) system: &'a Inbox,
    pub(crate) inboxes: Vec<Arc<Inbox>>,
}

impl Sight<'_> {
    /// Figures about the process, its promises and its actors.
    pub(crate) fn state(self) -> String {
        let now = Instant::now();
        let mut out = format!(
            r#"{{"pid":{},"age":{},"calls":{},"shm":{},"queued":{},"loop":{},"promises":"#,
            std::process::id(),
            self.age.as_secs_f64(),
            self.calls,
            self.shm_bytes,
            self.queued,
            self.system.gauge.thread(),
        );
        list(&mut out, self.promises.awaited().into_iter().take(MOST_PROMISES), |out, (name, age)| {
            out.push('[');
            quoted(out, &name);
            let _ = write!(out, ",{age}]");
        });
        out.push_str(r#","dead":"#);
        list(&mut out, self.dead, |out, (who, title)| {
            let _ = write!(out, "[{},", addr(who));
            quoted(out, &title);
            out.push(']');
        });
        out.push_str(r#","actors":"#);
        list(&mut out, self.inboxes, |out, inbox| {
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

    /// Which thread runs which actor.
    pub(crate) fn threads(self) -> String {
        let (pid, on_loop) = (std::process::id(), self.system.gauge.thread());
        let mut out = format!(r#"{{"pid":{pid},"loop":{on_loop},"actors":"#);
        let now = Instant::now();
        let actors = self.inboxes.into_iter().map(|inbox| (inbox.gauge.read().running, inbox));
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
}

/// The processes of a host, at the controller also the hosts, the titles of meshes, and the latest failures.
pub(crate) fn tree(
    procs: Vec<ProcView>,
    fork_servers: Vec<ForkServerView>,
    queued: impl Fn(ProcAddr) -> usize,
    hosts: Option<Vec<HostView>>,
    titles: Titles,
    journal: &Journal,
) -> String {
    let mut out = String::from(r#"{"procs":"#);
    list(&mut out, procs, |out, (who, stage, pid, owner)| {
        let pid = pid.map_or("null".to_owned(), |pid| pid.to_string());
        let _ = write!(out, r#"[{},"{}",{pid},{},{}]"#, addr(who), stage_name(stage), addr(owner), queued(who));
    });
    out.push_str(r#","fork_servers":"#);
    list(&mut out, fork_servers, |out, one| {
        let _ = write!(out, "[{},{}", one.pid, one.workers);
        for text in [&one.importing, &one.imported] {
            out.push(',');
            quoted(out, text);
        }
        out.push(']');
    });
    if let Some(hosts) = hosts {
        out.push_str(r#","hosts":"#);
        list(&mut out, hosts, |out, one| {
            let _ = write!(out, r#"[{},"{}",{}"#, one.host, one.state.word(), one.pid);
            for text in [&one.name, &one.address, &one.why] {
                out.push(',');
                quoted(out, text);
            }
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
    list(&mut out, journal.failures(), |out, one| quoted(out, &one));
    out.push('}');
    out
}

/// The resource use of a host and these of its processes.
pub(crate) fn usage(host: HostNo, name: &str, pids: impl Iterator<Item = u32>, shares: bool) -> String {
    let mut out = String::new();
    usage::write_host(host, &mut out);
    out.push_str(r#","name":"#);
    quoted(&mut out, name);
    out.push_str(r#","procs":"#);
    list(&mut out, pids.filter_map(|pid| Some((pid, Used::of(pid, shares)?))), |out, (pid, used)| {
        let _ = write!(out, "[{pid},");
        used.write(out);
        out.push(']');
    });
    out.push('}');
    out
}

/// What [`crate::agent::HostAgent::overview`] reports of a proc: its address, stage, pid and owner.
pub(crate) type ProcView = (ProcAddr, Stage, Option<u32>, ProcAddr);

/// What [`crate::agent::HostAgent::overview`] reports of a fork server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForkServerView {
    pub(crate) pid: u32,
    /// How many procs it has forked, or is to fork, that have not ended.
    pub(crate) workers: usize,
    /// The module that it is importing, if any.
    pub(crate) importing: String,
    /// The modules that it has imported for its workers, by commas.
    pub(crate) imported: String,
}

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
