//! The open connections, by reactor token.

use super::connection::HostConnection;
use crate::locks::{read, write};
use crate::reactor::Reactor;
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

/// Connections use tokens from here on, above all others.
pub(crate) const CONNECTION_TOKENS: u64 = 1 << 40;

/// See the module.
#[derive(Debug)]
pub(super) struct Connections {
    open: RwLock<HashMap<u64, Arc<HostConnection>>>,
    next_token: AtomicU64,
}

impl Default for Connections {
    fn default() -> Self {
        Self { open: RwLock::default(), next_token: AtomicU64::new(CONNECTION_TOKENS) }
    }
}

impl Connections {
    /// Adds the connection that `make` creates for a token.
    pub(super) fn add(&self, make: impl FnOnce(u64) -> io::Result<HostConnection>) -> io::Result<Arc<HostConnection>> {
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(make(token)?);
        write(&self.open).insert(token, Arc::clone(&connection));
        Ok(connection)
    }

    pub(super) fn get(&self, token: u64) -> Option<Arc<HostConnection>> {
        read(&self.open).get(&token).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<HostConnection>> {
        read(&self.open).values().cloned().collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        read(&self.open).is_empty()
    }

    /// Closes and forgets a connection.
    pub(super) fn close(&self, connection: &HostConnection, reactor: &Reactor) {
        connection.close(reactor);
        write(&self.open).remove(&connection.token);
    }

    /// Removes and returns all connections.
    pub(super) fn take(&self) -> Vec<Arc<HostConnection>> {
        write(&self.open).drain().map(|(_, connection)| connection).collect()
    }
}
