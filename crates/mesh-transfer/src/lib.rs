//! One-sided transfers: a process offers memory, and others read and write it without involving its program.
//!
//! Nothing here knows Python. An [`Engine`] is one process's part: [`Engine::export`] offers memory and returns a
//! [`Handle`], a few hundred bytes that may be sent anywhere; [`Engine::submit`] performs an [`Op`] on the memory that
//! a handle names.

mod boxes;
mod bytes;
mod choice;
mod cma;
mod completion;
mod control;
mod copy;
mod cores;
mod cuda;
mod delta;
mod door;
mod engine;
mod error;
mod exports;
mod handle;
mod host_addresses;
mod membership;
mod operation;
mod pool;
mod realm;
mod registry;
mod segments;
mod transports;
mod watch;
mod witness;
mod workers;

#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use boxes::{Boxes, Grid};
pub use choice::{Choice, Distance, Need, Ours, choose};
pub use completion::{Operation, Outcome};
pub use delta::{apply_changes, find_changes};
pub use engine::{Engine, Libraries, QUICK, Standing};
pub use error::{Closing, ErrorKind, TransferError};
pub use exports::{Ending, Export, Exports, Keep};
pub use handle::{Handle, MAX_HANDLE, RealmId, Section, Token, is_name};
pub use membership::Membership;
pub use operation::{Op, Work};
pub use pool::{Block, Pooled};
pub use realm::Realm;
pub use segments::{MAX_SEGMENTS, Segment, Segments, Space};
pub use transports::{Capabilities, Ops, Peer, Transport};
pub use watch::Watch;

/// Locks even if a thread panicked while holding the lock: the data is consistent between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
