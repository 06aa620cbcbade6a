//! Direct links between the procs of a host: at an agent, how they are made; at a proc, how they come and what comes by
//! them. What goes by them is in [`super::direct_links`].

use super::{Runtime, UP};
use crate::link::{Link, socket_number};
use crate::link_page::{End, LinkPage};
use crate::timespec::now;
use mesh_proto::control::Direct;
use mesh_proto::{Choice, EndReason, Frame, Incoming, LinkId, ProcAddr, choose};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many rounds of reading are made before others get a turn.
const PASSES: u32 = 64;

impl Runtime {
    /// A frame about direct links.
    pub(super) fn on_direct(&self, frame: &Frame) {
        let from = frame.header.src;
        match Direct::read(frame) {
            Some(Direct::Ask(to)) => self.link_procs(from, to),
            Some(Direct::Offer(id, peer, socket)) if from.is_agent() => self.on_offer(id, peer, socket),
            Some(Direct::Ready(id)) => self.switch.direct.ready(id, from),
            Some(Direct::Refused(id)) => self.switch.direct.refused(id, from),
            Some(Direct::Offer(..)) | None => {}
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
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // If there are no descriptors left, messages go on as before.
        let Ok(ends) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return };
        let Ok(page) = LinkPage::create() else { return };
        let Ok(same_page) = page.try_clone() else { return };
        let Some(id) = self.agent.join(one, other) else { return };
        self.switch.expect_links();
        for (link, peer, end, page) in [(to_other, one, ends.0, page), (to_one, other, ends.1, same_page)] {
            let number = socket_number(end.as_fd()).unwrap_or_default();
            // With its first link, a proc gets the page of the one to its agent. Without that it takes no link.
            let own = link.offer_page().ok().flatten();
            let with = [end, page].into_iter().chain(own).collect();
            link.send_with(&self.reactor, &Direct::Offer(id, peer, number).frame(self.me, link.peer), with);
        }
    }

    fn on_offer(&self, id: LinkId, peer: ProcAddr, socket: u64) {
        let Some(up) = self.switch.link(UP) else { return };
        let with = up.take_with(socket).filter(|_| id != UP);
        let link = with.and_then(|with| {
            let mut with = with.into_iter();
            let (socket, page) = (with.next()?, with.next()?);
            if !up.has_page() {
                up.set_page(LinkPage::open(with.next()?, End::Second).ok()?);
            }
            let end = if self.me < peer { End::First } else { End::Second };
            let link = Arc::new(Link::direct(id, peer, socket, LinkPage::open(page, end).ok()?));
            link.register(&self.reactor).ok()?;
            Some(link)
        });
        let answer = if link.is_some_and(|link| self.switch.direct.offered(&link)) {
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
            link.note_readable();
            self.read_in_order();
        }
    }

    /// At a proc that has had direct links: takes what has come by all its links, causes before their effects (DIR-4).
    pub(super) fn read_in_order(&self) {
        let Some(up) = self.switch.link(UP) else { return };
        for _ in 0..PASSES {
            let until = now();
            let (mut links, changes) = self.switch.direct.read_links();
            links.push(Arc::clone(&up));
            let mut ways: Vec<Incoming> = links.iter().map(|link| link.look(&self.reactor)).collect();
            let choice = self.take_until(&links, &mut ways, until, changes);
            let ends: Vec<_> = links.iter().filter_map(|link| Some((link, link.take_end()?))).collect();
            let has_ended = !ends.is_empty();
            ends.into_iter().for_each(|(link, why)| self.on_link_end(link, why));
            match choice {
                _ if has_ended => {}
                Choice::Nothing => return self.switch.direct.waits_for_none(),
                Choice::Wait => {
                    let late = self.switch.direct.wait_for(&links);
                    if late.is_empty() {
                        return;
                    }
                    self.inboxes.expect_early();
                    late.into_iter().for_each(Link::give_up);
                }
                Choice::Take(_) | Choice::LookAgain => {}
            }
        }
        // Those who never stop to send are not waited for: others get a turn.
        self.switch.direct.read_again();
    }

    /// Takes frames in their order until none is left to take, or the links have changed. Returns why it ends.
    fn take_until(&self, links: &[Arc<Link>], ways: &mut [Incoming], until: u64, changes: u64) -> Choice {
        loop {
            let choice = choose(ways.iter().copied(), until);
            let Choice::Take(at) = choice else { return choice };
            let (Some(link), Some(way)) = (links.get(at), ways.get_mut(at)) else { return choice };
            let Some(frame) = link.take() else { return choice };
            // A proc speaks only for itself.
            let header = &frame.header;
            if link.id == UP || header.src == link.peer && header.dst == self.me && header.target_len == 0 {
                if header.is_abroad() {
                    self.inboxes.expect_early();
                }
                self.dispatch(frame, Some(link.id));
            }
            if self.switch.direct.changes() != changes {
                return choice;
            }
            *way = link.incoming();
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
