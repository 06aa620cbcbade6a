//! What threads share memory and wait with. In the models `models/sync.rs` takes the place of this file.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard};
pub(crate) use std::thread::{Thread, current, park, park_timeout, yield_now};
pub(crate) use std::thread_local;
