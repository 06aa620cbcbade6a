//! Values that stay in the process where they were made, and references to them.
//!
//! A process keeps the bytes of a value once, in memory that its host's other processes map. It counts the holders by
//! tickets, as for the ports of calls ([`Holders`], HLD-1): each message with a reference in it travels under a ticket.
//!
//! REF-1: a value is kept as long as any living process holds a reference to it: an object, a message on its way,
//! another kept value, or a view of its bytes. It is freed when the last of these is gone, whether dropped or lost with
//! its process.
//! REF-2: a process that hands on a reference tells the owner of the new holder before the message leaves.
//! REF-3: all kept values together take no more than the budget. Those that find no room wait, in order of arrival.
//! REF-4: once its owner has died, every holder knows. What a holder has mapped by then stays readable.
//!
//! REF-1 needs no answers from the owner, although links between hosts are independent: only the frames of one process
//! to another arrive in order, followed by the notice of its death. A process that hands on a reference tells the owner
//! first, on the link on which it lets go later. So in the chain of processes by which a reference came to its holder,
//! the last one that the owner knows of still counts as a holder: its let-go comes after the announcement of the next
//! one. For a reference that is read from a kept value, the next one is the reader and the last one is the value's
//! keeper. So the reader asks the keeper to announce it ([`Holding::Read`]), on the link on which the reader lets go of
//! the value. The reader also announces itself, in case the keeper dies first.
//!
//! Two deaths can cut such a chain, and the owner may then free a value that somebody holds:
//!
//! - the death of a value's keeper, for a reference that was just read from it and that nobody else holds;
//! - the death of a whole host, for a reference that it sent to a third host but had not announced yet.

mod budget;
mod hold;
mod view;

pub(crate) use hold::RefCounter;
pub use hold::{Hold, RefAddr};
pub(crate) use view::Layout;
pub use view::{View, pack};

use crate::buffer::Buffer;
use crate::bypass::Offer;
use crate::completion::Completion;
use crate::dispatch::Dispatch;
use crate::error::RuntimeError;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::shm::{self, Memory};
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use budget::Budget;
use bytes::Bytes;
use mesh_proto::control::{Held, Holding, Watch};
use mesh_proto::{Carried, Ended, Frame, Holders, IdMaker, ProcAddr, SharedRef, Target, Ticket};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// At most this many holders are named in one frame.
const MOST_NAMED: usize = 1024;
const PAGE: u64 = 4096;

/// A value that was just kept, or came by a reference, and where it is.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The value.
    pub addr: RefAddr,
    /// Where it is, for processes of its host; none if memory cannot be shared.
    pub at: Option<SharedRef>,
    /// How many bytes it takes, packed.
    pub len: u64,
}

/// The result of opening a value.
#[derive(Debug)]
pub enum Opened {
    /// The value.
    Here(View),
    /// It must be fetched from its owner.
    Remote,
    /// Its owner has ended.
    Lost(Arc<Ended>),
}

/// How a value reaches a process that has asked for it.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// The shared memory that it is in was lent to the answer, with its length.
    Lent(SharedRef, u64),
    /// Its bytes must be copied from where they are mapped.
    Mapped(shm::View),
    /// Its bytes must be copied.
    Heap(Bytes),
}

/// Where a kept value is.
#[derive(Clone, Debug)]
enum Place {
    Shared(SharedRef),
    Heap(Bytes),
}

/// A part of a message that is offered to its receiver by a bypass, and where it is mapped for that.
type Offered = (Offer, shm::Place);

/// A value that this process keeps.
#[derive(Debug)]
struct Entry {
    place: Place,
    len: u64,
    /// What it costs of the budget.
    cost: u64,
    holders: Holders,
    /// The values that references in this one are to.
    inner: Vec<Arc<Hold>>,
    offer: Option<Offered>,
}

/// The values that this process keeps.
#[derive(Debug, Default)]
struct Own {
    entries: HashMap<u64, Entry>,
    /// Holders whose ends are reported to this process.
    watched: HashSet<ProcAddr>,
}

/// The values that this process holds, including its own.
#[derive(Debug, Default)]
struct References {
    holds: HashMap<RefAddr, Weak<Hold>>,
    /// Owners whose ends are reported to this process.
    watched: HashSet<ProcAddr>,
}

/// What values and references need of their process.
#[derive(Debug)]
pub(crate) struct Around {
    pub(crate) me: ProcAddr,
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) standing: Arc<Standing>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) board: Arc<SpinBoard>,
    pub(crate) ids: Arc<IdMaker>,
    /// Told when nothing here holds a value any more.
    pub(crate) counter: Weak<dyn RefCounter>,
}

/// All values that a process keeps, and those that it holds references to. See the module.
#[derive(Debug)]
pub struct Refs {
    around: Around,
    budget: Arc<Budget>,
    own: Mutex<Own>,
    held: Mutex<References>,
    /// How often this process was asked for the bytes of one of its values.
    fetched: AtomicU64,
}

impl Refs {
    /// For a process that may keep `budget` bytes of values.
    pub(crate) fn new(around: Around, budget: u64) -> Self {
        let budget = Arc::new(Budget::new(budget));
        Self { around, budget, own: Mutex::default(), held: Mutex::default(), fetched: AtomicU64::new(0) }
    }

    // Figures.

    /// How many values are kept here, and the bytes counted for them.
    pub(crate) fn kept(&self) -> (usize, u64) {
        (lock(&self.own).entries.len(), self.budget.used())
    }

    /// How many values of other processes are held here.
    pub(crate) fn foreign(&self) -> usize {
        lock(&self.held).holds.keys().filter(|addr| addr.owner != self.around.me).count()
    }

    /// How often this process was asked for the bytes of one of its values.
    pub(crate) fn fetches(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    // Room (REF-3).

    /// How many bytes of values may be kept.
    pub fn budget(&self) -> u64 {
        self.budget.bytes()
    }

    /// What a value with parts of these lengths costs of the budget.
    pub fn cost(parts: &[usize]) -> u64 {
        (Layout::of(parts.iter().copied()).len as u64).next_multiple_of(PAGE)
    }

    /// Counts a value about to be kept. Returns what to wait for if there is no room.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn reserve(&self, cost: u64) -> Result<Option<Arc<Completion>>, RuntimeError> {
        self.around.standing.usable()?;
        Ok(self.budget.reserve(cost, || Completion::new(&self.around.reactor, &self.around.standing)))
    }

    /// Like [`Self::reserve`], but only if there is room at once.
    pub(crate) fn reserve_now(&self, cost: u64) -> bool {
        self.budget.reserve_now(cost)
    }

    /// Gives back room that was counted or, with `waited`, waited for.
    pub fn unreserve(&self, cost: u64, waited: Option<&Arc<Completion>>) {
        match waited {
            Some(done) => self.budget.give_up(cost, done),
            None => self.budget.free(cost),
        }
    }

    /// The runtime closes: nobody gets room any more.
    pub(crate) fn close(&self) {
        self.budget.close();
    }

    // Values of this process.

    /// Whether this process keeps a value under this number.
    pub(crate) fn keeps(&self, id: u64) -> bool {
        lock(&self.own).entries.contains_key(&id)
    }

    fn place(&self, id: u64) -> Option<(Place, u64)> {
        lock(&self.own).entries.get(&id).map(|entry| (entry.place.clone(), entry.len))
    }

    /// Keeps a value that was counted. `inner` are the values that references in it are to.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn keep(
        &self,
        parts: &[Buffer<'_>],
        cost: u64,
        inner: Vec<Arc<Hold>>,
    ) -> Result<(Kept, Arc<Hold>), RuntimeError> {
        let Around { me, memory, board, ids, standing, .. } = &self.around;
        if let Err(error) = standing.usable() {
            self.budget.free(cost);
            return Err(error);
        }
        let layout = Layout::of(parts.iter().map(|part| part.len()));
        let len = layout.len as u64;
        let (place, at) = match memory.keep_room(layout.len, &Target::One(*me)) {
            Some(room) => {
                room.write(0, &layout.head);
                for (start, part) in layout.starts.iter().zip(parts) {
                    room.lay(*start, *part, board.spare());
                }
                let at = room.done();
                (Place::Shared(at), Some(at))
            }
            None => (Place::Heap(pack(parts)), None),
        };
        let addr = RefAddr { owner: *me, id: ids.next() };
        let entry = Entry { place, len, cost, holders: Holders::new(*me), inner, offer: None };
        lock(&self.own).entries.insert(addr.id, entry);
        let (hold, _) = self.hold(addr, &[Holders::FIRST]);
        Ok((Kept { addr, at, len }, hold))
    }

    /// Keeps a part of a message to `to` that was counted and is offered by a bypass. Only its receiver holds it.
    /// Returns its number and the receiver's ticket.
    pub(crate) fn keep_offered(
        &self,
        at: SharedRef,
        (len, cost): (u64, u64),
        offer: Offered,
        to: ProcAddr,
        out: &impl Dispatch,
    ) -> (u64, Ticket) {
        let (me, id) = (self.around.me, self.around.ids.next());
        let holders = Holders::new(me);
        let entry = Entry { place: Place::Shared(at), len, cost, holders, inner: Vec::new(), offer: Some(offer) };
        lock(&self.own).entries.insert(id, entry);
        let ticket = self.around.ids.next();
        self.tell_given(RefAddr { owner: me, id }, ticket, vec![to], out);
        self.on_held(id, me, Holding::LetGo(vec![Holders::FIRST]), out);
        (id, ticket)
    }

    /// Handles news from `src` of who holds a value of this process.
    pub(crate) fn on_held(&self, id: u64, src: ProcAddr, news: Holding, out: &impl Dispatch) {
        let (mut fresh, mut read) = (Vec::new(), None);
        let gone = self.change(id, |holders| match news {
            Holding::Loose => holders.loosen(),
            Holding::LetGo(tickets) => tickets.iter().for_each(|ticket| holders.let_go(src, *ticket)),
            Holding::Unsent { ticket, to } => to.iter().for_each(|addr| holders.let_go(*addr, ticket)),
            Holding::Read(inner) => read = Some(inner),
            Holding::Given { ticket, to, name } => {
                let name = name.into();
                fresh.extend(to.into_iter().take(MOST_NAMED).filter(|addr| holders.given(*addr, ticket, &name)));
            }
        });
        if let Some(Carried { owner, id, ticket }) = read {
            self.tell_given(RefAddr { owner, id }, ticket, vec![src], out);
        }
        let me = self.around.me;
        // This process is told of its own end, and of the end of a whole host, anyway.
        fresh.retain(|addr| *addr != me && !addr.is_agent());
        if !fresh.is_empty() {
            let mut own = lock(&self.own);
            fresh.retain(|addr| own.watched.insert(*addr));
        }
        for holder in fresh {
            out.dispatch(Watch::of(holder).frame(me, holder));
        }
        self.free(gone);
    }

    /// Changes the holders of a value. Returns the value if nobody holds it any more (REF-1).
    fn change(&self, id: u64, change: impl FnOnce(&mut Holders)) -> Option<Entry> {
        let mut own = lock(&self.own);
        let entry = own.entries.get_mut(&id)?;
        change(&mut entry.holders);
        entry.holders.verdict()?;
        own.entries.remove(&id)
    }

    /// Frees values that nobody holds any more. No lock is held here: a value may be the last holder of others.
    fn free(&self, gone: impl IntoIterator<Item = Entry>) {
        for entry in gone {
            let Entry { place, cost, inner, offer, .. } = entry;
            drop(inner);
            let at = match place {
                Place::Shared(at) => at,
                Place::Heap(_) => {
                    self.budget.free(cost);
                    continue;
                }
            };
            let (memory, budget) = (Arc::clone(&self.around.memory), Arc::clone(&self.budget));
            let free = move || {
                memory.unkeep(&at);
                budget.free(cost);
            };
            match offer {
                // Not before the last reader has finished (BYP-1).
                Some((offer, mapped)) => offer.withdraw(Box::new(move || {
                    drop(mapped);
                    free();
                })),
                None => free(),
            }
        }
    }

    /// Answers a process that asks for the bytes of a value. None if it is not, or no longer, kept here.
    pub(crate) fn fetch(&self, id: u64, to: ProcAddr) -> Option<Fetched> {
        self.fetched.fetch_add(1, Ordering::Relaxed);
        let memory = &self.around.memory;
        match self.place(id)? {
            (Place::Heap(bytes), _) => Some(Fetched::Heap(bytes)),
            (Place::Shared(at), len) if to.host != self.around.me.host && memory.lend(&at) => {
                Some(Fetched::Lent(at, len))
            }
            (Place::Shared(at), len) => memory.view(&at, len).ok().map(Fetched::Mapped),
        }
    }

    // References.

    /// This process's hold on a value, if it has one.
    pub(crate) fn held(&self, addr: &RefAddr) -> Option<Arc<Hold>> {
        lock(&self.held).holds.get(addr).and_then(Weak::upgrade)
    }

    /// Holds a value under these tickets. True if this process must ask to be told of the owner's end.
    pub(crate) fn hold(&self, addr: RefAddr, tickets: &[Ticket]) -> (Arc<Hold>, bool) {
        let mut held = lock(&self.held);
        let known = held.holds.get(&addr).and_then(Weak::upgrade);
        let hold = known.unwrap_or_else(|| {
            let hold = Arc::new(Hold::new(Weak::clone(&self.around.counter), addr));
            held.holds.insert(addr, Arc::downgrade(&hold));
            hold
        });
        hold.add(tickets);
        let fresh = held.watched.insert(addr.owner) && addr.owner != self.around.me;
        (hold, fresh)
    }

    /// Takes a reference that was read from the kept value `outer`, which this process holds. Returns the tickets.
    pub(crate) fn read(&self, addr: RefAddr, outer: RefAddr, out: &impl Dispatch) -> Vec<Ticket> {
        let (me, RefAddr { owner, id }) = (self.around.me, addr);
        let mut tickets = vec![self.around.ids.next()];
        self.tell_given(addr, tickets[0], vec![me], out);
        // Nothing can overtake this within this process, or on the way to a process that keeps both values.
        if owner != me && owner != outer.owner {
            let ticket = self.around.ids.next();
            self.tell(outer, Holding::Read(Carried { owner, id, ticket }), out);
            tickets.push(ticket);
        }
        tickets
    }

    /// Tells the owners of references that they are about to travel to `target` (REF-2).
    pub(crate) fn give(&self, refs: &[Arc<Hold>], target: &Target, out: &impl Dispatch) -> Vec<Carried> {
        let to: Vec<ProcAddr> = target.procs().collect();
        let give = |hold: &Arc<Hold>| {
            let (RefAddr { owner, id }, ticket) = (hold.addr(), self.around.ids.next());
            for some in to.chunks(MOST_NAMED) {
                self.tell_given(hold.addr(), ticket, some.to_vec(), out);
            }
            Carried { owner, id, ticket }
        };
        refs.iter().map(give).collect()
    }

    /// A message will never arrive, so its receivers do not hold the references in it after all.
    pub(crate) fn unsent(&self, frame: &Frame, out: &impl Dispatch) {
        if self.around.standing.usable().is_err() {
            return;
        }
        let to: Vec<ProcAddr> = frame.target().map(|target| target.procs().collect()).unwrap_or_default();
        for Carried { owner, id, ticket } in frame.carried() {
            for some in to.chunks(MOST_NAMED) {
                self.tell(RefAddr { owner, id }, Holding::Unsent { ticket, to: some.to_vec() }, out);
            }
        }
    }

    /// Nothing in this process holds a value any more.
    pub(crate) fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>, out: &impl Dispatch) {
        {
            let mut held = lock(&self.held);
            // Another hold may have taken its place meanwhile.
            if held.holds.get(&hold.addr()).is_some_and(|one| std::ptr::eq(one.as_ptr(), hold)) {
                held.holds.remove(&hold.addr());
            }
        }
        if hold.lost().is_none() && self.around.standing.usable().is_ok() {
            self.tell(hold.addr(), Holding::LetGo(tickets), out);
        }
    }

    /// Tells a value's owner to whom it is given.
    fn tell_given(&self, addr: RefAddr, ticket: Ticket, to: Vec<ProcAddr>, out: &impl Dispatch) {
        self.tell(addr, Holding::Given { ticket, to, name: String::new() }, out);
    }

    /// Tells a value's owner who holds it.
    fn tell(&self, addr: RefAddr, news: Holding, out: &impl Dispatch) {
        let me = self.around.me;
        if addr.owner == me {
            self.on_held(addr.id, me, news, out);
        } else {
            out.dispatch(Held { call: addr.id, place: 0, news }.frame(me, addr.owner));
        }
    }

    /// Opens a value without copying it.
    ///
    /// # Errors
    /// If this is a forked copy, or the memory cannot be mapped.
    pub fn view(&self, kept: &Kept, hold: &Arc<Hold>) -> Result<Opened, RuntimeError> {
        let Around { me, memory, standing, .. } = &self.around;
        standing.original()?;
        if let Some(ended) = hold.lost() {
            return Ok(Opened::Lost(Arc::clone(ended)));
        }
        let odd = || RuntimeError::Os { what: "read a kept value", errno: Errno::INVAL };
        if let Some(at) = kept.at.filter(|_| kept.addr.owner.host == me.host) {
            return match memory.view(&at, kept.len) {
                Ok(view) => View::mapped(view, hold).map(Opened::Here).ok_or_else(odd),
                // Its owner has just ended. The answer to a fetch will say how.
                Err(RuntimeError::Os { errno: Errno::NOENT | Errno::SRCH | Errno::NXIO, .. }) => {
                    Ok(hold.lost().map_or(Opened::Remote, |ended| Opened::Lost(Arc::clone(ended))))
                }
                // This process may not map it, for example because it runs as another user.
                Err(RuntimeError::Os { errno: Errno::ACCESS | Errno::PERM, .. }) => Ok(Opened::Remote),
                Err(error) => Err(error),
            };
        }
        match self.place(kept.addr.id).filter(|_| kept.addr.owner == *me) {
            Some((Place::Heap(bytes), _)) => View::of_bytes(bytes).map(Opened::Here).ok_or_else(odd),
            _ => Ok(Opened::Remote),
        }
    }

    // Ends.

    /// Processes have ended: the values that they kept are lost (REF-4), and they hold nothing any more.
    pub(crate) fn on_ends(&self, dead: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) {
        let lost: Vec<Arc<Hold>> = {
            let mut held = lock(&self.held);
            held.watched.retain(|owner| !dead(*owner));
            let theirs = held.holds.iter().filter(|(addr, _)| dead(addr.owner));
            theirs.filter_map(|(_, hold)| hold.upgrade()).collect()
        };
        lost.iter().for_each(|hold| hold.lose(ended));
        // One of them may be the last, and dropping that takes the lock.
        drop(lost);
        let gone: Vec<Entry> = {
            let mut own = lock(&self.own);
            let gone: Vec<ProcAddr> = own.watched.extract_if(|addr| dead(*addr)).collect();
            if gone.is_empty() {
                return;
            }
            own.entries.values_mut().for_each(|entry| gone.iter().for_each(|addr| entry.holders.died(*addr, ended)));
            own.entries.extract_if(|_, entry| entry.holders.verdict().is_some()).map(|(_, entry)| entry).collect()
        };
        self.free(gone);
    }
}
