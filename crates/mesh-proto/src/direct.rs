//! Direct links: which messages of a proc go straight to another proc of its host instead of by way of their agent, and in
//! which order a proc takes what comes by several ways.
//!
//! A proc that has sent another one enough messages by way of the agent asks for a link. The agent makes one and gives
//! each of the two an end. From then on the link is two one-way streets, and each end decides about its own:
//!
//! 1. An end that it has no use for is refused. Otherwise it reads it, and tells the other that it is ready.
//! 2. An end whose other is ready sends by the link whatever it sends while the agent has handed on all that it had sent
//!    there before; the rest goes by way of the agent.
//! 3. An end stops by closing its way after the last message; what it sends then goes by way of the agent again.
//!
//! DIR-1: messages of one proc to another keep their order, whichever way each of them went (ORD-1).
//! DIR-2: what a link accepts is read by its other end, unless one of the two dies.
//! DIR-3: a proc has at most so many links, not counting those that are ending. A link that was used within the last second
//! gives way to no other.
//! DIR-4: of what the procs of a host send, a proc takes causes before their effects, whoever has sent them and whichever
//! way each of them went. A way whose other end has accepted something and then stands still is waited for only so long.
//!
//! For DIR-1 and DIR-4 each frame has the time at which its last link accepted it, by the clock of the host, and each end of a
//! link shows how many frames it has accepted ([`choose`]). What is on the way by the agent has no such time yet, so
//! nothing else is sent past it (2).

use crate::{LinkId, ProcAddr};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// So many messages by way of the agent make it worth while to ask for a link.
const FIRST: u32 = 32;
/// If that brings none, it asks again after this many times as many.
const PATIENCE: u32 = 8;
const MOST_PATIENT: u32 = 1 << 20;
/// A link that was not used for this long may make room for another.
const QUIET: Duration = Duration::from_secs(1);
/// Of how many procs the messages are counted.
const COUNTED: usize = 4096;

/// What a message by way of the agent gives reason to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Nothing.
    None,
    /// The agent should be asked for a link.
    Ask,
    /// This link should end, so that there is room for another one.
    MakeRoom(LinkId),
}

/// What follows from the end of what the other end sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// This end should stop too ([`DirectPlan::stopped`]).
    Stop,
    /// The link is over.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The other end is not known to be ready.
    Waiting,
    Open,
    Closed,
}

/// What a proc knows of one way by which messages come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// When the next frame was sent, of those that are here.
    pub next: Option<u64>,
    /// When the last one was that was here.
    pub last: u64,
    /// The other end has accepted more than is here, and is waited for.
    pub is_behind: bool,
}

/// What a proc does next with what is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// It takes the next frame of this way.
    Take(usize),
    /// There is nothing.
    Nothing,
    /// It looks again: what is here was sent after it looked.
    LookAgain,
    /// It waits for a way that is behind, as something older may come by it.
    Wait,
}

/// What is taken next of what is here, by a proc that looked at `until` how much each way has accepted, and read that much
/// of it if it was there (DIR-4).
///
/// Whatever was sent until then has its causes among what was accepted by then, and they were sent earlier. So the oldest
/// frame is next, unless it is younger than the last one of a way that is behind, where an older one may come.
#[must_use]
pub fn choose(ways: impl IntoIterator<Item = Incoming>, until: u64) -> Choice {
    let mut oldest: Option<(u64, usize)> = None;
    let mut bound = u64::MAX;
    for (at, way) in ways.into_iter().enumerate() {
        match way.next {
            Some(sent) if oldest.is_none_or(|(least, _)| sent < least) => oldest = Some((sent, at)),
            Some(_) => {}
            None if way.is_behind => bound = bound.min(way.last),
            None => {}
        }
    }
    match oldest {
        None => Choice::Nothing,
        Some((sent, _)) if sent >= bound => Choice::Wait,
        Some((sent, _)) if sent > until => Choice::LookAgain,
        Some((_, at)) => Choice::Take(at),
    }
}

#[derive(Debug)]
struct Count {
    sent: u32,
    /// So many are reason to ask.
    needed: u32,
}

impl Default for Count {
    fn default() -> Self {
        Self { sent: 0, needed: FIRST }
    }
}

#[derive(Debug)]
struct Link {
    peer: ProcAddr,
    out: Way,
    /// The other end sends nothing more, and all that it sent was read.
    has_ended: bool,
    /// Since the last sweep.
    used: AtomicBool,
}

/// The state machine; see the module.
#[derive(Debug)]
pub struct DirectPlan {
    most: usize,
    counts: HashMap<ProcAddr, Count>,
    links: HashMap<LinkId, Link>,
    /// The links by which messages go.
    open: HashMap<ProcAddr, LinkId>,
    /// When links were last marked as unused.
    swept: Option<Duration>,
}

impl DirectPlan {
    /// Those of a proc that may have so many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, counts: HashMap::new(), links: HashMap::new(), open: HashMap::new(), swept: None }
    }

    // Sending.

    /// The link by which a message to this proc goes now; none if it goes by way of the agent.
    pub fn way(&self, to: ProcAddr) -> Option<LinkId> {
        let id = *self.open.get(&to)?;
        self.links.get(&id)?.used.store(true, Ordering::Relaxed);
        Some(id)
    }

    /// The procs to which messages go by links.
    pub fn ways(&self) -> impl Iterator<Item = (ProcAddr, LinkId)> + '_ {
        self.open.iter().map(|(peer, id)| (*peer, *id))
    }

    /// A message went to a proc of this host by way of the agent.
    pub fn routed(&mut self, to: ProcAddr, now: Duration) -> Reason {
        if self.most == 0 || self.open.contains_key(&to) {
            return Reason::None;
        }
        if self.counts.len() >= COUNTED && !self.counts.contains_key(&to) {
            self.counts.clear();
        }
        let count = self.counts.entry(to).or_default();
        count.sent += 1;
        if count.sent < count.needed {
            return Reason::None;
        }
        count.sent = 0;
        if self.has_room() {
            self.be_patient(to);
            return Reason::Ask;
        }
        self.unused(now).map_or(Reason::None, Reason::MakeRoom)
    }

    fn has_room(&self) -> bool {
        self.links.values().filter(|link| link.out != Way::Closed).count() < self.most
    }

    /// A link that nobody uses, to make room for another.
    fn unused(&mut self, now: Duration) -> Option<LinkId> {
        if self.swept.is_some_and(|at| now < at.saturating_add(QUIET)) {
            return None;
        }
        self.swept = Some(now);
        let links = self.links.iter_mut();
        let idle = links.filter_map(|(id, link)| {
            let used = std::mem::replace(link.used.get_mut(), false);
            (link.out == Way::Open && !used).then_some(*id)
        });
        idle.min()
    }

    // Links that come.

    /// An end of a link to `peer` came from the agent: it is read from now on. False if it is refused.
    pub fn offered(&mut self, id: LinkId, peer: ProcAddr) -> bool {
        let taken = self.links.contains_key(&id);
        let has_one = self.links.values().any(|link| link.peer == peer && link.out != Way::Closed);
        if taken || has_one || !self.has_room() {
            self.be_patient(peer);
            return false;
        }
        let link = Link { peer, out: Way::Waiting, has_ended: false, used: AtomicBool::new(true) };
        self.links.insert(id, link);
        true
    }

    fn be_patient(&mut self, peer: ProcAddr) {
        let count = self.counts.entry(peer).or_default();
        count.needed = count.needed.saturating_mul(PATIENCE).min(MOST_PATIENT);
    }

    /// The other end is ready: messages go by the link from now on. False if this one has no use for it any more.
    pub fn ready(&mut self, id: LinkId, from: ProcAddr) -> bool {
        let Some(link) = self.links.get_mut(&id).filter(|link| link.peer == from && link.out == Way::Waiting) else {
            return false;
        };
        link.out = Way::Open;
        self.open.insert(from, id);
        self.counts.remove(&from);
        true
    }

    /// The other end was refused. True if this one is dropped.
    pub fn refused(&mut self, id: LinkId, from: ProcAddr) -> bool {
        if !self.links.get(&id).is_some_and(|link| link.peer == from && link.out == Way::Waiting) {
            return false;
        }
        self.links.remove(&id);
        self.be_patient(from);
        true
    }

    // Links that end.

    /// The other end sends nothing more, and all that it sent was read.
    pub fn heard_end(&mut self, id: LinkId) -> Heard {
        let Some(link) = self.links.get_mut(&id) else { return Heard::Over };
        link.has_ended = true;
        if link.out == Way::Open {
            return Heard::Stop;
        }
        self.links.remove(&id);
        Heard::Over
    }

    /// Whether the other end sends nothing more, while this one still does.
    #[must_use]
    pub fn is_ending(&self, id: LinkId) -> bool {
        self.links.get(&id).is_some_and(|link| link.has_ended && link.out == Way::Open)
    }

    /// Nothing more is sent by the link, and the other end can tell. True if the link is over.
    pub fn stopped(&mut self, id: LinkId) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return true };
        link.out = Way::Closed;
        let (peer, over) = (link.peer, link.has_ended);
        if self.open.get(&peer) == Some(&id) {
            self.open.remove(&peer);
        }
        if over {
            self.links.remove(&id);
        }
        over
    }

    /// A proc has ended. Returns the links to it, which are over.
    pub fn lost(&mut self, peer: ProcAddr) -> Vec<LinkId> {
        self.counts.remove(&peer);
        self.open.remove(&peer);
        self.links.extract_if(|_, link| link.peer == peer).map(|(id, _)| id).collect()
    }
}
