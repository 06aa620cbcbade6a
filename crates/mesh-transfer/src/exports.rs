//! The memory that this process offers.
//!
//! EXP-1: the memory of an export is kept from `open` until it is closed *and* nobody works on it: neither this
//! process's threads, which hold the `Export`, nor other processes, which hold leases (LSE-1).
//! EXP-2: an export may be entrusted to the owner of its memory, who may free it then. Before the owner does, it closes
//! the export and waits until nobody works on it (`Ending`).

use crate::control::{Control, Offered, SLOTS};
use crate::cuda::OnDevice;
use crate::error::{Closing, TransferError};
use crate::handle::{RealmId, Token, is_same};
use crate::lock;
use crate::pool::{Block, Pool, Pooled};
use crate::realm::{Realm, random};
use crate::segments::Segments;
use crate::witness::Witness;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Keeps the memory alive while it is in use. Dropped on any thread.
pub type Keep = Box<dyn Any + Send + Sync>;

/// Memory that this process offers.
pub struct Export {
    /// Its slot in the table.
    pub slot: u32,
    /// How often the slot has been used.
    pub generation: u32,
    /// Shown for each operation.
    pub token: Token,
    /// Where it is in this process.
    pub segments: Segments,
    /// Whether others may write to it.
    pub writable: bool,
    /// GPU details, if it is a GPU's memory.
    pub(crate) on_device: Option<OnDevice>,
    keep: Mutex<Option<Keep>>,
    ending: Arc<Ending>,
}

/// Tells that nobody works on an export any more, neither this process's threads nor other processes.
#[derive(Debug, Default)]
pub struct Ending {
    is_over: Mutex<bool>,
    over: Condvar,
}

impl Ending {
    /// Waits for that, at most so long if there is a limit. Returns whether it is so.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        let is_over = lock(&self.is_over);
        match limit {
            None => *self.over.wait_while(is_over, |is_over| !*is_over).unwrap_or_else(PoisonError::into_inner),
            Some(limit) => {
                let waited = self.over.wait_timeout_while(is_over, limit, |is_over| !*is_over);
                *waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

impl Export {
    /// What keeps the memory.
    pub fn keep(&self) -> MutexGuard<'_, Option<Keep>> {
        lock(&self.keep)
    }

    /// Tells when it has ended.
    pub fn ending(&self) -> Arc<Ending> {
        Arc::clone(&self.ending)
    }

    /// Lets something else keep the memory, or nothing. Returns what kept it until now.
    ///
    /// # Safety
    /// If `keep` does not keep the memory, its owner must close the export and wait for its `ending` before freeing it
    /// (EXP-2).
    #[must_use]
    pub unsafe fn entrust(&self, keep: Option<Keep>) -> Option<Keep> {
        std::mem::replace(&mut *lock(&self.keep), keep)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // It may refer to the memory.
        self.on_device = None;
        *lock(&self.ending.is_over) = true;
        self.ending.over.notify_all();
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({}:{}, {} bytes)", self.slot, self.generation, self.segments.len())
    }
}

/// The table of exports of a process.
#[derive(Debug)]
pub struct Exports {
    realm: Realm,
    control: Arc<Control>,
    _witness: Witness,
    table: Arc<Mutex<Table>>,
    /// Memory that others can map.
    pool: Arc<Pool>,
    /// Closed, but still leased.
    draining: Arc<Mutex<Draining>>,
}

#[derive(Debug, Default)]
struct Table {
    live: HashMap<u32, Arc<Export>>,
    /// Slots to reuse, with their next generation; the longest unused first.
    free: VecDeque<(u32, u32)>,
    fresh: u32,
}

impl Table {
    /// Lets the slot be used again, unless its generations are used up.
    fn recycle(&mut self, export: &Export) {
        if let Some(next) = export.generation.checked_add(1) {
            self.free.push_back((export.slot, next));
        }
    }
}

#[derive(Debug, Default)]
struct Draining {
    exports: Vec<Arc<Export>>,
    is_watched: bool,
}

impl Exports {
    pub(crate) fn new(realm: &Realm) -> Result<Self, TransferError> {
        let witness = Witness::raise(&realm.id, realm.pid)?;
        let control = Arc::new(Control::create(realm, witness.addr())?);
        Ok(Self {
            realm: realm.clone(),
            control,
            _witness: witness,
            table: Arc::default(),
            pool: Arc::default(),
            draining: Arc::default(),
        })
    }

    /// The number of the descriptor by which readers find the control page.
    pub(crate) fn descriptor(&self) -> u32 {
        self.control.descriptor()
    }

    /// Allocates uninitialized memory that others of this host can map.
    pub fn allocate(&self, len: u64) -> Result<Block, TransferError> {
        self.realm.check_fork()?;
        self.pool.allocate(len)
    }

    /// Finds the arena that contains these bytes, if any.
    pub fn pooled(&self, addr: u64, len: u64) -> Option<Pooled> {
        self.pool.find(addr, len)
    }

    /// Stops returning arena memory: the process ends (ARN-1).
    pub(crate) fn end(&self) {
        self.pool.end();
    }

    /// The number of arenas.
    pub fn arenas(&self) -> usize {
        self.pool.arenas()
    }

    /// Offers memory.
    ///
    /// # Safety
    /// The segments must be this process's memory, readable (and writable, if so said) for as long as `keep` lives. Its
    /// users here must expect others to write to it meanwhile.
    pub unsafe fn open(&self, segments: Segments, writable: bool, keep: Keep) -> Result<Arc<Export>, TransferError> {
        segments.check_host()?;
        // SAFETY: as the caller vouches.
        unsafe { self.open_on(segments, None, writable, keep) }
    }

    /// Offers memory, which may be a GPU's.
    ///
    /// # Safety
    /// As for [`Self::open`], except that only CUDA's driver need be able to read and write GPU memory.
    pub(crate) unsafe fn open_on(
        &self,
        segments: Segments,
        on_device: Option<OnDevice>,
        writable: bool,
        keep: Keep,
    ) -> Result<Arc<Export>, TransferError> {
        self.realm.check_fork()?;
        let token = random()?;
        let mut table = self.table();
        let (slot, generation) = match table.free.pop_front() {
            Some(found) => found,
            None if (table.fresh as usize) < SLOTS => {
                table.fresh += 1;
                (table.fresh - 1, 1)
            }
            None => {
                return Err(TransferError::invalid(format!(
                    "this process offers {SLOTS} buffers already; drop those that nobody needs, or offer larger ones"
                )));
            }
        };
        let (keep, ending) = (Mutex::new(Some(keep)), Arc::default());
        let export = Arc::new(Export { slot, generation, token, segments, writable, on_device, keep, ending });
        let list = export.segments.list();
        let mut offered = Offered {
            token,
            length: export.segments.len(),
            pieces_at: if let [one] = list { one.addr } else { list.as_ptr() as u64 },
            pieces: list.len() as u64,
            writable,
            one_piece: list.len() == 1,
            pooled: None,
            cuda: false,
        };
        if let Some(on) = &export.on_device {
            // A reader that does not know this flag finds more pieces than there can be.
            offered = Offered { pieces_at: on.record(), pieces: u64::MAX, cuda: true, ..offered };
            offered.one_piece = false;
        } else if let [one] = list {
            offered.pooled = self.pool.find(one.addr, one.len);
        }
        self.control.open(slot, generation, &offered)?;
        table.live.insert(slot, Arc::clone(&export));
        Ok(export)
    }

    /// Returns the export that a peer names, if it is there and the peer may use it.
    pub fn find(&self, slot: u32, generation: u32, token: &Token) -> Result<Arc<Export>, TransferError> {
        let gone = || TransferError::closed(self.control.closing(slot, generation));
        let export = self.table().live.get(&slot).cloned().ok_or_else(gone)?;
        if export.generation != generation {
            return Err(gone());
        }
        if !is_same(&export.token, token) {
            return Err(TransferError::refused("the owner does not recognise this handle"));
        }
        Ok(export)
    }

    /// Why an export is not offered; none if that is not known any more.
    pub(crate) fn closing(&self, slot: u32, generation: u32) -> Option<Closing> {
        self.control.closing(slot, generation)
    }

    /// Whether the export is offered.
    pub fn is_live(&self, export: &Export) -> bool {
        self.table().live.get(&export.slot).is_some_and(|live| live.generation == export.generation)
    }

    /// All exports that are offered.
    pub fn live(&self) -> Vec<Arc<Export>> {
        self.table().live.values().cloned().collect()
    }

    /// Stops offering it. The memory is released once nobody works on it (EXP-1). Does not wait. Returns whether it was
    /// offered until now.
    pub fn close(&self, export: &Arc<Export>, closing: Closing) -> bool {
        // In a forked copy, the page is still the parent's.
        if self.realm.check_fork().is_err() {
            return false;
        }
        {
            let mut table = self.table();
            // If it was closed before, the slot may be another's by now.
            if table.live.get(&export.slot).is_none_or(|live| live.generation != export.generation) {
                return false;
            }
            table.live.remove(&export.slot);
        }
        if self.control.close(export.slot, export.generation, closing) {
            self.table().recycle(export);
            return true;
        }
        let mut draining = self.draining();
        draining.exports.push(Arc::clone(export));
        // Leases looked for from now on are looked for after this.
        self.control.set_draining(true);
        self.control.look_again();
        if !draining.is_watched {
            let control = Arc::clone(&self.control);
            let (list, table) = (Arc::clone(&self.draining), Arc::clone(&self.table));
            let watcher = std::thread::Builder::new().name("mesh-drain".to_owned()).stack_size(64 * 1024);
            // Without a thread, the memory is kept until the next close; it is never freed too early.
            draining.is_watched = watcher.spawn(move || drain(&control, &list, &table)).is_ok();
        }
        true
    }

    /// The number of exports that are offered, and of closed ones that others still use.
    pub fn counts(&self) -> (usize, usize) {
        let live = self.table().live.len();
        (live, self.draining().exports.len())
    }

    /// The incarnation that owns them.
    pub fn realm(&self) -> &RealmId {
        &self.realm.id
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    fn draining(&self) -> MutexGuard<'_, Draining> {
        lock(&self.draining)
    }
}

/// Releases closed exports as their leases end; returns after the last.
fn drain(control: &Control, list: &Mutex<Draining>, table: &Mutex<Table>) {
    loop {
        let seen = control.drained();
        let (done, is_last) = {
            let mut draining = lock(list);
            let (leased, done): (Vec<_>, Vec<_>) = std::mem::take(&mut draining.exports)
                .into_iter()
                .partition(|export| control.is_leased(export.slot, export.generation));
            draining.exports = leased;
            draining.is_watched = !draining.exports.is_empty();
            control.set_draining(draining.is_watched);
            (done, draining.exports.is_empty())
        };
        for export in &done {
            lock(table).recycle(export);
        }
        drop(done);
        if is_last {
            return;
        }
        control.await_drain(seen);
        control.bury();
    }
}
