//! Direct links between the procs of a host: at an agent, how they are made; at a proc, how they come and what comes by
//! them. What goes by them is in [`super::direct_links`].

use super::{Runtime, UP};
use crate::link::{Link, now, socket_number};
use mesh_proto::control::Direct;
use mesh_proto::{EndReason, Frame, LinkId, ProcAddr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many rounds of reading are made before others get a turn.
const PASSES: u32 = 64;

/// Reads those links that have something.
fn fill(links: &[Arc<Link>]) {
    let mut fds: Vec<PollFd<'_>> =
        links.iter().map(|link| PollFd::from_borrowed_fd(link.socket(), PollFlags::IN)).collect();
    if poll(&mut fds, Some(&Timespec::default())).is_ok() {
        let ready = fds.iter().zip(links).filter(|(fd, _)| !fd.revents().is_empty());
        ready.for_each(|(_, link)| link.fill());
    }
}

impl Runtime {
    /// A frame about direct links.
    pub(super) fn on_direct(&self, frame: &Frame) {
        let from = frame.header.src;
        let Some(said) = Direct::read(frame) else { return };
        match said {
            Direct::Ask(to) => self.link_procs(from, to),
            Direct::Passed(ranks, passed) if self.me.is_agent() => {
                let link = self.switch.link_of(from).map(|link| link.id);
                self.switch.dispatch_past(self, passed, link, &ranks);
            }
            Direct::Offer(id, peer, socket) if from.is_agent() => self.on_offer(id, peer, socket),
            Direct::Ready(id) => {
                if let Some(up) = self.switch.link(UP).filter(|_| !self.me.is_agent()) {
                    self.switch.direct.begin(&up, id, from);
                }
            }
            Direct::Refused(id) => self.switch.direct.refused(id, from),
            Direct::Begun(id) => self.switch.direct.begun(id, from),
            Direct::Passed(..) | Direct::Offer(..) => {}
        }
    }

    /// At an agent: makes a link between two of its procs.
    fn link_procs(&self, one: ProcAddr, other: ProcAddr) {
        let is_proc = |addr: ProcAddr| addr.host == self.me.host && !addr.is_agent() && !addr.is_guest();
        if !self.me.is_agent() || one == other || !is_proc(one) || !is_proc(other) {
            return;
        }
        let (Some(to_one), Some(to_other)) = (self.switch.link_of(one), self.switch.link_of(other)) else { return };
        // Sockets do not wait here for a proc that does not read. It is asked for again.
        if to_one.queued() > 0 || to_other.queued() > 0 {
            return;
        }
        let Some(id) = self.agent.join(one, other) else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // If there are no descriptors left, messages go on as before.
        let Ok(ends) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return };
        for (link, peer, end) in [(to_other, one, ends.0), (to_one, other, ends.1)] {
            let number = socket_number(end.as_fd()).unwrap_or_default();
            link.send_with(&self.reactor, &Direct::Offer(id, peer, number).frame(self.me, link.peer), end);
        }
    }

    fn on_offer(&self, id: LinkId, peer: ProcAddr, socket: u64) {
        let Some(up) = self.switch.link(UP) else { return };
        let link = up.take_socket(socket).map(|socket| Arc::new(Link::direct(id, peer, socket)));
        let watched = link.filter(|link| id != UP && link.register(&self.reactor).is_ok());
        let answer = if watched.is_some_and(|link| self.switch.direct.offered(&link)) {
            self.inboxes.expect_early();
            Direct::Ready(id)
        } else {
            Direct::Refused(id)
        };
        self.dispatch(answer.frame(self.me, peer), None);
    }

    /// A direct link is ready.
    pub(super) fn on_direct_ready(&self, link: &Arc<Link>, readable: bool, writable: bool) {
        if writable {
            link.flush(&self.reactor);
            self.switch.direct.stop_ending(link.id);
        }
        if readable && link.reads() {
            self.read_in_order();
        }
    }

    /// At a proc with direct links: takes what has come by all its links, in the order in which it was sent (DIR-4).
    ///
    /// Whatever was sent until some moment has its causes in these sockets by then: they were written before. So all sockets
    /// are read after that moment, and what was sent until then is taken in the order of the clock that all processes of the
    /// host share. What was sent later waits for the next round, as its causes may have come behind the reader's back.
    pub(super) fn read_in_order(&self) {
        let Some(up) = self.switch.link(UP) else { return };
        for pass in 1.. {
            // Those who never stop to send are not waited for: what was read is taken, and others get a turn.
            let until = if pass < PASSES { now() } else { u64::MAX };
            let (mut links, changes) = self.switch.direct.read_links();
            links.push(Arc::clone(&up));
            fill(&links);
            let is_done = self.take_until(&links, until, changes);
            let ends = links.iter().filter_map(|link| Some((link, link.take_end()?))).collect::<Vec<_>>();
            ends.into_iter().for_each(|(link, why)| self.on_link_end(link, why));
            if is_done {
                return;
            }
        }
    }

    /// Takes frames that were sent until then. False if there may be more: later ones, or the links have changed.
    fn take_until(&self, links: &[Arc<Link>], until: u64, changes: u64) -> bool {
        loop {
            let next = links.iter().filter_map(|link| Some((link.next_sent()?, link)));
            let Some((sent, link)) = next.min_by_key(|(sent, _)| *sent) else { return true };
            if sent > until {
                return false;
            }
            let Some(frame) = link.take() else { return true };
            // A proc speaks only for itself.
            let header = &frame.header;
            if link.id == UP || header.src == link.peer && header.dst == self.me && header.target_len == 0 {
                if header.is_abroad() {
                    self.inboxes.expect_early();
                }
                self.dispatch(frame, Some(link.id));
            }
            if self.switch.direct.changes() != changes {
                return false;
            }
        }
    }

    fn on_link_end(&self, link: &Arc<Link>, why: EndReason) {
        if link.id == UP {
            return self.link_ended(link, why);
        }
        match why {
            EndReason::ConnectionClosed(_) => {
                link.stop_reading(&self.reactor);
                self.switch.direct.heard_end(link.id);
            }
            // Its process has died, or makes no frames. What is sent to it from now on goes to the agent, who knows.
            _ => self.switch.direct.lose(link.peer),
        }
    }

    /// Writes out what waits for direct links.
    pub(super) fn drain_links(&self, limit: Duration) {
        let end = Instant::now() + limit;
        for link in self.switch.direct.all() {
            link.drain(&self.reactor, end.saturating_duration_since(Instant::now()));
        }
    }
}
