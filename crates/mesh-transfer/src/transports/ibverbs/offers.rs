//! What this process has offered through its devices, and may therefore also keep registered for its own transfers.

use super::device::{Local, Region};
use crate::lock;
use crate::registry::{Hold, Registrar, Registry};
use crate::segments::Segment;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

/// How many offers that begin before an address are checked for reaching past it.
const LOOK: usize = 8;

/// The exports, by their place in the table of exports and by address.
#[derive(Debug)]
pub(super) struct Offers<L: Registrar = Local, T = Region>(Mutex<Table<L, T>>);

#[derive(Debug)]
struct Table<L: Registrar, T> {
    by_place: HashMap<Place, Arc<Offer<L, T>>>,
    by_address: BTreeMap<(u64, Place), Arc<Offer<L, T>>>,
}

/// Slot and generation.
pub(super) type Place = (u32, u32);

#[derive(Debug)]
struct Offer<L: Registrar, T> {
    memory: Segment,
    writable: bool,
    /// None once withdrawn.
    known: Mutex<Option<Known<L, T>>>,
}

#[derive(Debug)]
struct Known<L: Registrar, T> {
    /// What others reach it by (VRB-2).
    _regions: Vec<Arc<T>>,
    /// Registrations for this process's own transfers, on each device that had any.
    local: Vec<Held<L>>,
}

type Held<L> = (Arc<Registry<L>>, Hold<<L as Registrar>::Region>);

impl<L: Registrar, T> Default for Offers<L, T> {
    fn default() -> Self {
        Self(Mutex::new(Table { by_place: HashMap::new(), by_address: BTreeMap::new() }))
    }
}

impl<L: Registrar, T> Offers<L, T> {
    fn lock(&self) -> MutexGuard<'_, Table<L, T>> {
        lock(&self.0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().by_place.is_empty()
    }

    pub(super) fn insert(&self, place: Place, memory: Segment, writable: bool, regions: Vec<Arc<T>>) {
        let known = Known { _regions: regions, local: Vec::new() };
        let offer = Arc::new(Offer { memory, writable, known: Mutex::new(Some(known)) });
        let mut table = self.lock();
        table.by_address.insert((memory.addr, place), Arc::clone(&offer));
        table.by_place.insert(place, offer);
    }

    /// Withdraws an export. Afterwards no device has it registered, except for this process's transfers under way.
    pub(super) fn remove(&self, place: Place) {
        let offer = {
            let mut table = self.lock();
            let offer = table.by_place.remove(&place);
            if let Some(offer) = &offer {
                table.by_address.remove(&(offer.memory.addr, place));
            }
            offer
        };
        if let Some(offer) = offer {
            // A thread that is adding to it finishes first; later ones find it withdrawn.
            let known = lock(&offer.known).take();
            drop(known);
        }
    }

    /// If these bytes are offered, registers the whole offer with the device, for as long as it stands.
    pub(super) fn keep(&self, memory: &Arc<Registry<L>>, span: Segment, writable: bool) {
        let end = span.addr + span.len;
        let reaches =
            |offer: &&Arc<Offer<L, T>>| offer.memory.addr + offer.memory.len >= end && (offer.writable || !writable);
        let found = {
            let table = self.lock();
            let before = table.by_address.range(..=(span.addr, (u32::MAX, u32::MAX))).rev().take(LOOK);
            before.map(|(_, offer)| offer).find(reaches).cloned()
        };
        let Some(offer) = found else { return };
        let mut known = lock(&offer.known);
        if let Some(known) = &mut *known
            && !known.local.iter().any(|(other, _)| Arc::ptr_eq(other, memory))
            // If that is too much, the transfer registers only its own part, or reports why it cannot.
            && let Ok(hold) = memory.hold(offer.memory.addr, offer.memory.len, offer.writable)
        {
            known.local.push((Arc::clone(memory), hold));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::TransferError;

    #[derive(Debug)]
    struct Any;

    impl Registrar for Any {
        type Region = (u64, u64);

        fn register(&self, start: u64, len: u64, _writable: bool) -> Result<(u64, u64), TransferError> {
            Ok((start, len))
        }
    }

    fn at(addr: u64, len: u64) -> Segment {
        Segment { addr, len }
    }

    #[test]
    fn what_is_offered_stays_known_until_it_is_withdrawn() {
        let (offers, memory) = (Offers::<Any, ()>::default(), Arc::new(Registry::new(Any, 4096)));
        offers.insert((1, 1), at(0x10000, 0x4000), true, Vec::new());
        offers.keep(&memory, at(0x11000, 0x100), true);
        offers.keep(&memory, at(0x12000, 0x100), false);
        assert_eq!(memory.len(), 1);
        let part = memory.hold(0x11000, 0x100, true).unwrap();
        assert_eq!(*part.region(), (0x10000, 0x4000));
        drop(part);
        assert_eq!(memory.len(), 1);
        offers.remove((1, 1));
        assert!(offers.is_empty());
        assert_eq!(memory.len(), 0);
        offers.keep(&memory, at(0x11000, 0x100), true);
        assert_eq!(memory.len(), 0);
    }

    #[test]
    fn only_what_is_offered_as_a_whole_is_kept() {
        let (offers, memory) = (Offers::<Any, ()>::default(), Arc::new(Registry::new(Any, 4096)));
        offers.insert((1, 1), at(0x10000, 0x1000), false, Vec::new());
        offers.insert((2, 1), at(0x10800, 0x100), true, Vec::new());
        for (span, writable) in [(at(0xf000, 0x100), false), (at(0x10000, 0x1001), false), (at(0x10000, 8), true)] {
            offers.keep(&memory, span, writable);
            assert_eq!(memory.len(), 0, "{span:?}");
        }
        // Another offer begins between the start of the first and this address.
        offers.keep(&memory, at(0x10c00, 8), false);
        assert_eq!(memory.len(), 1);
    }
}
