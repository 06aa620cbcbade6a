//! A listening socket that this process has, and that nobody waits at: whoever connects is announced to the controller's
//! notices, once, until the socket is handed over again. So a socket costs no thread while nobody connects.

use super::{Runtime, lock};
use crate::error::RuntimeError;
use crate::message::Message;
use mesh_proto::Frame;
use mesh_proto::messages::Extend;
use std::os::fd::{AsFd, OwnedFd};

impl Runtime {
    /// Announces the next connection to this socket by a notice with the name `name`.
    ///
    /// # Errors
    /// If the runtime is closed, or the socket cannot be watched.
    pub fn watch_knocks(&self, socket: OwnedFd, name: &'static str) -> Result<(), RuntimeError> {
        self.usable()?;
        let mut knocks = lock(&self.knocks);
        self.reactor.add(socket.as_fd(), super::TOKEN_KNOCKS)?;
        *knocks = Some((socket, name));
        drop(knocks);
        if self.is_closed() {
            self.forget_knocks();
        }
        Ok(())
    }

    pub(super) fn on_knock(&self) {
        let Some(name) = self.forget_knocks() else { return };
        let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
        self.notice(Message::new(Frame::build(header, None, name.as_bytes(), &[]), &self.memory));
    }

    pub(super) fn forget_knocks(&self) -> Option<&'static str> {
        let (socket, name) = lock(&self.knocks).take()?;
        self.reactor.remove(socket.as_fd());
        Some(name)
    }
}
