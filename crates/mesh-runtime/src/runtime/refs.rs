//! Values that are kept here, and references to those of others; see [`crate::refs`].

use super::{Body, Runtime};
use crate::calls::Call;
use crate::completion::Completion;
use crate::error::RuntimeError;
use crate::refs::{Entry, Hold, Kept, Layout, Place, RefAddr, RefCounter, View, pack};
use bytes::Bytes;
use mesh_proto::control::{Fetch, Held, Holding, Undeliverable, Watch};
use mesh_proto::messages::{Answer, Asked, Reply};
use mesh_proto::{
    Carried, Ended, Frame, Header, Holders, Part, ProcAddr, Route, SharedRef, Sharing, Target, Ticket, Undelivered,
};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// So many holders are named in one frame.
const MOST_NAMED: usize = 1024;
const PAGE: u64 = 4096;

/// What became of a look at a value.
#[derive(Debug)]
pub enum Opened {
    /// Here it is.
    Here(View),
    /// It has to be fetched from its owner.
    Remote,
    /// Its owner has ended.
    Lost(Arc<Ended>),
}

impl RefCounter for Runtime {
    fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>) {
        self.refs.forget(hold);
        if hold.lost().is_none() && self.usable().is_ok() {
            self.tell_ref(hold.addr, Holding::LetGo(tickets));
        }
    }

    fn came(&self, frame: &Frame) -> Vec<Arc<Hold>> {
        let carried = frame.carried().into_iter();
        carried.map(|one| self.hold_under(RefAddr { owner: one.owner, id: one.id }, one.ticket, None)).collect()
    }

    fn unsent(&self, frame: &Frame) {
        if self.usable().is_err() {
            return;
        }
        let to: Vec<ProcAddr> = frame.target().map(|target| target.procs().collect()).unwrap_or_default();
        for Carried { owner, id, ticket } in frame.carried() {
            for some in to.chunks(MOST_NAMED) {
                self.tell_ref(RefAddr { owner, id }, Holding::Unsent { ticket, to: some.to_vec() });
            }
        }
    }
}

impl Runtime {
    /// Bytes of values that this process may keep.
    pub fn ref_budget(&self) -> u64 {
        self.refs.budget()
    }

    /// What a value counts against that.
    pub fn ref_cost(parts: &[usize]) -> u64 {
        (Layout::of(parts.iter().copied()).len as u64).next_multiple_of(PAGE)
    }

    /// Counts a value that is about to be kept. Returns what to wait for where there is no room.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn reserve_ref(&self, cost: u64) -> Result<Option<Arc<Completion>>, RuntimeError> {
        self.usable()?;
        Ok(self.refs.reserve(cost, || self.completion()))
    }

    /// Nobody keeps anything in room that was counted, or waited for.
    pub fn unreserve_ref(&self, cost: u64, waited: Option<&Arc<Completion>>) {
        match waited {
            Some(done) => self.refs.give_up(cost, done),
            None => self.refs.settle(cost),
        }
    }

    /// Keeps a value, which was counted. `inner` are the values that references in it are to.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn keep_value(
        &self,
        parts: &[&[u8]],
        cost: u64,
        inner: Vec<Arc<Hold>>,
    ) -> Result<(Kept, Arc<Hold>), RuntimeError> {
        if let Err(error) = self.usable() {
            self.refs.settle(cost);
            return Err(error);
        }
        let layout = Layout::of(parts.iter().map(|part| part.len()));
        let len = layout.len as u64;
        let place = match self.memory.keep_room(layout.len, &Target::One(self.me)) {
            Some(room) => {
                room.write(0, &layout.head);
                for (start, part) in layout.starts.iter().zip(parts) {
                    room.fill(*start, part, self.board.spare());
                }
                Place::Shared(room.done())
            }
            None => Place::Heap(pack(parts)),
        };
        let at = match &place {
            Place::Shared(at) => Some(*at),
            Place::Heap(_) => None,
        };
        let addr = RefAddr { owner: self.me, id: self.new_id() };
        self.refs.insert(self.me, addr.id, (place, len, cost), inner);
        let (hold, _) = self.refs.hold(self.weak(), addr, Holders::FIRST, None);
        Ok((Kept { addr, at, len }, hold))
    }

    /// What this process holds a value by, where a reference to it has just come; `within` is a value that was opened and
    /// has it in it.
    pub fn hold_of(&self, addr: RefAddr, within: Option<&Arc<Hold>>) -> Option<Arc<Hold>> {
        if let Some(hold) = self.refs.held(&addr) {
            return Some(hold);
        }
        let within = within?;
        let ticket = self.new_id();
        self.tell_ref(addr, Holding::Given { ticket, to: vec![self.me], name: String::new() });
        Some(self.hold_under(addr, ticket, Some(Arc::clone(within))))
    }

    pub(super) fn hold_under(&self, addr: RefAddr, ticket: Ticket, within: Option<Arc<Hold>>) -> Arc<Hold> {
        let (hold, fresh) = self.refs.hold(self.weak(), addr, ticket, within);
        if fresh && addr.owner != self.me {
            let route = self.switch.route(addr.owner);
            match route {
                Route::Gone(ended) => self.refs_end(|one| one == addr.owner, &ended),
                _ if self.me.is_agent() && addr.owner.host == self.me.host => {} // It hears of it anyway.
                _ => self.watch_owners(vec![addr.owner]),
            }
        }
        hold
    }

    /// References are about to travel to `target`: their owners hear of it first (REF-2).
    pub(super) fn give_refs(&self, refs: &[Arc<Hold>], target: &Target) -> Vec<Carried> {
        let to: Vec<ProcAddr> = target.procs().collect();
        let give = |hold: &Arc<Hold>| {
            let ticket = self.new_id();
            for some in to.chunks(MOST_NAMED) {
                self.tell_ref(hold.addr, Holding::Given { ticket, to: some.to_vec(), name: String::new() });
            }
            Carried { owner: hold.addr.owner, id: hold.addr.id, ticket }
        };
        refs.iter().map(give).collect()
    }

    pub(super) fn tell_ref(&self, addr: RefAddr, news: Holding) {
        if addr.owner == self.me {
            self.on_ref_held(addr.id, self.me, news);
        } else {
            self.dispatch(Held { call: addr.id, place: 0, news }.frame(self.me, addr.owner), None);
        }
    }

    /// Somebody tells who holds a value of this process.
    pub(super) fn on_ref_held(&self, id: u64, src: ProcAddr, news: Holding) {
        let mut fresh = Vec::new();
        let gone = self.refs.change(id, |holders| match news {
            Holding::Loose => holders.loosen(),
            Holding::LetGo(tickets) => tickets.iter().for_each(|ticket| holders.let_go(src, *ticket)),
            Holding::Unsent { ticket, to } => to.iter().for_each(|addr| holders.let_go(*addr, ticket)),
            Holding::Given { ticket, to, name } => {
                let name = name.into();
                fresh.extend(to.into_iter().take(MOST_NAMED).filter(|addr| holders.given(*addr, ticket, &name)));
            }
        });
        // This process's own end, or that of a whole host, is heard of anyway.
        fresh.retain(|addr| *addr != self.me && !addr.is_agent());
        for holder in self.refs.watch(fresh) {
            self.dispatch(Watch::of(holder).frame(self.me, holder), None);
        }
        self.drop_values(gone);
    }

    /// Nobody holds these values any more.
    fn drop_values(&self, gone: impl IntoIterator<Item = Entry>) {
        for mut entry in gone {
            let (place, cost) = (entry.place.clone(), entry.cost);
            let offer = entry.offer.take();
            // What it had in it goes with it.
            drop(entry);
            if let (Some((offer, mapped)), Place::Shared(at)) = (offer, &place) {
                // Not before nobody reads it any more (BYP-1).
                let (runtime, at) = (self.weak(), *at);
                offer.withdraw(Box::new(move || {
                    drop(mapped);
                    if let Some(runtime) = runtime.upgrade() {
                        runtime.memory.unkeep(&at);
                        runtime.refs.settle(cost);
                    }
                }));
                continue;
            }
            if let Place::Shared(at) = &place {
                self.memory.unkeep(at);
            }
            self.refs.settle(cost);
        }
    }

    /// Processes have ended: what they kept is lost, and they hold nothing any more.
    pub(crate) fn refs_end(&self, dead: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) {
        self.refs.lose(&dead, ended);
        self.copies_end(&dead);
        let gone = self.refs.bury(&dead, ended);
        self.drop_values(gone);
    }

    pub(super) fn close_refs(&self) {
        self.refs.close();
    }

    /// Looks at a value, without a copy.
    ///
    /// # Errors
    /// If this is a forked copy, or the memory cannot be mapped.
    pub fn open_ref(&self, kept: &Kept, hold: &Arc<Hold>) -> Result<Opened, RuntimeError> {
        self.original()?;
        if let Some(ended) = hold.lost() {
            return Ok(Opened::Lost(Arc::clone(ended)));
        }
        let odd = || RuntimeError::Os { what: "read a kept value", errno: Errno::INVAL };
        if let Some(at) = kept.at.filter(|_| kept.addr.owner.host == self.me.host) {
            return match self.memory.view(&at, kept.len) {
                Ok(view) => View::mapped(view, hold).map(Opened::Here).ok_or_else(odd),
                // Its owner has just ended: the answer to a question will say how.
                Err(RuntimeError::Os { errno: Errno::NOENT | Errno::SRCH | Errno::NXIO, .. }) => {
                    Ok(hold.lost().map_or(Opened::Remote, |ended| Opened::Lost(Arc::clone(ended))))
                }
                // It may not be mapped: by a process of another user, say.
                Err(RuntimeError::Os { errno: Errno::ACCESS | Errno::PERM, .. }) => Ok(Opened::Remote),
                Err(error) => Err(error),
            };
        }
        match self.refs.place(kept.addr.id).filter(|_| kept.addr.owner == self.me) {
            Some((Place::Heap(bytes), _)) => View::of_bytes(bytes).map(Opened::Here).ok_or_else(odd),
            _ => Ok(Opened::Remote),
        }
    }

    /// Asks a value's owner for its bytes; they come as one part.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn fetch_ref(&self, addr: RefAddr) -> Result<Arc<Call>, RuntimeError> {
        let call = self.open(Target::One(addr.owner), false)?;
        self.dispatch(Fetch { id: addr.id, call: call.id }.frame(self.me, addr.owner), None);
        Ok(call)
    }

    /// Somebody wants the bytes of a value that is kept here.
    pub(super) fn on_fetch(&self, header: &Header) {
        let Some(Fetch { id, call }) = Fetch::read(header) else { return };
        let to = header.src;
        self.remote_values.fetched.fetch_add(1, Ordering::Relaxed);
        let reply = Reply { actor: 0, call, place: 0, answer: Answer::Value }.header(self.me, to);
        let frame = match self.refs.place(id) {
            Some((Place::Shared(at), len)) if to.host != self.me.host && self.memory.lend(&at) => lent(reply, at, len),
            Some((Place::Shared(at), len)) => {
                match self.memory.view(&at, len).map(|view| self.copied(reply, to, &view)) {
                    Ok(frame) => frame,
                    Err(_) => return self.unkept(header),
                }
            }
            Some((Place::Heap(bytes), _)) => self.write(reply, &Target::One(to), b"", Body::new(b"", &[&bytes])),
            None => return self.unkept(header),
        };
        self.dispatch(frame, None);
    }

    fn copied(&self, reply: Header, to: ProcAddr, view: &crate::shm::View) -> Frame {
        // SAFETY: the view keeps it mapped, and nobody writes into it (SHM-1).
        let bytes = unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len()) };
        self.write(reply, &Target::One(to), b"", Body::new(b"", &[bytes]))
    }

    /// The value is not kept here (any more).
    fn unkept(&self, header: &Header) {
        if let Some(asked) = Asked::of(header) {
            self.dispatch(Undeliverable::answer(&asked, Undelivered::NoActor).frame(self.me, asked.by), None);
        }
    }
}

/// An answer that has a piece of a kept value in it, where it lies.
fn lent(mut header: Header, at: SharedRef, len: u64) -> Frame {
    header.set_sharing(Sharing { sole: true, shared: true });
    Frame::build(header, None, b"", &[Part::Inline(Bytes::new()), Part::Shared { at, len }])
}
