//! Values and references: connects [`crate::refs`] and [`super::copies`] to the switch, the calls, and the messages to
//! other hosts.

use super::{Body, Runtime};
use crate::call::Call;
use crate::error::RuntimeError;
use crate::refs::{Fetched, Hold, RefAddr, RefCounter, Refs};
use bytes::Bytes;
use mesh_proto::control::{Fetch, Undeliverable};
use mesh_proto::hosts::HostSet;
use mesh_proto::messages::{Answer, Asked, Reply};
use mesh_proto::{Ended, Frame, Header, Part, ProcAddr, Route, Sharing, Target, Ticket, Undelivered};
use std::sync::Arc;

impl RefCounter for Runtime {
    fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>) {
        self.refs.dropped(hold, tickets, self);
    }

    fn came(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let carried = frame.carried().into_iter();
        carried.map(|one| self.hold_under(RefAddr { owner: one.owner, id: one.id }, &[one.ticket])).collect()
    }

    fn unsent(&self, frame: &Frame) {
        self.refs.unsent(frame, self);
    }
}

impl Runtime {
    /// The values that this process keeps, and those that it holds references to.
    pub fn refs(&self) -> &Refs {
        &self.refs
    }

    /// This process's hold on a value. If there is none yet, `outer` is the opened value from which the reference was
    /// read.
    pub fn hold_of(&self, addr: RefAddr, outer: Option<&Arc<Hold>>) -> Option<Arc<Hold>> {
        let read = || Some(self.hold_under(addr, &self.refs.read(addr, outer?.addr(), self)));
        self.refs.held(&addr).or_else(read)
    }

    /// Holds a reference that came under these tickets. For the first value of an owner, asks for the notice of its
    /// end.
    pub(super) fn hold_under(&self, addr: RefAddr, tickets: &[Ticket]) -> Arc<Hold> {
        let (hold, fresh) = self.refs.hold(addr, tickets);
        if fresh {
            match self.switch.route(addr.owner) {
                Route::Gone(ended) => self.refs_end(|one| one == addr.owner, &ended),
                // An agent is told of the ends on its host anyway.
                _ if self.me.is_agent() && addr.owner.host == self.me.host => {}
                _ => self.watch_owners(vec![addr.owner]),
            }
        }
        hold
    }

    /// Asks a value's owner for its bytes. They come as one part.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn fetch_ref(&self, addr: RefAddr) -> Result<Arc<Call>, RuntimeError> {
        let call = self.open(Target::One(addr.owner), false)?;
        self.dispatch(Fetch { id: addr.id, call: call.id }.frame(self.me, addr.owner), None);
        Ok(call)
    }

    /// Answers a process that asks for the bytes of a value kept here.
    pub(super) fn on_fetch(&self, header: &Header) {
        let Some(Fetch { id, call }) = Fetch::read(header) else { return };
        let to = header.src;
        let mut reply = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(self.me, to);
        let copied = |bytes: &[u8]| self.write(reply, &Target::One(to), b"", Body::new(b"", &[bytes]));
        let frame = match self.refs.fetch(id, to) {
            Some(Fetched::Lent(at, len)) => {
                reply.set_sharing(Sharing { sole: true, shared: true });
                Frame::build(reply, None, b"", &[Part::Inline(Bytes::new()), Part::Shared { at, len }])
            }
            // SAFETY: the view keeps it mapped, and nobody writes into it (SHM-1).
            Some(Fetched::Mapped(view)) => copied(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len()) }),
            Some(Fetched::Heap(bytes)) => copied(&bytes),
            None => {
                let Some(asked) = Asked::of(header) else { return };
                Undeliverable::answer(&asked, Undelivered::NoActor).frame(self.me, asked.by)
            }
        };
        self.dispatch(frame, None);
    }

    /// Processes have ended: what they kept is lost, and they hold nothing any more.
    pub(crate) fn refs_end(&self, dead: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) {
        self.refs.on_ends(&dead, ended);
        for fetch in self.remote_values.on_ends(&dead) {
            self.send_remote(&fetch, HostSet::one(fetch.header.dst.host));
        }
    }
}
