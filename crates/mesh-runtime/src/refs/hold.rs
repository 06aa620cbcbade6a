//! What holds a value on behalf of a process, and what is told when it goes.

use crate::locks::lock;
use mesh_proto::{Ended, Frame, ProcAddr, Ticket};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Counts references that come to this process and leave it.
pub(crate) trait RefCounter: std::fmt::Debug + Send + Sync {
    /// Nothing in this process holds a value any more that came here under these tickets.
    fn dropped(&self, hold: &Hold, tickets: Vec<Ticket>);
    /// A message has arrived. The references in it are held from now on.
    fn came(&self, frame: &Frame) -> Vec<Arc<Hold>>;
    /// A message will never reach its receivers, and neither will the references in it.
    fn unsent(&self, frame: &Frame);
}

/// The value that a reference is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RefAddr {
    /// The process that keeps it.
    pub owner: ProcAddr,
    /// Its number there.
    pub id: u64,
}

/// Holds a value on behalf of a process: one hold per value, however many references the process has.
#[derive(Debug)]
pub struct Hold {
    counter: Weak<dyn RefCounter>,
    addr: RefAddr,
    /// The tickets under which references came here, each once.
    tickets: Mutex<Vec<Ticket>>,
    lost: OnceLock<Arc<Ended>>,
    /// The process that counts as the holder. A forked copy of it does not.
    pid: u32,
}

impl Hold {
    pub(super) fn new(counter: Weak<dyn RefCounter>, addr: RefAddr) -> Self {
        let (tickets, lost, pid) = (Mutex::default(), OnceLock::new(), std::process::id());
        Self { counter, addr, tickets, lost, pid }
    }

    /// The value that is held.
    pub fn addr(&self) -> RefAddr {
        self.addr
    }

    /// How its owner ended, if it has (REF-4).
    pub fn lost(&self) -> Option<&Arc<Ended>> {
        self.lost.get()
    }

    pub(super) fn lose(&self, ended: &Arc<Ended>) {
        let _ = self.lost.set(Arc::clone(ended));
    }

    pub(super) fn add(&self, new: &[Ticket]) {
        let mut tickets = lock(&self.tickets);
        for ticket in new {
            if !tickets.contains(ticket) {
                tickets.push(*ticket);
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            return;
        }
        let Some(counter) = self.counter.upgrade() else { return };
        let tickets = std::mem::take(self.tickets.get_mut().unwrap_or_else(PoisonError::into_inner));
        counter.dropped(self, tickets);
    }
}
