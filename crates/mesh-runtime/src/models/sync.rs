//! What threads share memory and wait with, from loom, which tries all that can come of it.

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use loom::sync::{Mutex, MutexGuard};
pub(crate) use loom::thread::yield_now;

use loom::sync::Condvar;
use std::sync::Arc;
use std::time::Duration;

/// Loom's own takes no initializers that are `const`.
macro_rules! model_local {
    (static $name:ident: $type:ty = const $init:block;) => {
        loom::thread_local! { static $name: $type = $init; }
    };
    ($($other:tt)*) => {
        loom::thread_local! { $($other)* }
    };
}

pub(crate) use model_local as thread_local;

loom::thread_local! {
    static ME: Thread = Thread(Arc::new((Mutex::new(false), Condvar::new())));
}

/// A thread with its token. Loom has one of its own, which also wakes threads that wait for a lock.
#[derive(Clone, Debug)]
pub(crate) struct Thread(Arc<(Mutex<bool>, Condvar)>);

impl Thread {
    pub(crate) fn unpark(&self) {
        let (token, changed) = &*self.0;
        *token.lock().unwrap() = true;
        changed.notify_one();
    }
}

pub(crate) fn current() -> Thread {
    ME.with(Thread::clone)
}

pub(crate) fn park() {
    let me = current();
    let (token, changed) = &*me.0;
    let mut token = token.lock().unwrap();
    while !std::mem::take(&mut *token) {
        token = changed.wait(token).unwrap();
    }
}

/// Time never passes in a model.
pub(crate) fn park_timeout(_: Duration) {
    park();
}
