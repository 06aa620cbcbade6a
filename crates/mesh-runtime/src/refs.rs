//! Values that stay where they were made, and who holds references to them.
//!
//! A process keeps the bytes of a value once, in memory that its host's other processes map, and counts its holders by
//! tickets as the ports of calls do ([`Holders`], HLD-1): each message that has a reference in it travels under one.
//!
//! REF-1: a value is kept as long as somebody alive holds a reference to it: an object, a message on its way, another
//! kept value, or a view of its bytes. It is given up when the last of these is gone, holders' deaths included.
//! REF-2: the owner hears of a holder before the message goes that makes it one, so that no holder is ever unknown to it.
//! REF-3: all kept values together take no more than the budget. Who finds no room waits, in the order of arrival.
//! REF-4: once its owner has died, every holder knows; what it has mapped already stays readable.

use crate::bypass::Offer;
use crate::completion::{Completion, Fate};
use crate::locks::lock;
use crate::shm;
pub(crate) use crate::shm::View as Mapped;
use bytes::Bytes;
use mesh_proto::{Ended, Frame, Holders, ProcAddr, SharedRef, Ticket};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Who keeps account of references that come and go in this process.
pub(crate) trait RefCounter: std::fmt::Debug + Send + Sync {
    /// Nothing in this process holds a value any more.
    fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>);
    /// A message has come; the references in it are held from here on.
    fn came(&self, frame: &Frame) -> Vec<Arc<Hold>>;
    /// A message will never come to those that it was for, nor the references in it.
    fn unsent(&self, frame: &Frame);
}

/// Which value a reference is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RefAddr {
    /// The process that keeps it.
    pub owner: ProcAddr,
    /// Its number there.
    pub id: u64,
}

/// A value that has just been kept, or came by a reference: where it lies.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Which one.
    pub addr: RefAddr,
    /// Where, for processes of its host; none where memory cannot be shared.
    pub at: Option<SharedRef>,
    /// How many bytes it takes, packed.
    pub len: u64,
}

/// What holds a value on behalf of a process: one for each value, however many references the process has.
#[derive(Debug)]
pub struct Hold {
    counter: Weak<dyn RefCounter>,
    pub(crate) addr: RefAddr,
    /// Under what references came here, each once.
    tickets: Mutex<Vec<Ticket>>,
    lost: OnceLock<Arc<Ended>>,
    /// A value that has this one in it: as long as it is held, so is this.
    _within: Option<Arc<Hold>>,
    /// The process that counts as the holder; a forked copy of it does not.
    pid: u32,
}

impl Hold {
    /// Which value it is.
    pub fn addr(&self) -> RefAddr {
        self.addr
    }

    /// How its owner has ended, if it has (REF-4).
    pub fn lost(&self) -> Option<&Arc<Ended>> {
        self.lost.get()
    }

    fn add(&self, ticket: Ticket) {
        let mut tickets = lock(&self.tickets);
        if !tickets.contains(&ticket) {
            tickets.push(ticket);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let Some(counter) = self.counter.upgrade() else { return };
        let tickets = std::mem::take(self.tickets.get_mut().unwrap_or_else(PoisonError::into_inner));
        counter.dropped(self, tickets);
    }
}

/// A value that this process keeps.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) place: Place,
    pub(crate) len: u64,
    /// What it counts against the budget.
    pub(crate) cost: u64,
    pub(crate) holders: Holders,
    /// The values that references in this one are to.
    _inner: Vec<Arc<Hold>>,
    /// Of a part of a message that other hosts get past the gateways: how it is offered, and where it is mapped.
    pub(crate) offer: Option<(Offer, shm::Place)>,
}

/// Where a kept value lies.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Shared(SharedRef),
    Heap(Bytes),
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<u64, Entry>,
    used: u64,
    /// Who waits for room, and for how much of it.
    waiting: VecDeque<(u64, Arc<Completion>)>,
    /// Whose ends this process is told of.
    watched: HashSet<ProcAddr>,
}

#[derive(Debug, Default)]
struct Held {
    holds: HashMap<RefAddr, Weak<Hold>>,
    /// Owners whose ends this process is told of.
    watched: HashSet<ProcAddr>,
}

/// All values that a process keeps, and those of others that it holds.
#[derive(Debug)]
pub(crate) struct Refs {
    budget: u64,
    state: Mutex<State>,
    held: Mutex<Held>,
}

impl Refs {
    pub(crate) fn new(budget: u64) -> Self {
        Self { budget, state: Mutex::default(), held: Mutex::default() }
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    /// How many values are kept here, and their bytes.
    pub(crate) fn kept(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.entries.len(), state.used)
    }

    /// How many values of others are held here.
    pub(crate) fn foreign(&self, me: ProcAddr) -> usize {
        lock(&self.held).holds.keys().filter(|addr| addr.owner != me).count()
    }

    pub(crate) fn keeps(&self, id: u64) -> bool {
        lock(&self.state).entries.contains_key(&id)
    }

    pub(crate) fn place(&self, id: u64) -> Option<(Place, u64)> {
        lock(&self.state).entries.get(&id).map(|entry| (entry.place.clone(), entry.len))
    }

    /// Counts so many bytes, at once or (REF-3) when what is returned is finished.
    pub(crate) fn reserve(&self, bytes: u64, wait: impl FnOnce() -> Arc<Completion>) -> Option<Arc<Completion>> {
        let mut state = lock(&self.state);
        if state.waiting.is_empty() && state.used.saturating_add(bytes) <= self.budget {
            state.used += bytes;
            return None;
        }
        let done = wait();
        state.waiting.push_back((bytes, Arc::clone(&done)));
        Some(done)
    }

    /// Bytes are free again, or somebody waits no more: whoever is next goes on.
    pub(crate) fn settle(&self, freed: u64) {
        let mut ready = Vec::new();
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(freed);
        while let Some((bytes, done)) = state.waiting.front() {
            if done.fate().is_none() && state.used.saturating_add(*bytes) > self.budget {
                break;
            }
            let Some((bytes, done)) = state.waiting.pop_front() else { break };
            if done.begin(Fate::Status(0)) {
                state.used += bytes;
                ready.push(done);
            }
        }
        drop(state);
        ready.iter().for_each(|done| done.end());
    }

    /// Nobody waits for this room any more.
    pub(crate) fn give_up(&self, bytes: u64, done: &Arc<Completion>) {
        if done.finish(Fate::Cancelled) {
            self.settle(0);
        } else if done.fate() == Some(Fate::Status(0)) {
            self.settle(bytes);
        }
    }

    /// Whoever waits for room waits in vain.
    pub(crate) fn close(&self) {
        let waiting = std::mem::take(&mut lock(&self.state).waiting);
        waiting.iter().for_each(|(_, done)| {
            done.finish(Fate::Broken);
        });
    }

    pub(crate) fn insert(&self, me: ProcAddr, id: u64, entry: (Place, u64, u64), inner: Vec<Arc<Hold>>) {
        let (place, len, cost) = entry;
        let entry = Entry { place, len, cost, holders: Holders::new(me), _inner: inner, offer: None };
        lock(&self.state).entries.insert(id, entry);
    }

    /// Counts so many bytes, if there is room at once.
    pub(crate) fn reserve_now(&self, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        let fits = state.waiting.is_empty() && state.used.saturating_add(bytes) <= self.budget;
        if fits {
            state.used += bytes;
        }
        fits
    }

    /// A value that was inserted is offered past the gateways.
    pub(crate) fn offered(&self, id: u64, offer: (Offer, shm::Place)) {
        if let Some(entry) = lock(&self.state).entries.get_mut(&id) {
            entry.offer = Some(offer);
        }
    }

    /// Changes who holds a value; returns it if that was the last (REF-1).
    pub(crate) fn change(&self, id: u64, change: impl FnOnce(&mut Holders)) -> Option<Entry> {
        let mut state = lock(&self.state);
        let entry = state.entries.get_mut(&id)?;
        change(&mut entry.holders);
        entry.holders.verdict()?;
        state.entries.remove(&id)
    }

    /// Some processes have ended: returns the values that nobody holds any more.
    pub(crate) fn bury(&self, dead: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) -> Vec<Entry> {
        let mut state = lock(&self.state);
        let gone: Vec<ProcAddr> = state.watched.extract_if(|addr| dead(*addr)).collect();
        if gone.is_empty() {
            return Vec::new();
        }
        state.entries.values_mut().for_each(|entry| gone.iter().for_each(|addr| entry.holders.died(*addr, ended)));
        state.entries.extract_if(|_, entry| entry.holders.verdict().is_some()).map(|(_, entry)| entry).collect()
    }

    /// Who of these is not watched yet.
    pub(crate) fn watch(&self, holders: Vec<ProcAddr>) -> Vec<ProcAddr> {
        let mut state = lock(&self.state);
        holders.into_iter().filter(|addr| state.watched.insert(*addr)).collect()
    }

    /// What this process holds a value by, if it does.
    pub(crate) fn held(&self, addr: &RefAddr) -> Option<Arc<Hold>> {
        lock(&self.held).holds.get(addr).and_then(Weak::upgrade)
    }

    /// Holds a value under a ticket. True if its owner's end is to be asked for.
    pub(crate) fn hold(
        &self,
        counter: Weak<dyn RefCounter>,
        addr: RefAddr,
        ticket: Ticket,
        within: Option<Arc<Hold>>,
    ) -> (Arc<Hold>, bool) {
        let mut held = lock(&self.held);
        let known = held.holds.get(&addr).and_then(Weak::upgrade);
        let hold = known.unwrap_or_else(|| {
            Arc::new(Hold {
                counter,
                addr,
                tickets: Mutex::default(),
                lost: OnceLock::new(),
                _within: within,
                pid: std::process::id(),
            })
        });
        held.holds.insert(addr, Arc::downgrade(&hold));
        hold.add(ticket);
        let fresh = held.watched.insert(addr.owner);
        (hold, fresh)
    }

    pub(crate) fn forget(&self, gone: &Hold) {
        let mut held = lock(&self.held);
        // Another may have taken its place meanwhile.
        if held.holds.get(&gone.addr).is_some_and(|one| std::ptr::eq(one.as_ptr(), gone)) {
            held.holds.remove(&gone.addr);
        }
    }

    /// Owners have ended (REF-4).
    pub(crate) fn lose(&self, dead: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) {
        let mut held = lock(&self.held);
        held.watched.retain(|owner| !dead(*owner));
        let lost: Vec<Arc<Hold>> =
            held.holds.iter().filter(|(addr, _)| dead(addr.owner)).filter_map(|(_, hold)| hold.upgrade()).collect();
        // One of them may be the last, and wants the lock when it goes.
        drop(held);
        for hold in lost {
            let _ = hold.lost.set(Arc::clone(ended));
        }
    }
}

// A value as it is kept: how many parts, how long each is, then the parts, the first of which is the envelope.

const WORD: usize = 8;
/// Where a part begins: what is computed with it may want a whole cache line.
const ALIGN: usize = 64;

/// How a value's parts lie behind one another.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) head: Vec<u8>,
    pub(crate) starts: Vec<usize>,
    pub(crate) len: usize,
}

impl Layout {
    pub(crate) fn of(lens: impl ExactSizeIterator<Item = usize>) -> Self {
        let mut head = (lens.len() as u64).to_le_bytes().to_vec();
        let mut at = WORD * (1 + lens.len());
        let mut starts = Vec::with_capacity(lens.len());
        for len in lens {
            head.extend_from_slice(&(len as u64).to_le_bytes());
            at = at.next_multiple_of(ALIGN);
            starts.push(at);
            at += len;
        }
        Self { head, starts, len: at }
    }

    /// Where the parts of a packed value are; none if it is something else.
    fn read(raw: &[u8]) -> Option<Vec<Range<usize>>> {
        let word = |at: usize| {
            let bytes = raw.get(at..)?.first_chunk::<WORD>()?;
            usize::try_from(u64::from_le_bytes(*bytes)).ok()
        };
        let count = word(0)?;
        if count == 0 || count > raw.len() / WORD {
            return None;
        }
        let mut at = WORD * (1 + count);
        let part = |i: usize| {
            let start = at.checked_next_multiple_of(ALIGN)?;
            let end = start.checked_add(word(WORD * (1 + i))?).filter(|end| *end <= raw.len())?;
            at = end;
            Some(start..end)
        };
        (0..count).map(part).collect()
    }
}

/// Puts a value's parts behind one another.
pub fn pack(parts: &[&[u8]]) -> Bytes {
    let layout = Layout::of(parts.iter().map(|part| part.len()));
    let mut out = vec![0; layout.len];
    out[..layout.head.len()].copy_from_slice(&layout.head);
    for (start, part) in layout.starts.iter().zip(parts) {
        out[*start..start + part.len()].copy_from_slice(part);
    }
    out.into()
}

#[derive(Debug)]
enum Data {
    Mapped(Mapped),
    Part(crate::shm::SharedPart),
    Bytes(Bytes),
}

/// A value's bytes as its reader has them. They stay as long as this does, and with them the value (REF-1).
#[derive(Debug)]
pub struct View {
    data: Data,
    parts: Vec<Range<usize>>,
    _hold: Option<Arc<Hold>>,
}

impl View {
    fn new(data: Data, hold: Option<Arc<Hold>>) -> Option<Self> {
        let raw = match &data {
            Data::Mapped(view) => raw(view.as_ptr(), view.len()),
            Data::Part(part) => raw(part.as_ptr(), part.len()),
            Data::Bytes(bytes) => bytes,
        };
        let parts = Layout::read(raw)?;
        Some(Self { data, parts, _hold: hold })
    }

    /// What was mapped.
    pub(crate) fn mapped(view: Mapped, hold: &Arc<Hold>) -> Option<Self> {
        Self::new(Data::Mapped(view), Some(Arc::clone(hold)))
    }

    /// What [`pack`] has made, or what has come in a message.
    pub fn of_bytes(bytes: Bytes) -> Option<Self> {
        Self::new(Data::Bytes(bytes), None)
    }

    /// What has come in a message as one part.
    pub fn of_part(part: crate::PartData) -> Option<Self> {
        match part {
            crate::PartData::Inline(bytes) => Self::of_bytes(bytes),
            crate::PartData::Shared(part) => Self::new(Data::Part(part), None),
        }
    }

    /// How many parts there are, the envelope included.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The envelope.
    pub fn envelope(&self) -> &[u8] {
        let Range { start, end } = self.parts[0].clone();
        &self.bytes()[start..end]
    }

    /// One part, where its reader may write into it: in memory of its own.
    pub fn writable(&self, part: usize) -> Option<(*mut u8, usize)> {
        let range = self.parts.get(part)?.clone();
        let base = match &self.data {
            Data::Mapped(view) => view.as_ptr(),
            Data::Part(part) => part.as_ptr(),
            Data::Bytes(_) => return None,
        };
        Some((base.wrapping_add(range.start), range.len()))
    }

    /// One part.
    pub fn part(&self, part: usize) -> &[u8] {
        &self.bytes()[self.parts[part].clone()]
    }

    fn bytes(&self) -> &[u8] {
        match &self.data {
            Data::Mapped(view) => raw(view.as_ptr(), view.len()),
            Data::Part(part) => raw(part.as_ptr(), part.len()),
            Data::Bytes(bytes) => bytes,
        }
    }
}

fn raw<'a>(data: *mut u8, len: usize) -> &'a [u8] {
    // SAFETY: callers pass memory that is mapped as long as what they take it from, which they keep borrowed.
    unsafe { std::slice::from_raw_parts(data, len) }
}
