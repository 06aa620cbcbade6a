//! Senders that differ from another in one respect.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use pyo3::prelude::*;

use super::PySender;

impl PySender {
    /// The same way once more.
    pub(super) fn again(&self, py: Python<'_>) -> Self {
        Self {
            runtime: Arc::clone(&self.runtime),
            target: Arc::clone(&self.target),
            actor: self.actor,
            name: self.name.clone(),
            request: self.request,
            block: self.block,
            reduce: self.reduce,
            timed: self.timed,
            callee: self.callee.clone(),
            ahead: self.ahead,
            gate: self.gate.again(py),
            as_of: AtomicU64::new(0),
            detour: Mutex::new(None),
        }
    }
}
