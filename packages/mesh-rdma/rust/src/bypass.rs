//! Large parts of messages between hosts, by the engine: `mesh_core/bypass.h`. Two wheels share no Rust types.
//!
//! No message waits for a road that nobody has tried: the first part from a process comes through the agents, while a byte
//! of it is read to see whether its memory can be reached.
//!
//! Unless the user allows others, parts take transports that keep what is read from strangers, as the agents do.

use crate::engine::PyEngine;
use mesh_transfer::{Engine, ErrorKind, Export, Handle, Need, Op, Operation, Segments, Work};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const VERSION: u32 = 1;
/// After so long a part is left to the agents.
const PATIENCE: Duration = Duration::from_secs(60);
/// So long may a byte take that a road is tried by.
const TRIAL: Duration = Duration::from_secs(10);
/// A road that failed is left alone for so long, and a little longer than the engine leaves a transport alone.
const REST: Duration = Duration::from_secs(6);
/// More owners are not remembered.
const MOST_ROADS: usize = 4096;
/// What needs no leave: memory of the same machine, and connections with TLS.
const PRIVATE: [&str; 2] = ["shm", "tcp"];

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
    /// Whether all transports may be taken.
    every: bool,
    /// How the owners of parts are reached, by their incarnations.
    roads: Arc<Mutex<HashMap<[u8; 16], Road>>>,
}

/// How an owner's memory is reached.
#[derive(Clone, Copy)]
enum Road {
    /// Being tried.
    Tried,
    Open,
    /// Not, until then.
    Closed(Instant),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        locked(&self.offers).insert(number, export);
        Some((number, ticket))
    }

    fn fetch(&self, ticket: &[u8], (into, length): (u64, u64), told: Told) {
        let handle = Handle::decode(ticket).ok().filter(|handle| handle.len == length).map(Arc::new);
        let Some((handle, forced)) = handle.and_then(|handle| Some((Arc::clone(&handle), self.transport(&handle)?)))
        else {
            return told.tell(false);
        };
        if !self.is_open(&handle, forced) {
            return told.tell(false);
        }
        let work = Work::Read { local: Segments::one(into, length), offset: 0 };
        let Ok(op) = Op::new(&handle, work) else { return told.tell(false) };
        // SAFETY: mesh-core keeps the memory for this alone until it is told, which is after the last byte (OPR-1).
        let operation = unsafe { self.engine.submit(([op], ()), Some(PATIENCE), forced) };
        let (outcome, roads) = (Arc::clone(&operation), Arc::clone(&self.roads));
        operation.on_done(move || {
            let all = outcome.has_succeeded();
            if !all && !is_reached(&outcome) {
                locked(&roads).insert(handle.realm, Road::Closed(Instant::now() + REST));
            }
            told.tell(all);
        });
    }

    /// By which transport alone an owner's memory is to be read; none of those if by any. None at all if by no such.
    fn transport(&self, handle: &Handle) -> Option<Option<&'static str>> {
        if self.every {
            return Some(None);
        }
        let choice = self.engine.explain(handle, Need { copies: true, atomics: false }, None);
        PRIVATE.into_iter().find(|name| choice.candidates.iter().any(|each| each == name)).map(Some)
    }

    /// Whether an owner's memory is known to be reached. If nobody knows that is found out, by its first byte.
    fn is_open(&self, handle: &Arc<Handle>, forced: Option<&str>) -> bool {
        {
            let mut roads = locked(&self.roads);
            match roads.get(&handle.realm) {
                Some(Road::Open) => return true,
                Some(Road::Tried) => return false,
                Some(Road::Closed(until)) if *until > Instant::now() => return false,
                Some(Road::Closed(_)) | None => roads.insert(handle.realm, Road::Tried),
            };
        }
        let mut byte = Box::new([0_u8; 1]);
        let work = Work::Read { local: Segments::one(byte.as_mut_ptr() as u64, 1), offset: 0 };
        let Ok(op) = Op::new(handle, work) else { return false };
        // SAFETY: the byte is kept with the operation, and is nobody else's.
        let operation = unsafe { self.engine.submit(([op], byte), Some(TRIAL), forced) };
        let (outcome, roads, realm) = (Arc::clone(&operation), Arc::clone(&self.roads), handle.realm);
        operation.on_done(move || {
            let found = if is_reached(&outcome) { Road::Open } else { Road::Closed(Instant::now() + REST) };
            let mut roads = locked(&roads);
            if roads.len() > MOST_ROADS {
                // Of owners that have ended, most of them; who is asked for again is tried again.
                roads.retain(|_, road| matches!(road, Road::Tried));
            }
            roads.insert(realm, found);
        });
        operation.has_succeeded()
    }
}

/// Whether an owner has answered. That a part is gone, as it has come through the agents by now, is its word too.
fn is_reached(outcome: &Operation) -> bool {
    match outcome.wait() {
        Ok(_) => true,
        Err(error) => error.kind == ErrorKind::Gone,
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
    let export = locked(&this.offers).remove(&number);
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

/// A capsule with what mesh-core moves large parts of messages by; `every` transport, or those alone that keep them private. What it points to stays until the process ends.
#[pyfunction]
pub(crate) fn bypass_of<'py>(py: Python<'py>, engine: &PyEngine, every: bool) -> PyResult<Bound<'py, PyCapsule>> {
    let engine = Arc::clone(engine.shared());
    let (offers, next, roads) = (Mutex::default(), AtomicU64::new(1), Arc::default());
    let raw = Raw { version: VERSION, offer, withdraw, fetch, engine, offers, next, every, roads };
    let raw = NonNull::from(Box::leak(Box::new(raw))).cast::<c_void>();
    // SAFETY: it is never freed.
    unsafe { PyCapsule::new_with_pointer(py, raw, c"mesh_core.bypass") }
}
