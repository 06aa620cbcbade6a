//! Failures of calls that nobody has looked at: the process is notified of each once.
//!
//! A call whose handle is dropped while it waits stays open, so that its failure becomes known. Deaths do not count
//! here: owners are notified of them, and of what is refused because of one (flag `DEAD`), separately.
//!
//! UNS-1: a call's failure is either seen by somebody who looks at its outcomes, or reported once: when the last handle
//! is gone and all outcomes are there, or by [`Unseen::left`].

use crate::call::{Call, Outcome, State, is_failure};
use crate::inbox::Inbox;
use crate::locks::lock;
use crate::message::Message;
use crate::reactor::Reactor;
use mesh_proto::messages::{Meaning, Name, Unlooked, Unseen as Notice};
use std::sync::{Arc, Mutex, Weak};

/// Longer names are cut to this many bytes.
const LONGEST: usize = 1000;
/// The list of failed calls is not swept before it is this long.
const FEW: usize = 64;

#[derive(Debug, Default)]
struct Failed {
    calls: Vec<Weak<Call>>,
    /// At this length the list is swept.
    full: usize,
}

/// Reports failures that nobody has looked at.
#[derive(Debug, Default)]
pub(crate) struct Unseen {
    /// The inbox for the process's notices; none in an agent, which calls no actors.
    inbox: Option<Arc<Inbox>>,
    failed: Mutex<Failed>,
}

impl Unseen {
    pub(crate) fn told_to(inbox: Arc<Inbox>) -> Self {
        Self { inbox: Some(inbox), failed: Mutex::default() }
    }

    /// Notes a failed call. Reports it at once if nobody is left who could look at it.
    pub(crate) fn failed(&self, reactor: &Reactor, call: &Arc<Call>, state: &mut State) {
        if state.dropped {
            self.tell(reactor, call, state);
            return;
        }
        let mut failed = lock(&self.failed);
        if failed.calls.len() >= failed.full.max(FEW) {
            failed.calls.retain(|call| call.strong_count() > 0);
            failed.full = 2 * failed.calls.len();
        }
        failed.calls.push(Arc::downgrade(call));
    }

    /// Reports a failed call whose last handle is gone.
    pub(crate) fn tell(&self, reactor: &Reactor, call: &Call, state: &mut State) {
        if let Some(inbox) = &self.inbox
            && let Some(notice) = notice(call, state)
        {
            inbox.push(reactor, notice);
        }
    }

    /// Notices of failed calls that are still held, and that nobody has looked at.
    pub(crate) fn left(&self) -> Vec<Message> {
        let failed = std::mem::take(&mut *lock(&self.failed));
        failed.calls.iter().filter_map(Weak::upgrade).filter_map(|call| notice(&call, &mut call.lock())).collect()
    }
}

/// A notice of a call's first failure, with the number of the others; none if somebody has seen them.
fn notice(call: &Call, state: &mut State) -> Option<Message> {
    let callee = call.callee.get()?;
    if std::mem::replace(&mut state.looked, true) {
        return None;
    }
    let mut failures = state.outcomes.as_ref()?.iter().enumerate().filter_map(|(place, outcome)| match outcome {
        Outcome::Replied(reply) if is_failure(reply) => Some((place, reply)),
        _ => None,
    });
    let (place, first) = failures.next()?;
    let from = callee.target.place(place)?;
    let what = match first.meaning() {
        Meaning::Undeliverable(returned) if returned.port_ended => Unlooked::PortEnded,
        Meaning::Undeliverable(_) => Unlooked::Returned,
        _ => Unlooked::Raised,
    };
    let unseen = Notice { others: failures.count() as u64, what };
    let name = Name { shape: shortened(&callee.actor), ..Name::of(shortened(&callee.endpoint)) };
    Some(Message::plain(unseen.frame(from, name, &first.envelope())))
}

fn shortened(name: &str) -> &[u8] {
    &name.as_bytes()[..name.len().min(LONGEST)]
}
