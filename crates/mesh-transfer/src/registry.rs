//! Memory that is registered with a device while somebody uses it.
//!
//! A device accesses the pages that were registered, whatever the process later maps at their addresses. So:
//!
//! REG-1: a new holder shares a region only if each of its bytes has been held, by one holder or another, since the
//! region was made.
//! REG-2: a region is released with its last holder. A failure to make one is reported to the caller and not
//! remembered.

use crate::error::TransferError;
use crate::lock;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex};

/// Registers memory with a device.
pub(crate) trait Registrar: Debug + Send + Sync {
    /// A registration. Dropping it deregisters the memory.
    type Region: Debug + Send + Sync;

    /// Registers the bytes from `start` on for local access, also for writing if `writable`.
    fn register(&self, start: u64, len: u64, writable: bool) -> Result<Self::Region, TransferError>;
}

/// The regions of one device that are in use.
pub(crate) struct Registry<R: Registrar> {
    registrar: R,
    page: u64,
    table: Arc<Mutex<Table<R::Region>>>,
}

/// Keeps memory registered. The memory must not be replaced while this lives.
pub(crate) struct Hold<T> {
    region: Arc<T>,
    holder: Holder,
    table: Arc<Mutex<Table<T>>>,
}

#[derive(Debug)]
struct Table<T> {
    regions: BTreeMap<Key, Entry<T>>,
    next: u64,
}

/// Regions are ordered by size first, so that those that reach some place are close together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// The number of bits in the length.
    bits: u32,
    start: u64,
    /// Distinguishes regions with the same start.
    number: u64,
}

fn bits(len: u64) -> u32 {
    u64::BITS - len.leading_zeros()
}

#[derive(Debug)]
struct Entry<T> {
    region: Arc<T>,
    end: u64,
    writable: bool,
    /// What each holder holds, in order of arrival.
    holders: Vec<Holder>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    id: u64,
    start: u64,
    end: u64,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { regions: BTreeMap::new(), next: 0 }
    }
}

impl<T> Entry<T> {
    /// Whether each byte is held by somebody (REG-1).
    fn covers(&self, start: u64, end: u64) -> bool {
        let mut at = start;
        while at < end {
            let reached = self.holders.iter().filter(|each| each.start <= at).map(|each| each.end).max();
            match reached {
                Some(reached) if reached > at => at = reached,
                _ => return false,
            }
        }
        true
    }
}

impl<T> Table<T> {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The regions that overlap these bytes.
    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (&Key, &Entry<T>)> {
        let first = |from: Key| self.regions.range(from..).next().map(|(key, _)| key.bits);
        let sizes = std::iter::successors(first(Key { bits: 0, start: 0, number: 0 }), move |bits| {
            first(Key { bits: bits + 1, start: 0, number: 0 })
        });
        sizes.flat_map(move |bits| {
            // No region of this size is longer.
            let longest = u64::MAX >> (u64::BITS - bits.clamp(1, u64::BITS));
            let from = Key { bits, start: start.saturating_sub(longest), number: 0 };
            let to = Key { bits, start: end, number: 0 };
            self.regions.range(from..to).filter(move |(_, entry)| entry.end > start)
        })
    }

    fn insert(&mut self, start: u64, entry: Entry<T>) {
        let number = self.number();
        self.regions.insert(Key { bits: bits(entry.end - start), start, number }, entry);
    }

    /// Finds a region that has all of it, and adds a holder.
    fn share(&mut self, wanted: Wanted) -> Option<(Arc<T>, Holder)> {
        let fits = |entry: &Entry<T>| (entry.writable || !wanted.writable) && entry.covers(wanted.start, wanted.end);
        let key = self.overlapping(wanted.start, wanted.end).find(|(_, entry)| fits(entry)).map(|(key, _)| *key)?;
        let holder = Holder { id: self.number(), start: wanted.start, end: wanted.end };
        let entry = self.regions.get_mut(&key)?;
        entry.holders.push(holder);
        Some((Arc::clone(&entry.region), holder))
    }

    /// Extends these bytes by all held memory that overlaps them. Returns the range and its holders.
    fn merged(&self, start: u64, end: u64, writable: bool) -> (u64, u64, Vec<Holder>) {
        let (mut from, mut to) = (start, end);
        loop {
            let mut holders: Vec<Holder> = Vec::new();
            let (mut low, mut high) = (from, to);
            for (_, entry) in self.overlapping(from, to).filter(|(_, entry)| entry.writable == writable) {
                for holder in entry.holders.iter().filter(|each| each.start < to && each.end > from) {
                    low = low.min(holder.start);
                    high = high.max(holder.end);
                    if !holders.contains(holder) {
                        holders.push(*holder);
                    }
                }
            }
            if (low, high) == (from, to) {
                return (from, to, holders);
            }
            (from, to) = (low, high);
        }
    }

    /// Whether that holder is still there.
    fn has(&self, holder: &Holder) -> bool {
        let mut entries = self.overlapping(holder.start, holder.end);
        entries.any(|(_, entry)| entry.holders.contains(holder))
    }

    /// Removes a holder, and the regions that nobody holds any longer.
    fn release(&mut self, holder: &Holder) -> Vec<Entry<T>> {
        let mut keys = Vec::new();
        for (key, entry) in self.overlapping(holder.start, holder.end) {
            if entry.holders.contains(holder) {
                keys.push(*key);
            }
        }
        let mut freed = Vec::new();
        for key in keys {
            if let Some(entry) = self.regions.get_mut(&key) {
                entry.holders.retain(|each| each != holder);
                if entry.holders.is_empty() {
                    freed.extend(self.regions.remove(&key));
                }
            }
        }
        freed
    }
}

#[derive(Clone, Copy)]
struct Wanted {
    start: u64,
    end: u64,
    writable: bool,
}

impl<R: Registrar> Registry<R> {
    /// A registry of memory with pages of this size.
    pub(crate) fn new(registrar: R, page: u64) -> Self {
        Self { registrar, page, table: Arc::default() }
    }

    /// Registers these bytes: at least one, ending inside the address space.
    ///
    /// Registers whole pages: if one byte of a page exists, all of it does. Overlapping memory is registered as one
    /// region.
    pub(crate) fn hold(&self, start: u64, len: u64, writable: bool) -> Result<Hold<R::Region>, TransferError> {
        let end = (start + len).checked_next_multiple_of(self.page).unwrap_or(start + len);
        let start = start / self.page * self.page;
        // Those who share a region also hold whole pages, so that later merges consist of whole pages.
        let shared = lock(&self.table).share(Wanted { start, end, writable });
        if let Some((region, holder)) = shared {
            return Ok(self.held(region, holder));
        }
        let (from, to, mut others) = lock(&self.table).merged(start, end, writable);
        // Registered without the lock, since it may take long.
        let (from, to, region) = match self.registrar.register(from, to - from, writable) {
            Ok(region) => (from, to, region),
            // The memory to merge may be gone by now, or too much together.
            Err(_) if (from, to) != (start, end) => {
                others.clear();
                (start, end, self.registrar.register(start, end - start, writable)?)
            }
            Err(error) => return Err(error),
        };
        let region = Arc::new(region);
        let mut table = lock(&self.table);
        let holder = Holder { id: table.number(), start, end };
        // REG-1: only those who held throughout; what others held may be something else by now.
        let mut holders: Vec<Holder> = others.into_iter().filter(|other| table.has(other)).collect();
        holders.push(holder);
        table.insert(from, Entry { region: Arc::clone(&region), end: to, writable, holders });
        drop(table);
        Ok(self.held(region, holder))
    }

    fn held(&self, region: Arc<R::Region>, holder: Holder) -> Hold<R::Region> {
        Hold { region, holder, table: Arc::clone(&self.table) }
    }

    /// The number of regions.
    pub(crate) fn len(&self) -> usize {
        lock(&self.table).regions.len()
    }
}

impl<R: Registrar> Debug for Registry<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({:?}, {} regions)", self.registrar, self.len())
    }
}

impl<T> Hold<T> {
    /// The registration.
    pub(crate) fn region(&self) -> &T {
        &self.region
    }
}

impl<T> Debug for Hold<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hold({}..{})", self.holder.start, self.holder.end)
    }
}

impl<T> Drop for Hold<T> {
    fn drop(&mut self) {
        // Deregister outside the lock.
        let freed = lock(&self.table).release(&self.holder);
        drop(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

    const PAGE: u64 = 4096;

    /// Records registrations, in order.
    #[derive(Debug, Default)]
    struct Told {
        made: Mutex<Vec<(u64, u64, bool)>>,
        forgotten: Arc<AtomicUsize>,
        fails: AtomicBool,
        /// Fails for more bytes than this.
        limit: AtomicU64,
        /// Dropped during a registration.
        meanwhile: Mutex<Option<Hold<Region>>>,
    }

    #[derive(Debug)]
    struct Region {
        start: u64,
        len: u64,
        forgotten: Arc<AtomicUsize>,
    }

    impl Drop for Region {
        fn drop(&mut self) {
            self.forgotten.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Registrar for Told {
        type Region = Region;

        fn register(&self, start: u64, len: u64, writable: bool) -> Result<Region, TransferError> {
            let limit = self.limit.load(Ordering::SeqCst);
            if self.fails.load(Ordering::SeqCst) || (limit > 0 && len > limit) {
                return Err(TransferError::transport("no"));
            }
            self.made.lock().unwrap().push((start, len, writable));
            let released = self.meanwhile.lock().unwrap().take();
            drop(released);
            Ok(Region { start, len, forgotten: Arc::clone(&self.forgotten) })
        }
    }

    fn registry() -> Registry<Told> {
        Registry::new(Told::default(), PAGE)
    }

    impl Registry<Told> {
        fn made(&self) -> Vec<(u64, u64, bool)> {
            self.registrar.made.lock().unwrap().clone()
        }

        fn forgotten(&self) -> usize {
            self.registrar.forgotten.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn views_share_a_region_which_ends_with_the_last_of_them() {
        let registry = registry();
        let whole = registry.hold(10 * PAGE, 4 * PAGE, true).unwrap();
        let part = registry.hold(11 * PAGE + 5, 100, true).unwrap();
        let read_only = registry.hold(10 * PAGE, 4 * PAGE, false).unwrap();
        assert_eq!(registry.made(), [(10 * PAGE, 4 * PAGE, true)]);
        assert!(std::ptr::eq(whole.region(), part.region()) && std::ptr::eq(whole.region(), read_only.region()));
        drop((whole, read_only));
        assert_eq!((registry.len(), registry.forgotten()), (1, 0));
        drop(part);
        assert_eq!((registry.len(), registry.forgotten()), (0, 1));
    }

    #[test]
    fn whole_pages_are_told_of() {
        let registry = registry();
        let _hold = registry.hold(PAGE + 1, PAGE, false).unwrap();
        assert_eq!(registry.made(), [(PAGE, 2 * PAGE, false)]);
    }

    #[test]
    fn what_overlaps_is_told_of_as_one() {
        let registry = registry();
        let first = registry.hold(0, 2 * PAGE, true).unwrap();
        let third = registry.hold(3 * PAGE, 2 * PAGE, true).unwrap();
        let middle = registry.hold(PAGE, 3 * PAGE, true).unwrap();
        assert_eq!(registry.made()[2], (0, 5 * PAGE, true));
        // All of them are held, and so is memory that spans them.
        let across = registry.hold(0, 5 * PAGE, true).unwrap();
        assert!(std::ptr::eq(across.region(), middle.region()));
        assert_eq!(registry.made().len(), 3);
        // The first and third keep their own regions until they end.
        assert_eq!((first.region().len, third.region().len), (2 * PAGE, 2 * PAGE));
        drop(first);
        assert_eq!(registry.forgotten(), 1);
        drop((third, middle, across));
        assert_eq!((registry.len(), registry.forgotten()), (0, 3));
    }

    /// REG-1
    #[test]
    fn what_was_let_go_is_not_shared_though_the_region_is_there() {
        let registry = registry();
        let first = registry.hold(0, 2 * PAGE, true).unwrap();
        let second = registry.hold(PAGE, 2 * PAGE, true).unwrap();
        assert_eq!(registry.made()[1], (0, 3 * PAGE, true));
        drop(first);
        // The pages at 0 may be different ones now.
        let again = registry.hold(0, PAGE, true).unwrap();
        assert!(!std::ptr::eq(again.region(), second.region()));
        assert_eq!(registry.made()[2], (0, PAGE, true));
        let held = registry.hold(PAGE, 2 * PAGE, true).unwrap();
        assert!(std::ptr::eq(held.region(), second.region()));
    }

    /// REG-1
    #[test]
    fn what_was_let_go_while_the_device_was_told_of_it_is_not_shared() {
        let registry = registry();
        let first = registry.hold(0, 2 * PAGE, true).unwrap();
        *registry.registrar.meanwhile.lock().unwrap() = Some(first);
        let second = registry.hold(PAGE, 2 * PAGE, true).unwrap();
        assert_eq!(second.region().len, 3 * PAGE);
        let again = registry.hold(0, PAGE, true).unwrap();
        assert!(!std::ptr::eq(again.region(), second.region()));
    }

    #[test]
    fn memory_that_is_only_read_is_never_joined_with_what_is_written() {
        let registry = registry();
        let _constant = registry.hold(0, 2 * PAGE, false).unwrap();
        let _written = registry.hold(PAGE, 2 * PAGE, true).unwrap();
        assert_eq!(registry.made(), [(0, 2 * PAGE, false), (PAGE, 2 * PAGE, true)]);
        let _again = registry.hold(0, PAGE, true).unwrap();
        assert_eq!(registry.made()[2], (0, PAGE, true));
    }

    /// REG-2
    #[test]
    fn failures_are_not_remembered() {
        let registry = registry();
        registry.registrar.fails.store(true, Ordering::SeqCst);
        assert_eq!(registry.hold(0, PAGE, true).unwrap_err().kind, ErrorKind::Transport);
        assert_eq!(registry.len(), 0);
        registry.registrar.fails.store(false, Ordering::SeqCst);
        registry.hold(0, PAGE, true).unwrap();
        assert_eq!(registry.len(), 0);
    }

    #[test]
    fn what_cannot_be_told_of_together_is_told_of_alone() {
        let registry = registry();
        registry.registrar.limit.store(2 * PAGE, Ordering::SeqCst);
        let first = registry.hold(0, 2 * PAGE, true).unwrap();
        let second = registry.hold(PAGE, 2 * PAGE, true).unwrap();
        assert_eq!(registry.made(), [(0, 2 * PAGE, true), (PAGE, 2 * PAGE, true)]);
        drop((first, second));
        assert_eq!(registry.len(), 0);
    }

    #[test]
    fn what_is_joined_with_one_who_shared_a_part_of_a_page_has_all_of_that_page() {
        let registry = registry();
        let first = registry.hold(22 * PAGE, 8 * PAGE, true).unwrap();
        let second = registry.hold(22 * PAGE + 5, 7 * PAGE, false).unwrap();
        drop(first);
        let third = registry.hold(14 * PAGE, 8 * PAGE + 1, true).unwrap();
        assert_eq!((third.region().start, third.region().len), (14 * PAGE, 16 * PAGE));
        drop((second, third));
        assert_eq!(registry.len(), 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Hold(u64, u64, bool),
        Release(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..30 * PAGE, 1..8 * PAGE, any::<bool>())
                .prop_map(|(start, len, writable)| Step::Hold(start, len, writable)),
            any::<usize>().prop_map(Step::Release),
        ]
    }

    proptest! {
        /// REG-1, REG-2: against a model that knows since when each page has been held without a break.
        #[test]
        fn a_region_has_what_its_holders_hold_since_it_was_made(steps in prop::collection::vec(step(), 1..60)) {
            let registry = registry();
            // The name of each page; it changes whenever nobody holds the page.
            let mut pages: Vec<(usize, u64)> = vec![(0, 0); 64];
            let mut seen: BTreeMap<*const Region, Vec<u64>> = BTreeMap::new();
            let mut holds: Vec<(Hold<Region>, u64, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Hold(start, len, writable) => {
                        let hold = registry.hold(start, len, writable).unwrap();
                        let (first, last) = (start / PAGE, (start + len - 1) / PAGE);
                        for page in first..=last {
                            pages[page as usize].0 += 1;
                        }
                        let region: *const Region = hold.region();
                        let (from, to) = (hold.region().start / PAGE, (hold.region().start + hold.region().len) / PAGE);
                        prop_assert!(from <= first && last < to, "the region has all of it");
                        let names = seen.entry(region).or_insert_with(|| {
                            (from..to).map(|page| pages[page as usize].1).collect()
                        });
                        for page in first..=last {
                            prop_assert_eq!(names[(page - from) as usize], pages[page as usize].1, "other pages by now");
                        }
                        holds.push((hold, first, last));
                    }
                    Step::Release(at) if !holds.is_empty() => {
                        let (hold, first, last) = holds.swap_remove(at % holds.len());
                        let region: *const Region = hold.region();
                        drop(hold);
                        for page in first..=last {
                            let page = &mut pages[page as usize];
                            page.0 -= 1;
                            if page.0 == 0 {
                                page.1 += 1;
                            }
                        }
                        // Its address may later be another region's.
                        let regions: Vec<*const Region> = {
                            let table = lock(&registry.table);
                            table.regions.values().map(|entry| Arc::as_ptr(&entry.region)).collect()
                        };
                        if !regions.contains(&region) {
                            seen.remove(&region);
                        }
                        seen.retain(|region, _| regions.contains(region));
                    }
                    Step::Release(_) => {}
                }
            }
            holds.clear();
            prop_assert_eq!(registry.len(), 0);
            prop_assert_eq!(registry.forgotten(), registry.made().len());
        }
    }

    #[test]
    fn threads_that_hold_and_release_at_once_leave_nothing() {
        let registry = registry();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let registry = &registry;
                scope.spawn(move || {
                    for turn in 0..300_u64 {
                        let start = (thread * 7 + turn * 3) % 20 * PAGE;
                        let hold = registry.hold(start, 3 * PAGE, true).unwrap();
                        let region = hold.region();
                        assert!(region.start <= start && start + 3 * PAGE <= region.start + region.len);
                    }
                });
            }
        });
        assert_eq!(registry.len(), 0);
        assert_eq!(registry.forgotten(), registry.made().len());
    }
}
