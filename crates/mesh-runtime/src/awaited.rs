//! Who waits in this process, for whom, and since when: the edges of the job's wait-for graph that begin here.
//!
//! WTS-2: the answer is made without the interpreter. It names at most [`MOST`] waits, the oldest ones.

use crate::call::Call;
use crate::calls::Calls;
use crate::inbox::Inbox;
use crate::inspect::{addr, list, quoted, write_running};
use crate::meter::{Meter, Meters};
use crate::promises::Promises;
use mesh_proto::{ActorId, CallId, ProcAddr};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

/// At most this many waits of a process are listed.
const MOST: usize = 1000;

/// At most this many of the processes that one call waits for are named.
const MOST_NAMED: usize = 8;

/// What is waited for.
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
