//! The descriptors that the reactor sleeps on: one epoll set with all links, and one with that set for the I/O thread.
//!
//! In the models, `models/sets.rs` replaces this file.

use crate::error::RuntimeError;
use crate::timespec::timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

const BATCH: usize = 64;
const TOKEN_WAKE: u64 = u64::MAX;
const TOKEN_INNER: u64 = u64::MAX - 1;
const TOKEN_IO: u64 = u64::MAX - 2;

/// What ended a sleep of the I/O thread; neither for a timeout or an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roused {
    /// Another thread rang for it.
    pub(crate) rung: bool,
    /// A link is readable, and no thread leads.
    pub(crate) readable: bool,
}

/// The two sets, and what wakes the threads that sleep on them.
#[derive(Debug)]
pub(crate) struct Sets {
    inner: OwnedFd,
    outer: OwnedFd,
    /// Wakes a leader that blocks; in the inner set.
    wake: OwnedFd,
    /// Wakes only the I/O thread; in the outer set.
    io: OwnedFd,
}

fn event_fd() -> Result<OwnedFd, RuntimeError> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(RuntimeError::os("eventfd"))
}

fn drain(fd: &OwnedFd) {
    let mut word = [0_u8; 8];
    let _ = rustix::io::read(fd, &mut word);
}

fn ring(fd: &OwnedFd) {
    // Full means rung already.
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

impl Sets {
    pub(crate) fn new() -> Result<Self, RuntimeError> {
        let os = RuntimeError::os;
        let inner = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let outer = epoll::create(CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let wake = event_fd()?;
        let io = event_fd()?;
        epoll::add(&inner, &wake, EventData::new_u64(TOKEN_WAKE), EventFlags::IN).map_err(os("epoll_ctl"))?;
        epoll::add(&outer, &inner, EventData::new_u64(TOKEN_INNER), EventFlags::IN).map_err(os("epoll_ctl"))?;
        epoll::add(&outer, &io, EventData::new_u64(TOKEN_IO), EventFlags::IN).map_err(os("epoll_ctl"))?;
        Ok(Self { inner, outer, wake, io })
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), RuntimeError> {
        epoll::add(&self.inner, fd, EventData::new_u64(token), EventFlags::IN).map_err(RuntimeError::os("epoll_ctl"))
    }

    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u64, write: bool) {
        self.watch_ways(fd, token, true, write);
    }

    pub(crate) fn watch_ways(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) {
        let flags = match (read, write) {
            (true, true) => EventFlags::IN | EventFlags::OUT,
            (true, false) => EventFlags::IN,
            (false, true) => EventFlags::OUT,
            // The end of a descriptor is always reported; like this, once.
            (false, false) => EventFlags::ET,
        };
        // A descriptor that was removed meanwhile needs no watching.
        let _ = epoll::modify(&self.inner, fd, EventData::new_u64(token), flags);
    }

    pub(crate) fn watch_once(&self, fd: BorrowedFd<'_>, token: u64, first: bool) {
        let (flags, data) = (EventFlags::IN | EventFlags::ONESHOT, EventData::new_u64(token));
        if !first || epoll::add(&self.inner, fd, data, flags).is_err() {
            let _ = epoll::modify(&self.inner, fd, data, flags);
        }
    }

    pub(crate) fn watch_end(&self, fd: BorrowedFd<'_>, token: u64) {
        let _ = epoll::modify(&self.inner, fd, EventData::new_u64(token), EventFlags::empty());
    }

    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.inner, fd);
    }

    /// Sets whether a readable link wakes the I/O thread.
    pub(crate) fn arm(&self, armed: bool) {
        let flags = if armed { EventFlags::IN } else { EventFlags::empty() };
        let _ = epoll::modify(&self.outer, &self.inner, EventData::new_u64(TOKEN_INNER), flags);
    }

    pub(crate) fn ring_leader(&self) {
        ring(&self.wake);
    }

    pub(crate) fn ring_io(&self) {
        ring(&self.io);
    }

    /// Consumes a ring, so that the I/O thread's next sleep lasts until the next one.
    pub(crate) fn hear_io(&self) {
        drain(&self.io);
    }

    /// Sleeps until there is something for the I/O thread.
    pub(crate) fn wait_as_io(&self, limit: Option<Duration>) -> Roused {
        let mut buffer = [MaybeUninit::<Event>::uninit(); 2];
        let polled = epoll::wait(&self.outer, &mut buffer, limit.map(timespec).as_ref());
        let events = polled.map_or(&[] as &[Event], |(events, _)| events);
        let among = |token| events.iter().any(|event| event.data.u64() == token);
        Roused { rung: among(TOKEN_IO), readable: among(TOKEN_INNER) }
    }

    /// Sleeps until a link is ready or [`Sets::ring_leader`] is called. Calls `woken`, then `on_ready` for each ready
    /// link with its token and whether it is readable and writable. What is watched under the token `first` comes before all
    /// others, and also if more may be ready than can be said at once.
    pub(crate) fn poll_links(
        &self,
        limit: Option<Duration>,
        first: u64,
        woken: impl FnOnce(),
        mut on_ready: impl FnMut(u64, bool, bool),
    ) {
        let mut buffer = [MaybeUninit::<Event>::uninit(); BATCH];
        let polled = epoll::wait(&self.inner, &mut buffer, limit.map(timespec).as_ref());
        woken();
        let Ok((events, _)) = polled else {
            return; // A signal, which comes by its descriptor too.
        };
        // Before anything is handled: what rings meanwhile wants another poll.
        if events.iter().any(|event| event.data.u64() == TOKEN_WAKE) {
            drain(&self.wake);
        }
        if events.len() == BATCH || events.iter().any(|event| event.data.u64() == first) {
            on_ready(first, true, false);
        }
        for event in &*events {
            let token = event.data.u64();
            if token == first || token == TOKEN_WAKE {
                continue;
            }
            let flags = event.flags;
            let readable = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
            on_ready(token, readable, flags.contains(EventFlags::OUT));
        }
    }
}
