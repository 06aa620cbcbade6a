//! Large parts of messages between hosts, by the engine: `mesh_core/bypass.h`. Two wheels share no Rust types.

use crate::engine::PyEngine;
use mesh_transfer::{Engine, Export, Handle, Op, Segments, Work};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const VERSION: u32 = 1;
/// After so long a part is left to the gateways.
const PATIENCE: Duration = Duration::from_secs(60);

type Freed = unsafe extern "C" fn(*mut c_void);
type Done = unsafe extern "C" fn(*mut c_void, i32);

/// `struct mesh_bypass`, and behind it what is ours.
#[repr(C)]
struct Raw {
    version: u32,
    offer: unsafe extern "C" fn(*const Raw, *const c_void, u64, *mut u8, u32, *mut u64, Freed, *mut c_void) -> u32,
    withdraw: unsafe extern "C" fn(*const Raw, u64),
    fetch: unsafe extern "C" fn(*const Raw, *const u8, u32, *mut c_void, u64, Done, *mut c_void),
    engine: Arc<Engine>,
    offers: Mutex<HashMap<u64, Arc<Export>>>,
    next: AtomicU64,
}

/// What mesh-core is told once nobody reads its memory any more.
struct Kept {
    freed: Freed,
    arg: usize,
    /// Not before it was said that the memory is offered.
    is_offered: Arc<AtomicBool>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.is_offered.load(Ordering::SeqCst) {
            // SAFETY: called once, as the header demands, with what came with it.
            unsafe { (self.freed)(self.arg as *mut c_void) };
        }
    }
}

/// The same of memory that is filled.
struct Told {
    done: Done,
    arg: usize,
}

impl Told {
    fn tell(self, all: bool) {
        // SAFETY: called once, as it takes itself, with what came with it.
        unsafe { (self.done)(self.arg as *mut c_void, i32::from(!all)) };
    }
}

impl Raw {
    fn offer(&self, (data, length): (u64, u64), kept: Kept, room: usize) -> Option<(u64, Vec<u8>)> {
        let is_offered = Arc::clone(&kept.is_offered);
        let segments = Segments::one(data, length);
        // SAFETY: mesh-core keeps the memory until it is told.
        let (export, handle) = unsafe { self.engine.export(segments, false, Box::new(kept)) }.ok()?;
        let ticket = handle.encode();
        if ticket.len() > room {
            self.engine.close(&export, false);
            return None;
        }
        is_offered.store(true, Ordering::SeqCst);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.offers.lock().unwrap_or_else(PoisonError::into_inner).insert(number, export);
        Some((number, ticket))
    }

    fn fetch(&self, ticket: &[u8], (into, length): (u64, u64), told: Told) {
        let work = Work::Read { local: Segments::one(into, length), offset: 0 };
        let handle = Handle::decode(ticket).ok().filter(|handle| handle.len == length);
        let Some(op) = handle.and_then(|handle| Op::new(&Arc::new(handle), work).ok()) else { return told.tell(false) };
        // SAFETY: mesh-core keeps the memory for this alone until it is told, which is after the last byte (OPR-1).
        let operation = unsafe { self.engine.submit(([op], ()), Some(PATIENCE), None) };
        let outcome = Arc::clone(&operation);
        operation.on_done(move || told.tell(outcome.has_succeeded()));
    }
}

unsafe extern "C" fn offer(
    this: *const Raw,
    data: *const c_void,
    length: u64,
    ticket: *mut u8,
    room: u32,
    number: *mut u64,
    freed: Freed,
    arg: *mut c_void,
) -> u32 {
    let kept = Kept { freed, arg: arg as usize, is_offered: Arc::default() };
    // SAFETY: made by `capsule`, and never dropped.
    let this = unsafe { &*this };
    let Some((mine, made)) = this.offer((data as u64, length), kept, room as usize) else { return 0 };
    // SAFETY: the caller gives room for so many bytes, and for the number.
    unsafe {
        std::ptr::copy_nonoverlapping(made.as_ptr(), ticket, made.len());
        *number = mine;
    }
    made.len() as u32
}

unsafe extern "C" fn withdraw(this: *const Raw, number: u64) {
    // SAFETY: as above.
    let this = unsafe { &*this };
    let export = this.offers.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    if let Some(export) = export {
        this.engine.close(&export, false);
    }
}

unsafe extern "C" fn fetch(
    this: *const Raw,
    ticket: *const u8,
    size: u32,
    into: *mut c_void,
    length: u64,
    done: Done,
    arg: *mut c_void,
) {
    // SAFETY: as above; the ticket is as long as the caller says.
    let (this, ticket) = unsafe { (&*this, std::slice::from_raw_parts(ticket, size as usize)) };
    this.fetch(ticket, (into as u64, length), Told { done, arg: arg as usize });
}

/// A capsule with what mesh-core moves large parts of messages by. What it points to stays until the process ends.
#[pyfunction]
pub(crate) fn bypass_of<'py>(py: Python<'py>, engine: &PyEngine) -> PyResult<Bound<'py, PyCapsule>> {
    let engine = Arc::clone(engine.shared());
    let (offers, next) = (Mutex::default(), AtomicU64::new(1));
    let raw = Raw { version: VERSION, offer, withdraw, fetch, engine, offers, next };
    let raw = NonNull::from(Box::leak(Box::new(raw))).cast::<c_void>();
    // SAFETY: it is never freed.
    unsafe { PyCapsule::new_with_pointer(py, raw, c"mesh_core.bypass") }
}
