//! Values of other hosts that this host's agent keeps a copy of, for all that are here; see [`mesh_proto::Copies`].

use super::{Runtime, lock};
use mesh_proto::control::{Fetch, Held, Holding, Undeliverable};
use mesh_proto::messages::{Answer, Meaning, Reply};
use mesh_proto::{Asker, Copies, Frame, Header, Kind, Part, ProcAddr, SharedRef, Sharing, ValueKey, Wanted};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a copy lies, and how long it is.
type Place = (SharedRef, u64);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RemoteValues {
    copies: Mutex<Copies<Place>>,
    /// How often this process was asked for a value of its own.
    pub(super) fetched: AtomicU64,
}

impl RemoteValues {
    /// How often this process was asked, and how many copies are here.
    pub(crate) fn counts(&self) -> (u64, usize) {
        (self.fetched.load(Ordering::Relaxed), lock(&self.copies).len())
    }
}

/// An answer for one more that wants a value that has come.
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

/// The frame, whose large parts several are going to read.
fn shared_by_many(frame: &Frame) -> Frame {
    let mut header = frame.header;
    header.set_sharing(Sharing { sole: false, ..header.sharing() });
    Frame { header, body: frame.body.clone() }
}

impl Runtime {
    /// References are about to reach a process of this host.
    pub(super) fn note_carried(&self, frame: &Frame) {
        let mut owners = Vec::new();
        {
            let mut copies = lock(&self.remote_values.copies);
            for one in frame.carried().into_iter().filter(|one| one.owner.host != self.me.host) {
                if copies.held((one.owner, one.id), frame.header.dst) && !one.owner.is_agent() {
                    owners.push(one.owner);
                }
            }
        }
        if !owners.is_empty() {
            self.watch_owners(owners);
        }
    }

    /// A process of this host asks another host for a value, or tells it that it has let go. True if that is answered here.
    pub(super) fn ask_for_copy(&self, frame: &Frame) -> bool {
        if !self.me.is_agent() || frame.header.src.host != self.me.host {
            return false;
        }
        match frame.header.kind {
            Kind::Fetch => self.answer_with_copy(&frame.header),
            Kind::Held => {
                self.copy_let_go(frame);
                false
            }
            _ => false,
        }
    }

    fn answer_with_copy(&self, header: &Header) -> bool {
        let Some(Fetch { id, call }) = Fetch::read(header) else { return false };
        let value = (header.dst, id);
        let asker = Asker { proc: header.src, call };
        let (at, len) = {
            let mut copies = lock(&self.remote_values.copies);
            match copies.ask(value, asker) {
                Wanted::Fetch => return false,
                Wanted::Wait => return true,
                // It stays until this one has let go, whatever becomes of the copy.
                Wanted::Here((at, len)) if self.memory.lend_to(&at, asker.proc) => (at, len),
                Wanted::Here(_) => return false,
            }
        };
        let mut reply = reply(value, asker);
        reply.set_sharing(Sharing { sole: false, shared: true });
        let parts = [Part::Inline(bytes::Bytes::new()), Part::Shared { at, len }];
        self.dispatch(Frame::build(reply, None, b"", &parts), None);
        true
    }

    fn copy_let_go(&self, frame: &Frame) {
        let (owner, src) = (frame.header.dst, frame.header.src);
        if lock(&self.remote_values.copies).is_empty() {
            return;
        }
        let Some(Held { call, news, .. }) = Held::read(frame) else { return };
        let gone = match news {
            Holding::LetGo(_) => vec![src],
            Holding::Unsent { to, .. } => to,
            Holding::Loose | Holding::Given { .. } => return,
        };
        let dropped: Vec<Place> = {
            let mut copies = lock(&self.remote_values.copies);
            gone.into_iter().filter_map(|one| copies.let_go((owner, call), one)).collect()
        };
        self.drop_copies(&dropped);
    }

    /// Whether this answers what was fetched for all that are here.
    pub(crate) fn awaits_copy(&self, header: &Header) -> bool {
        let Ok(said) = Meaning::of(header) else { return false };
        lock(&self.remote_values.copies).is_coming(Asker { proc: header.dst, call: said.call() })
    }

    fn drop_copies(&self, dropped: &[Place]) {
        dropped.iter().for_each(|(at, _)| self.memory.take_back(at, self.me));
    }

    /// An answer of another host: if it has a value that was asked for in the name of all that are here, the others that
    /// wait are answered as well. Returns it as it goes on to whom it is for.
    pub(crate) fn share_copy(&self, frame: Frame) -> Frame {
        let header = frame.header;
        let Ok(said) = Meaning::of(&header) else { return frame };
        let lead = Asker { proc: header.dst, call: said.call() };
        let (mut out, mut others) = (None, Vec::new());
        lock(&self.remote_values.copies).arrived(lead, |value, waiting, wanted| {
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
            out = Some(many);
            // Only what lies in this process's own memory stays.
            place.filter(|(at, _)| wanted && header.kind == Kind::Reply && self.memory.lend_to(at, self.me))
        });
        for other in others {
            self.dispatch(other, None);
        }
        out.unwrap_or(frame)
    }

    /// Processes have ended: owners, or processes of this host.
    pub(super) fn copies_end(&self, dead: impl Fn(ProcAddr) -> bool) {
        let after = {
            let mut copies = lock(&self.remote_values.copies);
            if copies.is_empty() {
                return;
            }
            copies.ended(dead)
        };
        self.drop_copies(&after.dropped);
        for ((owner, id), asker) in after.fetch {
            let fetch = Fetch { id, call: asker.call }.frame(asker.proc, owner);
            self.send_remote(&fetch, mesh_proto::hosts::HostSet::one(owner.host));
        }
    }
}
