//! A listening socket that this process has, and that nobody waits at: whoever connects is announced to the controller's
//! notices, once, until the socket is handed over again. So a socket costs no thread while nobody connects.

use super::{Runtime, lock};
use crate::error::RuntimeError;
use crate::message::Message;
use mesh_proto::Frame;
use mesh_proto::messages::Extend;
use std::os::fd::{AsFd, OwnedFd};

/// What such a notice is called.
const KNOCK: &str = ".inspect";

impl Runtime {
    /// Announces the next connection to this socket by a notice.
    ///
    /// # Errors
    /// If the runtime is closed, or the socket cannot be watched.
    pub fn watch_knocks(&self, socket: OwnedFd) -> Result<(), RuntimeError> {
        self.usable()?;
        let mut knocks = lock(&self.knocks);
        self.reactor.add(socket.as_fd(), super::TOKEN_KNOCKS)?;
        *knocks = Some(socket);
        drop(knocks);
        if self.is_closed() {
            self.forget_knocks();
        }
        Ok(())
    }

    pub(super) fn on_knock(&self) {
        if self.forget_knocks() {
            self.notice_knock();
        }
    }

    /// Somebody wants to look in: the controller's notices say so.
    pub(crate) fn notice_knock(&self) {
        let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
        self.notice(Message::new(Frame::build(header, None, KNOCK.as_bytes(), &[]), &self.memory));
    }

    pub(super) fn forget_knocks(&self) -> bool {
        let Some(socket) = lock(&self.knocks).take() else { return false };
        self.reactor.remove(socket.as_fd());
        true
    }
}
