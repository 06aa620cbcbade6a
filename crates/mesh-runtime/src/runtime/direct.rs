//! Direct links between the procs of a host: at an agent, how they are made; at a proc, how they come and what comes by
//! them. What goes by them is in [`super::shortcuts`].

use super::{Runtime, UP};
use crate::link::{Link, socket_number};
use mesh_proto::control::{Direct, down_of, may_go_direct};
use mesh_proto::{EndReason, Frame, Header, LinkId, ProcAddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a link is read before others get a turn.
const READS: usize = 64;
/// How often it is read at once, though its sender should have stopped: far more than a socket holds.
const MOST_READS: usize = 1024;

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
                    self.switch.shortcuts.begin(&up, id, from);
                }
            }
            Direct::Refused(id) => self.switch.shortcuts.refused(id, from),
            Direct::After(peer) if from.is_agent() => self.take_links_of(peer),
            Direct::Begun(id) => {
                // It may have had another link, by which it sends nothing more.
                self.take_links_of(from);
                if let Some(link) = self.switch.shortcuts.begun(id, from) {
                    link.start_reading(&self.reactor);
                }
            }
            Direct::Passed(..) | Direct::Offer(..) | Direct::After(_) => {}
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
        let answer = if watched.is_some_and(|link| self.switch.shortcuts.offered(&link)) {
            self.inboxes.expect_early();
            Direct::Ready(id)
        } else {
            Direct::Refused(id)
        };
        self.dispatch(answer.frame(self.me, peer), None);
    }

    /// A frame comes from the agent: takes first what came by direct links before it and has something to do with it. Not
    /// more: what a link has by now may be due to what the agent has sent behind this frame.
    pub(super) fn take_before(&self, header: &Header) {
        if self.switch.shortcuts.is_empty() {
            return;
        }
        if let Some(who) = down_of(header) {
            self.take_links_of(who);
        } else if may_go_direct(header.kind) && !header.src.is_agent() {
            // Its sender has stopped to send by a link.
            self.take_links_of(header.src);
        }
    }

    /// Takes what a proc has sent by links, and sends no more.
    fn take_links_of(&self, peer: ProcAddr) {
        for link in self.switch.shortcuts.from(peer) {
            for _ in 0..MOST_READS {
                if !self.read_some(&link, false) {
                    break;
                }
            }
        }
    }

    /// A direct link is ready.
    pub(super) fn on_direct_ready(&self, link: &Arc<Link>, readable: bool, writable: bool) {
        if writable {
            link.flush(&self.reactor);
            self.switch.shortcuts.stop_ending(link.id);
        }
        if readable && link.reads() {
            for _ in 0..READS {
                if !self.read_some(link, true) {
                    break;
                }
            }
        }
    }

    /// Reads once, and takes the frames that have come; with `first_up`, after what came from the agent before these.
    /// Returns whether more may have come.
    fn read_some(&self, link: &Arc<Link>, first_up: bool) -> bool {
        let filled = link.fill();
        if first_up && let Some(up) = self.switch.link(UP) {
            self.read_link(&up, false);
        }
        let taken = self.take_from(link);
        match filled.and_then(|more| taken.map(|()| more)) {
            Ok(more) => more,
            Err(EndReason::ConnectionClosed(_)) => {
                link.stop_reading(&self.reactor);
                self.switch.shortcuts.heard_end(link.id);
                false
            }
            Err(_) => {
                // Its process has died, or makes no frames. What is sent to it from now on goes to the agent, who knows.
                self.switch.shortcuts.lose(link.peer);
                false
            }
        }
    }

    fn take_from(&self, link: &Link) -> Result<(), EndReason> {
        while let Some(frame) = link.next()? {
            let header = &frame.header;
            // A proc speaks only for itself.
            if header.src == link.peer && header.dst == self.me && header.target_len == 0 {
                self.dispatch(frame, Some(link.id));
            }
        }
        Ok(())
    }

    /// Writes out what waits for direct links.
    pub(super) fn drain_links(&self, limit: Duration) {
        let end = Instant::now() + limit;
        for link in self.switch.shortcuts.all() {
            link.drain(&self.reactor, end.saturating_duration_since(Instant::now()));
        }
    }
}
