//! Copies of other hosts' values, which an agent keeps for all processes of its host; see [`mesh_proto::Copies`].

use crate::dispatch::Dispatch;
use crate::locks::lock;
use crate::shm::Memory;
use mesh_proto::control::{Fetch, Held, Holding, Undeliverable};
use mesh_proto::messages::{Answer, Meaning, Reply};
use mesh_proto::{Asker, Copies, Frame, Header, Kind, Part, ProcAddr, SharedRef, Sharing, ValueKey, Wanted};
use std::sync::{Arc, Mutex};

/// Where a copy is, and its length.
type Place = (SharedRef, u64);

/// See the module.
#[derive(Debug)]
pub(crate) struct RemoteValues {
    me: ProcAddr,
    memory: Arc<Memory>,
    copies: Mutex<Copies<Place>>,
}

impl RemoteValues {
    pub(crate) fn new(me: ProcAddr, memory: &Arc<Memory>) -> Self {
        Self { me, memory: Arc::clone(memory), copies: Mutex::default() }
    }

    /// The number of copies here.
    pub(crate) fn len(&self) -> usize {
        lock(&self.copies).len()
    }

    /// References are about to reach a process of this host. Returns the owners whose ends must be asked for.
    pub(crate) fn note_carried(&self, frame: &Frame) -> Vec<ProcAddr> {
        let mut owners = Vec::new();
        let mut copies = lock(&self.copies);
        for one in frame.carried().into_iter().filter(|one| one.owner.host != self.me.host) {
            if copies.held((one.owner, one.id), frame.header.dst) && !one.owner.is_agent() {
                owners.push(one.owner);
            }
        }
        owners
    }

    /// A frame of a process of this host is on its way to another host. True if it asks for a value answered here.
    pub(crate) fn answers(&self, frame: &Frame, out: &impl Dispatch) -> bool {
        if !self.me.is_agent() || frame.header.src.host != self.me.host {
            return false;
        }
        match frame.header.kind {
            Kind::Fetch => self.answer(&frame.header, out),
            Kind::Held => {
                self.let_go(frame);
                false
            }
            _ => false,
        }
    }

    fn answer(&self, header: &Header, out: &impl Dispatch) -> bool {
        let Some(Fetch { id, call }) = Fetch::read(header) else { return false };
        let value = (header.dst, id);
        let asker = Asker { proc: header.src, call };
        let (at, len) = {
            let mut copies = lock(&self.copies);
            match copies.ask(value, asker) {
                Wanted::Fetch => return false,
                Wanted::Wait => return true,
                // It stays until this process lets go, whatever becomes of the copy.
                Wanted::Here((at, len)) if self.memory.lend_to(&at, asker.proc) => (at, len),
                Wanted::Here(_) => return false,
            }
        };
        let mut reply = reply(value, asker);
        reply.set_sharing(Sharing { sole: false, shared: true });
        let parts = [Part::Inline(bytes::Bytes::new()), Part::Shared { at, len }];
        out.dispatch(Frame::build(reply, None, b"", &parts));
        true
    }

    /// A process of this host tells a value's owner which processes no longer hold it.
    fn let_go(&self, frame: &Frame) {
        let (owner, src) = (frame.header.dst, frame.header.src);
        if lock(&self.copies).is_empty() {
            return;
        }
        let Some(Held { call, news, .. }) = Held::read(frame) else { return };
        let gone = match news {
            Holding::LetGo(_) => vec![src],
            Holding::Unsent { to, .. } => to,
            Holding::Loose | Holding::Given { .. } | Holding::Read(_) => return,
        };
        let dropped: Vec<Place> = {
            let mut copies = lock(&self.copies);
            gone.into_iter().filter_map(|one| copies.let_go((owner, call), one)).collect()
        };
        self.drop_copies(&dropped);
    }

    /// Whether this answers a fetch made on behalf of all processes of this host.
    pub(crate) fn awaits(&self, header: &Header) -> bool {
        let Ok(said) = Meaning::of(header) else { return false };
        lock(&self.copies).is_coming(Asker { proc: header.dst, call: said.call() })
    }

    fn drop_copies(&self, dropped: &[Place]) {
        dropped.iter().for_each(|(at, _)| self.memory.take_back(at, self.me));
    }

    /// An answer from another host has arrived. If its value was fetched on behalf of all processes of this host, the
    /// others that wait for it are answered as well. Returns the answer for its own receiver.
    pub(crate) fn share(&self, frame: Frame, out: &impl Dispatch) -> Frame {
        let header = frame.header;
        let Ok(said) = Meaning::of(&header) else { return frame };
        let lead = Asker { proc: header.dst, call: said.call() };
        let (mut shared, mut others) = (None, Vec::new());
        lock(&self.copies).arrived(lead, |value, waiting, wanted| {
            let many = shared_by_many(&frame);
            let parts = frame.parts().unwrap_or_default();
            let place = parts.iter().find_map(|part| match part {
                Part::Shared { at, len } => Some((*at, *len)),
                Part::Inline(_) | Part::Distant { .. } => None,
            });
            for other in waiting {
                if place.is_none_or(|(at, _)| self.memory.lend_to(&at, other.proc)) {
                    others.push(answer(value, *other, &many));
                }
            }
            shared = Some(many);
            // Only what is in this process's own memory can stay.
            place.filter(|(at, _)| wanted && header.kind == Kind::Reply && self.memory.lend_to(at, self.me))
        });
        for other in others {
            out.dispatch(other);
        }
        shared.unwrap_or(frame)
    }

    /// Processes have ended. Returns fetches to send again to other hosts for those that still wait: not through this
    /// module, which would take each for a second question (CPY-2).
    pub(crate) fn on_ends(&self, dead: impl Fn(ProcAddr) -> bool) -> Vec<Frame> {
        let after = {
            let mut copies = lock(&self.copies);
            if copies.is_empty() {
                return Vec::new();
            }
            copies.ended(dead)
        };
        self.drop_copies(&after.dropped);
        let fetch = after.fetch.into_iter();
        fetch.map(|((owner, id), asker)| Fetch { id, call: asker.call }.frame(asker.proc, owner)).collect()
    }
}

/// The same answer, for another process that waits for the value.
fn answer(value: ValueKey, to: Asker, share: &Frame) -> Frame {
    if let Some(refusal) = Undeliverable::read(share) {
        return Undeliverable { call: to.call, ..refusal }.frame(value.0, to.proc);
    }
    let mut header = reply(value, to);
    header.set_sharing(share.header.sharing());
    Frame::build(header, None, b"", &share.parts().unwrap_or_default())
}

fn reply((owner, _): ValueKey, to: Asker) -> Header {
    Reply { actor: 0, call: to.call, place: 0, answer: Answer::Value }.header(owner, to.proc)
}

/// The frame, marked so that several processes may read its large parts.
fn shared_by_many(frame: &Frame) -> Frame {
    let mut header = frame.header;
    header.set_sharing(Sharing { sole: false, ..header.sharing() });
    Frame { header, body: frame.body.clone() }
}
