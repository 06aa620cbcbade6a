//! At an agent: small messages of its own process that nobody waits for, and that are written together.
//!
//! A script that sends much to the actors of its host spends most of its time in system calls, a write and often a wake-up
//! for each message and receiver, and its receivers a read for each. So in a rush, when each message follows the one before
//! without a pause, most rest in their links ([`Link::rest`]), and are written a moment later: by the thread that sends
//! the next ones, before it waits or sends anything else, or by the I/O thread, if that thread turns to something else.
//!
//! BND-1: whatever else leaves this process, and whatever it passes on, is behind the messages that rested before it, on all
//! links. So causes still come before their effects: what a receiver sends to another comes by here, or by a direct link, and
//! nothing rests in the link to a process that has one.

use crate::link::{Hold, Link, Rest};
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::timespec::now;
use mesh_proto::Frame;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Nanoseconds between two messages that end a rush.
const PAUSE: u64 = 20_000;
/// So many messages of a rush are written at once. Often these are all.
const AT_ONCE: u32 = 8;
/// When the I/O thread writes what rests, if nobody else has. Later than whoever goes on sending would.
const LATEST: Duration = Duration::from_micros(350);

/// What goes by which link.
pub(super) type Shares = Vec<(Arc<Link>, Frame)>;

#[derive(Debug, Default)]
struct Resting {
    /// The links, in the order in which something has begun to rest there.
    links: Vec<Arc<Link>>,
    since: Option<Instant>,
    /// The I/O thread will look.
    tended: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Bundles {
    reactor: Arc<Reactor>,
    /// When the last message was sent, and how many there were before without a pause.
    last: AtomicU64,
    rush: AtomicU32,
    /// Something rests. Usually nothing does, and then the lock need not be taken.
    any: AtomicBool,
    /// Held while what rests is written: whoever finds nothing there comes after it (BND-1).
    resting: Mutex<Resting>,
}

impl Bundles {
    pub(super) fn new(reactor: &Arc<Reactor>) -> Self {
        Self {
            reactor: Arc::clone(reactor),
            last: AtomicU64::new(0),
            rush: AtomicU32::new(0),
            any: AtomicBool::new(false),
            resting: Mutex::default(),
        }
    }

    /// The process sends a message that nobody waits for, to one or to many. Returns the time, if the message may rest.
    pub(super) fn begin(&self) -> Option<u64> {
        let sent = now();
        let follows = sent.saturating_sub(self.last.load(Ordering::Relaxed)) < PAUSE;
        let before = if follows { self.rush.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.rush.store(before, Ordering::Relaxed);
        let rests = before >= AT_ONCE;
        if !rests {
            self.settle();
        }
        rests.then_some(sent)
    }

    /// It has been sent to all its receivers.
    pub(super) fn end(&self) {
        self.last.store(now(), Ordering::Relaxed);
    }

    /// Leaves it in the links to its receivers, to be written soon, and sends it as usual where it cannot rest. Nobody has it
    /// before it is on its way to all. Returns how many bytes wait for room behind it.
    pub(super) fn leave(&self, shares: &Shares, sent: u64) -> usize {
        let mut resting = lock(&self.resting);
        // First: what a receiver sends, as another thread has written its share, then waits for the lock.
        self.any.store(true, Ordering::SeqCst);
        let (mut refused, mut is_due) = (Vec::new(), false);
        for (link, frame) in shares {
            match link.rest(frame, sent) {
                Rest::Refused => refused.push((link, frame)),
                Rest::Begun { first } if first => resting.links.push(Arc::clone(link)),
                Rest::Begun { .. } => {}
                Rest::Due => is_due = true,
            }
        }
        let holds: Vec<Hold> = refused.iter().map(|(link, _)| link.hold(&self.reactor)).collect();
        for (link, frame) in &refused {
            link.send(&self.reactor, frame);
        }
        let mut most = holds.into_iter().map(Hold::release).max().unwrap_or(0);
        if is_due {
            self.write_all(&mut resting, true);
            most = shares.iter().map(|(link, _)| link.queued()).max().unwrap_or(0);
        } else if resting.links.is_empty() {
            self.any.store(false, Ordering::SeqCst);
        } else {
            resting.since.get_or_insert_with(Instant::now);
            if !std::mem::replace(&mut resting.tended, true) {
                self.reactor.ring_io();
            }
        }
        most
    }

    /// Writes what rests, before whatever the calling thread does next.
    #[inline]
    pub(super) fn settle(&self) {
        if self.any.load(Ordering::SeqCst) {
            self.write(true);
        }
    }

    #[cold]
    fn write(&self, more: bool) {
        self.write_all(&mut lock(&self.resting), more);
    }

    fn write_all(&self, resting: &mut Resting, more: bool) {
        for link in resting.links.drain(..) {
            link.write_bundle(&self.reactor, more);
        }
        resting.since = None;
        self.any.store(false, Ordering::SeqCst);
    }

    /// The I/O thread looks. Returns when to look again.
    pub(super) fn turn(&self) -> Option<Instant> {
        let mut resting = lock(&self.resting);
        let Some(since) = resting.since else {
            resting.tended = false;
            return None;
        };
        let due = since + LATEST;
        if Instant::now() < due {
            return Some(due);
        }
        self.write_all(&mut resting, false);
        // The rush may go on: then it costs no wake-up.
        Some(Instant::now() + LATEST)
    }
}
