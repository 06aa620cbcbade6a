//! The listening socket for inspecting this process. It needs no thread while nobody connects: the next connection is
//! announced once among the controller's notices, and then not again until the socket is handed over again.

use crate::error::RuntimeError;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::standing::Standing;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Debug)]
pub(super) struct InspectionSocket {
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    socket: Mutex<Option<OwnedFd>>,
}

impl InspectionSocket {
    pub(super) fn new(reactor: &Arc<Reactor>, standing: &Arc<Standing>) -> Self {
        Self { reactor: Arc::clone(reactor), standing: Arc::clone(standing), socket: Mutex::default() }
    }

    /// Announces the next connection under `token`.
    pub(super) fn watch(&self, socket: OwnedFd, token: u64) -> Result<(), RuntimeError> {
        self.standing.usable()?;
        {
            let mut watched = lock(&self.socket);
            self.reactor.add(socket.as_fd(), token)?;
            *watched = Some(socket);
        }
        if self.standing.is_closed() {
            self.forget();
        }
        Ok(())
    }

    /// Stops watching. False if nothing was watched.
    pub(super) fn forget(&self) -> bool {
        let Some(socket) = lock(&self.socket).take() else { return false };
        self.reactor.remove(socket.as_fd());
        true
    }
}
