//! What the objects that a thread is pickling contain besides bytes: ports of calls, and references.

use mesh_proto::Ticket;
use mesh_runtime::{Hold, Kept, Outlet, Packed};
use pyo3::prelude::*;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// What this thread has pickled so far for a message, or to be kept.
    static PACKING: RefCell<Option<Packs>> = const { RefCell::new(None) };
}

/// What a pickled object contains.
#[derive(Default)]
pub(crate) struct Packs {
    /// The ports of calls.
    pub(crate) ports: Vec<Packed>,
    /// Keeps the values that references point to, each once.
    pub(crate) refs: Vec<Arc<Hold>>,
    /// Whether there are references at all: small values need not be kept.
    pub(crate) has_refs: bool,
    /// Where these values are.
    pub(crate) kept: Vec<Kept>,
    /// Whether it is to be kept, for receivers not yet known, rather than sent.
    loose: bool,
}

/// Adds the port of a call to what is being pickled. Returns the ticket under which it travels.
pub(crate) fn pack_port(outlet: &Outlet) -> Ticket {
    PACKING.with_borrow_mut(|packing| {
        let Some(Packs { ports, loose: false, .. }) = packing else {
            // Pickled by other code, or to be kept: the receiver is not known.
            outlet.hand_on();
            return outlet.new_ticket();
        };
        // Within a message it travels under one ticket, however often it occurs or is pickled.
        if let Some(port) = ports.iter().find(|port| port.is_of(outlet)) {
            return port.ticket();
        }
        let port = outlet.packed();
        let ticket = port.ticket();
        ports.push(port);
        ticket
    })
}

/// Adds a reference to what is being pickled; false if it could not be counted there.
pub(crate) fn pack_ref(held: Option<(&Arc<Hold>, &Kept)>) -> bool {
    PACKING.with_borrow_mut(|packing| {
        let Some(packs) = packing else { return held.is_none() };
        packs.has_refs = true;
        let Some((hold, kept)) = held else { return true };
        if !packs.refs.iter().any(|one| one.addr() == hold.addr()) {
            packs.refs.push(Arc::clone(hold));
            packs.kept.push(kept.clone());
        }
        true
    })
}

/// Whether this thread is pickling a message, rather than an object for the user's own purposes.
#[pyfunction]
pub(crate) fn packing() -> bool {
    PACKING.with_borrow(|packing| packing.as_ref().is_some_and(|packs| !packs.loose))
}

/// While it exists, ports and references that this thread pickles belong to one message, or to a value that is kept.
pub(crate) struct Packing(Option<Packs>);

impl Packing {
    pub(crate) fn begin(loose: bool) -> Self {
        Self(PACKING.replace(Some(Packs { loose, ..Packs::default() })))
    }

    /// What was found.
    pub(crate) fn end(self) -> Packs {
        PACKING.take().unwrap_or_default()
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        // A message may be sent while another one is being pickled.
        PACKING.set(self.0.take());
    }
}
