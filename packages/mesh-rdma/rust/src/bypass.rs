//! Moves large parts of messages between hosts, by the engine: `mesh_core/bypass.h`. Two wheels share no Rust types.
//!
//! No message waits for an untried path: the first part from a process comes through the agents, while one byte of it
//! is read to see whether its memory can be reached.
//!
//! Unless the user allows others, parts only take transports that hide them from strangers, as the agents do.

use crate::engine::PyEngine;
use mesh_transfer::{Closing, Engine, ErrorKind, Export, Handle, Need, Op, Operation, Segments, Work};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const VERSION: u32 = 1;
/// How long a part may take before it is left to the agents.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long reading the trial byte may take.
const TRIAL: Duration = Duration::from_secs(10);
/// How long to avoid a path that failed: a little longer than the engine avoids a transport.
const REST: Duration = Duration::from_secs(6);
/// The most owners remembered.
const MOST_ROADS: usize = 4096;
/// The transports that need no permission: memory of the same machine, and connections with TLS.
const PRIVATE: [&str; 2] = ["shm", "tcp"];

type Freed = unsafe extern "C" fn(*mut c_void);
type Done = unsafe extern "C" fn(*mut c_void, i32);

/// `struct mesh_bypass`, followed by our own fields.
#[repr(C)]
struct Raw {
    version: u32,
    offer: unsafe extern "C" fn(*const Raw, *const c_void, u64, *mut u8, u32, *mut u64, Freed, *mut c_void) -> u32,
    withdraw: unsafe extern "C" fn(*const Raw, u64),
    fetch: unsafe extern "C" fn(*const Raw, *const u8, u32, *mut c_void, u64, Done, *mut c_void),
    engine: Arc<Engine>,
    offers: Mutex<HashMap<u64, Arc<Export>>>,
    next: AtomicU64,
    /// Whether all transports may be used.
    every: bool,
    /// How the owners of parts are reached, by incarnation.
    roads: Arc<Mutex<HashMap<[u8; 16], Road>>>,
}

/// How an owner's memory is reached.
#[derive(Clone, Copy)]
enum Road {
    /// Being tried.
    Tried,
    Open,
    /// Not reachable; try again at that time.
    Closed(Instant),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells mesh-core, when dropped, that nobody reads its memory any more.
struct Kept {
    freed: Freed,
    arg: usize,
    /// Whether mesh-core knows that the memory is offered; it is not called before.
    is_offered: Arc<AtomicBool>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.is_offered.load(Ordering::SeqCst) {
            // SAFETY: called once, as the header demands, with the argument that came with it.
            unsafe { (self.freed)(self.arg as *mut c_void) };
        }
    }
}

/// Tells mesh-core that its memory has been filled, or has not.
struct Told {
    done: Done,
    arg: usize,
}

impl Told {
    fn tell(self, all: bool) {
        // SAFETY: called once, since it takes `self`, with the argument that came with it.
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
            self.engine.close(&export, Closing::Freed, false);
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
        // SAFETY: mesh-core keeps the memory for this alone until it is told, after the last byte (OPR-1).
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

    /// The only transport for an owner's memory; the inner option is none if any will do, the outer if none will.
    fn transport(&self, handle: &Handle) -> Option<Option<&'static str>> {
        if self.every {
            return Some(None);
        }
        let choice = self.engine.explain(handle, Need { copies: true, atomics: false }, None);
        PRIVATE.into_iter().find(|name| choice.candidates.iter().any(|each| each == name)).map(Some)
    }

    /// Whether an owner's memory is known to be reachable. If unknown, tries to read its first byte.
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
        // SAFETY: the byte is kept with the operation, and nobody else uses it.
        let operation = unsafe { self.engine.submit(([op], byte), Some(TRIAL), forced) };
        let (outcome, roads, realm) = (Arc::clone(&operation), Arc::clone(&self.roads), handle.realm);
        operation.on_done(move || {
            let found = if is_reached(&outcome) { Road::Open } else { Road::Closed(Instant::now() + REST) };
            let mut roads = locked(&roads);
            if roads.len() > MOST_ROADS {
                // Mostly owners that have ended; an owner that is needed again is tried again.
                roads.retain(|_, road| matches!(road, Road::Tried));
            }
            roads.insert(realm, found);
        });
        operation.has_succeeded()
    }
}

/// Whether an owner has answered. That a part is gone, having come through the agents by now, is an answer, too.
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
    // SAFETY: made by `bypass_of`, and never dropped.
    let this = unsafe { &*this };
    let Some((mine, made)) = this.offer((data as u64, length), kept, room as usize) else { return 0 };
    // SAFETY: the caller gives room for that many bytes, and for the number.
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
        this.engine.close(&export, Closing::Freed, false);
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

/// Makes the capsule by which mesh-core moves large parts of messages: by `every` transport, or only by those that keep
/// them private. It points to memory that is never freed.
#[pyfunction]
pub(crate) fn bypass_of<'py>(py: Python<'py>, engine: &PyEngine, every: bool) -> PyResult<Bound<'py, PyCapsule>> {
    let engine = Arc::clone(engine.shared());
    let (offers, next, roads) = (Mutex::default(), AtomicU64::new(1), Arc::default());
    let raw = Raw { version: VERSION, offer, withdraw, fetch, engine, offers, next, every, roads };
    let raw = NonNull::from(Box::leak(Box::new(raw))).cast::<c_void>();
    // SAFETY: it is never freed.
    unsafe { PyCapsule::new_with_pointer(py, raw, c"mesh_core.bypass") }
}
