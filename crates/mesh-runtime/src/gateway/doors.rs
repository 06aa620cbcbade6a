//! Where hosts that can only dial out are waited for.

use crate::locks::lock;
use crate::tls::Listener;
use mesh_proto::HostNo;
use mesh_proto::control::Attachment;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// The hosts expected at an address, each with its attachment. Who attached first gets the first that come.
pub(super) type Seats = Mutex<BTreeMap<HostNo, Arc<Attachment>>>;

#[derive(Debug)]
pub(super) struct Door {
    pub(super) addr: SocketAddr,
    pub(super) seats: Arc<Seats>,
    pub(super) listener: Listener,
}

/// The addresses at which hosts are expected.
#[derive(Debug, Default)]
pub(super) struct Listeners(pub(super) Mutex<Vec<Door>>);

impl Listeners {
    pub(super) fn close(&self) {
        let doors = std::mem::take(&mut *lock(&self.0));
        doors.iter().for_each(|door| door.listener.close());
    }
}
