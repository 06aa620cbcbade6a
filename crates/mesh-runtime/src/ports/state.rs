//! What a process knows of a port that it sends to.

use crate::locks::lock;
use mesh_proto::{PortEnd, Ticket};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, OnceLock};

/// What all sending ends of one port in this process share.
#[derive(Debug, Default)]
pub(crate) struct PortState {
    pub(super) closed: OnceLock<PortEnd>,
    /// The only value of a single-value port was sent.
    pub(super) used: AtomicBool,
    /// How often it was handed on: other processes may answer too.
    pub(super) handed_on: AtomicUsize,
    /// The tickets under which the port of a call came here, each once, however often it is unpickled.
    pub(super) tickets: Mutex<Vec<Ticket>>,
    /// The receiver was told that no more comes.
    pub(super) ended: AtomicBool,
}

impl PortState {
    pub(super) fn close(&self, why: PortEnd) {
        // The first reason counts.
        let _ = self.closed.set(why);
    }

    pub(super) fn take_tickets(&self) -> Vec<Ticket> {
        std::mem::take(&mut *lock(&self.tickets))
    }
}
