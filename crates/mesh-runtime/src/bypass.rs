//! A bypass for large parts between hosts, past the gateways, offered by another package: `mesh_core/bypass.h`.
//!
//! BYP-1: offered memory stays unchanged until the other side says that nobody reads it any more.
//! BYP-2: memory that is being filled stays until the other side says that it no longer writes to it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// The version of the header that this implements.
pub const BYPASS_VERSION: u32 = 1;
/// Longer tickets are refused.
const MOST_TICKET: usize = 4096;

type Freed = unsafe extern "C" fn(*mut c_void);
type Done = unsafe extern "C" fn(*mut c_void, i32);

/// `struct mesh_bypass`.
#[repr(C)]
#[derive(Debug)]
pub struct RawBypass {
    /// [`BYPASS_VERSION`].
    pub version: u32,
    /// See the header.
    pub offer:
        unsafe extern "C" fn(*const RawBypass, *const c_void, u64, *mut u8, u32, *mut u64, Freed, *mut c_void) -> u32,
    /// See the header.
    pub withdraw: unsafe extern "C" fn(*const RawBypass, u64),
    /// See the header.
    pub fetch: unsafe extern "C" fn(*const RawBypass, *const u8, u32, *mut c_void, u64, Done, *mut c_void),
}

/// A bypass from another package.
#[derive(Clone, Copy, Debug)]
pub struct Bypass(NonNull<RawBypass>);

// SAFETY: its functions may be called on any thread, as the header says, and it lives until the process ends.
unsafe impl Send for Bypass {}
// SAFETY: as above.
unsafe impl Sync for Bypass {}

/// Offered memory, until [`Offer::withdraw`].
#[derive(Debug)]
pub(crate) struct Offer {
    bypass: Bypass,
    number: u64,
    keeper: Arc<Keeper>,
}

/// What to do with memory that nobody reads any more.
type Then = Box<dyn FnOnce() + Send>;

enum Stage {
    Offered,
    /// Nobody reads it any more, though it was not withdrawn.
    Freed,
    Withdrawn(Then),
}

struct Keeper(Mutex<Stage>);

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keeper")
    }
}

impl Keeper {
    fn freed(&self) {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *stage, Stage::Freed);
        drop(stage);
        if let Stage::Withdrawn(then) = before {
            then();
        }
    }

    fn withdrawn(&self, then: Then) {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*stage, Stage::Freed) {
            drop(stage);
            then();
        } else {
            *stage = Stage::Withdrawn(then);
        }
    }
}

unsafe extern "C" fn on_freed(arg: *mut c_void) {
    // SAFETY: made by `into_raw` in `offer`, and given back once.
    unsafe { Arc::from_raw(arg.cast::<Keeper>().cast_const()) }.freed();
}

/// Called when memory is filled, or will not be.
type Filled = Box<dyn FnOnce(bool) + Send>;

unsafe extern "C" fn on_done(arg: *mut c_void, status: i32) {
    // SAFETY: made by `into_raw` in `fetch`, and given back once.
    let filled = unsafe { Box::from_raw(arg.cast::<Filled>()) };
    filled(status == 0);
}

impl Bypass {
    /// The bypass of another package.
    ///
    /// # Safety
    /// `raw` points to what the header describes, in this version, and stays valid until the process ends.
    #[must_use]
    pub unsafe fn new(raw: NonNull<RawBypass>) -> Self {
        Self(raw)
    }

    /// Offers memory. Returns the offer and its ticket; none if the other side refuses.
    ///
    /// # Safety
    /// The memory stays mapped, and is not written to, until the function given to [`Offer::withdraw`] is called.
    pub(crate) unsafe fn offer(self, data: *const u8, len: u64) -> Option<(Offer, Vec<u8>)> {
        let keeper = Arc::new(Keeper(Mutex::new(Stage::Offered)));
        let arg = Arc::into_raw(Arc::clone(&keeper)).cast_mut().cast::<c_void>();
        let mut ticket = vec![0; MOST_TICKET];
        let mut number = 0;
        // SAFETY: valid, see `new`; the buffers have the given lengths, and `on_freed` takes `arg` back.
        let size = unsafe {
            let raw = self.0.as_ptr();
            let room = MOST_TICKET as u32;
            ((*raw).offer)(raw, data.cast(), len, ticket.as_mut_ptr(), room, &raw mut number, on_freed, arg)
        };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size == 0 || size > MOST_TICKET {
            // SAFETY: `on_freed` is not called for a refused offer.
            drop(unsafe { Arc::from_raw(arg.cast::<Keeper>().cast_const()) });
            return None;
        }
        ticket.truncate(size);
        Some((Offer { bypass: self, number, keeper }, ticket))
    }

    /// Fills memory with what a ticket stands for. `filled` is told whether everything is there.
    ///
    /// # Safety
    /// The memory is writable, and used by nothing else, until `filled` is called.
    pub(crate) unsafe fn fetch(self, ticket: &[u8], into: *mut u8, len: u64, filled: Filled) {
        let arg = Box::into_raw(Box::new(filled)).cast::<c_void>();
        let size = u32::try_from(ticket.len()).unwrap_or(0);
        // SAFETY: valid, see `new`; `on_done` takes `arg` back.
        unsafe {
            let raw = self.0.as_ptr();
            ((*raw).fetch)(raw, ticket.as_ptr(), size, into.cast(), len, on_done, arg);
        }
    }
}

impl Offer {
    /// Withdraws the offer. `then` is called when nobody reads the memory any more, perhaps at once.
    pub(crate) fn withdraw(self, then: Then) {
        self.keeper.withdrawn(then);
        // SAFETY: valid, see `Bypass::new`; withdrawn once, as this takes the offer.
        unsafe {
            let raw = self.bypass.0.as_ptr();
            ((*raw).withdraw)(raw, self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// BYP-1.
    #[test]
    fn what_keeps_memory_goes_once_whichever_word_comes_first() {
        for freed_first in [true, false] {
            let keeper = Keeper(Mutex::new(Stage::Offered));
            let gone = Arc::new(AtomicU32::new(0));
            let counted = Arc::clone(&gone);
            let then: Then = Box::new(move || {
                counted.fetch_add(1, Ordering::SeqCst);
            });
            if freed_first {
                keeper.freed();
                assert_eq!(gone.load(Ordering::SeqCst), 0);
                keeper.withdrawn(then);
            } else {
                keeper.withdrawn(then);
                assert_eq!(gone.load(Ordering::SeqCst), 0, "while somebody may read it");
                keeper.freed();
            }
            assert_eq!(gone.load(Ordering::SeqCst), 1);
        }
    }
}
