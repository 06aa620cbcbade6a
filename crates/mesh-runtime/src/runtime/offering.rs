//! Large parts that travel by a bypass, at their sender: it keeps and offers them, as it does values for references.
//! Tickets replace them in their messages; how they arrive is [`super::landing`].

use super::Runtime;
use super::landing::{Ground, Landings};
use super::outgoing::Body;
use crate::buffer::Buffer;
use crate::bypass::Bypass;
use crate::gateway::is_mapped;
use crate::refs::{Hold, RefAddr};
use mesh_proto::messages::Extend;
use mesh_proto::{Frame, Header, Kind, Part, ProcAddr, Target, Ticket, Undelivered};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// The extension asked for a bypass when the first part large enough for one is sent.
const ASKED: &str = ".bypass";
/// Shorter parts are not worth it.
const WORTH: usize = 1 << 20;
const PAGE: u64 = 4096;

impl Ground for Runtime {
    type Hold = Arc<Hold>;

    fn weak(&self) -> Weak<Self> {
        Self::weak(self)
    }

    fn landings(&self) -> &Landings<Arc<Hold>> {
        &self.landings
    }

    fn road(&self) -> Option<Bypass> {
        self.bypass().map(|(bypass, _)| bypass)
    }

    fn new_id(&self) -> u64 {
        Self::new_id(self)
    }

    fn hold(&self, part: RefAddr, ticket: Ticket) -> Arc<Hold> {
        self.hold_under(part, &[ticket])
    }

    fn take_in(&self, frame: Frame) {
        Self::take_in(self, frame);
    }

    fn lose(&self, header: &Header) {
        self.refuse(header);
        self.undeliverable(header, Undelivered::NoActor);
    }
}

impl Runtime {
    /// Makes parts of `from` bytes and more travel by the bypass from now on, or says that there is none. Only the
    /// first call counts.
    pub fn set_bypass(&self, bypass: Option<(Bypass, usize)>) {
        self.road.set(bypass);
    }

    fn bypass(&self) -> Option<(Bypass, usize)> {
        self.road.get(|| {
            let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
            self.inboxes.notice(Frame::build(header, None, ASKED.as_bytes(), &[]));
        })
    }

    /// Offers a message's large buffers, if it is for one process of another host. None if nothing is offered.
    pub(crate) fn carry_past(&self, kind: Kind, target: &Target, body: &Body<'_>) -> Option<Vec<Option<Part>>> {
        let Target::One(to) = target else { return None };
        if to.host == self.me.host || to.is_agent() && *to != ProcAddr::CONTROLLER || !is_mapped(kind) {
            return None;
        }
        if !body.parts().any(|data| data.len() >= WORTH) {
            return None;
        }
        let (bypass, from) = self.bypass()?;
        let offer = |data: Buffer<'_>| if data.len() < from.max(WORTH) { None } else { self.offer(bypass, data, *to) };
        let parts: Vec<Option<Part>> = body.parts().map(offer).collect();
        parts.iter().any(Option::is_some).then_some(parts)
    }

    /// Keeps a copy of a part, and offers it to its receiver.
    fn offer(&self, bypass: Bypass, data: Buffer<'_>, to: ProcAddr) -> Option<Part> {
        let len = data.len() as u64;
        let cost = len.next_multiple_of(PAGE);
        if !self.refs.reserve_now(cost) {
            return None;
        }
        let Some(room) = self.memory.keep_room(data.len(), &Target::One(self.me)) else {
            self.refs.unreserve(cost, None);
            return None;
        };
        room.lay(0, data, self.board.spare());
        let place = room.place();
        // SAFETY: `place` keeps it mapped and unchanged until the value is given back, which waits for the offer.
        let Some((offer, ticket)) = (unsafe { bypass.offer(place.at, len) }) else {
            drop(room);
            self.refs.unreserve(cost, None);
            return None;
        };
        self.road.offered.fetch_add(1, Ordering::Relaxed);
        let (id, held) = self.refs.keep_offered(room.done(), (len, cost), (offer, place), to, self);
        Some(Part::Distant { id, held, len, ticket: ticket.into() })
    }
}
