//! Who waits in this process, for whom, and since when: the edges of the job's wait-for graph that begin here.
//!
//! WTS-1: a wait for a call or a promise is noted before it begins, whether a thread blocks or a loop or a list listens. So
//! every wait that is under way is an edge, and what nobody waits for any more is none.
//! WTS-2: the answer is made without the interpreter. It names at most [`MOST`] waits, the oldest ones.

use crate::calls::{Call, Calls};
use crate::inbox::Inbox;
use crate::inspect::{addr, list, quoted, write_running};
use crate::locks::lock;
use crate::meter::{Meter, Meters};
use crate::promises::Promises;
use mesh_proto::{ActorId, CallId, ProcAddr};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// At most this many waits of a process are listed.
const MOST: usize = 1000;
/// At most this many of the processes that one call waits for are named.
const MOST_NAMED: usize = 8;

#[derive(Debug, Default)]
struct Threads {
    blocked: u32,
    since: Option<Instant>,
}

/// Who waits for one thing.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    threads: Mutex<Threads>,
    /// The actor that waits; 0 for none.
    asker: AtomicU64,
}

impl Waits {
    /// Says which actor is about to wait.
    pub(crate) fn asked_by(&self, actor: ActorId) {
        self.asker.store(actor, Ordering::Relaxed);
    }

    /// A thread is about to block. It does until the result is dropped.
    pub(crate) fn block(&self) -> Waiting<'_> {
        let mut threads = lock(&self.threads);
        if threads.blocked == 0 {
            threads.since = Some(Instant::now());
        }
        threads.blocked += 1;
        Waiting(self)
    }

    /// The first listener has come.
    pub(crate) fn listened(&self) {
        let mut threads = lock(&self.threads);
        if threads.blocked == 0 {
            threads.since = Some(Instant::now());
        }
    }

    /// The actor that waits, and since when; `listens` says whether anything listens.
    pub(crate) fn look(&self, listens: bool) -> Option<(ActorId, Instant)> {
        let threads = lock(&self.threads);
        let since = threads.since.filter(|_| listens || threads.blocked > 0)?;
        Some((self.asker.load(Ordering::Relaxed), since))
    }
}

/// A thread that waits.
#[derive(Debug)]
#[must_use]
pub struct Waiting<'a>(&'a Waits);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.threads).blocked -= 1;
    }
}

/// Threads that wait until a mailbox has room, with the actors that they work for.
#[derive(Debug, Default)]
pub(crate) struct Blocked(Mutex<Vec<(ActorId, Instant)>>);

impl Blocked {
    pub(crate) fn block(&self, actor: ActorId) -> InRoom<'_> {
        lock(&self.0).push((actor, Instant::now()));
        InRoom(self, actor)
    }

    fn look(&self) -> Vec<(ActorId, Instant)> {
        lock(&self.0).clone()
    }
}

/// A thread that waits for room.
#[derive(Debug)]
#[must_use]
pub struct InRoom<'a>(&'a Blocked, ActorId);

impl Drop for InRoom<'_> {
    fn drop(&mut self) {
        let mut blocked = lock(&self.0.0);
        if let Some(place) = blocked.iter().position(|(actor, _)| *actor == self.1) {
            blocked.swap_remove(place);
        }
    }
}

/// What somebody waits for.
enum What {
    Call(Arc<Call>),
    Promise(Box<str>),
    Room(Arc<Meter>),
}

/// What can be waited for in a process, and the actors that wait.
#[derive(Debug)]
pub(crate) struct Awaited<'a> {
    pub(crate) me: ProcAddr,
    pub(crate) calls: &'a Calls,
    pub(crate) promises: &'a Promises,
    pub(crate) meters: &'a Meters,
    pub(crate) inboxes: Vec<Arc<Inbox>>,
}

impl Awaited<'_> {
    /// All waits of this process, and what its actors run. `held_here` says whether a call still waits here to be sent.
    pub(crate) fn tell(self, held_here: impl Fn(CallId) -> bool) -> String {
        let now = Instant::now();
        let mut all: Vec<(Instant, ActorId, What)> = Vec::new();
        all.extend(self.calls.awaited().into_iter().map(|(since, by, call)| (since, by, What::Call(call))));
        all.extend(self.promises.waits().into_iter().map(|(since, by, name)| (since, by, What::Promise(name))));
        for meter in self.meters.all() {
            let blocked = meter.blocked.look();
            all.extend(blocked.into_iter().map(|(by, since)| (since, by, What::Room(Arc::clone(&meter)))));
        }
        all.sort_by_key(|(since, ..)| *since);
        let left_out = all.len().saturating_sub(MOST);
        let mut out = format!(r#"{{"left_out":{left_out},"waits":"#);
        list(&mut out, all.into_iter().take(MOST), |out, (since, by, what)| {
            let seconds = now.saturating_duration_since(since).as_secs_f64();
            let _ = write!(out, r#"{{"seconds":{seconds},"by":{by},"#);
            write_what(out, &what, self.me, &held_here);
            out.push('}');
        });
        out.push_str(r#","actors":"#);
        list(&mut out, self.inboxes, |out, inbox| {
            let gauge = &inbox.gauge;
            let _ = write!(out, r#"{{"id":{},"rank":{},"queue":{},"title":"#, inbox.actor, gauge.rank, inbox.len());
            quoted(out, &String::from_utf8_lossy(&gauge.title));
            out.push_str(r#","class":"#);
            quoted(out, gauge.class());
            let _ = write!(out, r#","up":{},"running":"#, gauge.is_up());
            list(out, &gauge.read().running, |out, one| write_running(out, one, now));
            out.push('}');
        });
        out.push('}');
        out
    }
}

fn write_what(out: &mut String, what: &What, me: ProcAddr, held_here: &impl Fn(CallId) -> bool) {
    let whom = |out: &mut String, named: &[ProcAddr]| {
        out.push_str(r#","whom":"#);
        list(out, named, |out, one| out.push_str(&addr(*one)));
    };
    match what {
        What::Promise(name) => {
            out.push_str(r#""kind":"promise","name":"#);
            quoted(out, name);
        }
        What::Room(meter) => {
            let _ = write!(out, r#""kind":"room","actor":{}"#, meter.mailbox());
            whom(out, &[meter.addr()]);
        }
        What::Call(call) => {
            let (missing, named) = call.waited_for(MOST_NAMED);
            let Some(callee) = call.callee.get() else {
                // The only call to this process itself without a callee is a receive.
                let kind = if named == [me] { "port" } else { "runtime" };
                let _ = write!(out, r#""kind":"{kind}""#);
                return whom(out, &named);
            };
            let kind = if held_here(call.id) { "room" } else { "call" };
            let _ = write!(out, r#""kind":"{kind}","actor":{},"missing":{missing},"name":"#, callee.id);
            quoted(out, &callee.actor);
            out.push_str(r#","endpoint":"#);
            quoted(out, &callee.endpoint);
            whom(out, &named);
        }
    }
}
