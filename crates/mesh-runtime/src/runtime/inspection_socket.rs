//! A listening socket that this process has, and that nobody waits at: whoever connects is announced to the controller's
//! notices, once, until the socket is handed over again. So a socket costs no thread while nobody connects.

use super::{Runtime, lock};
use crate::error::RuntimeError;
use crate::message::Message;
use mesh_proto::Frame;
use mesh_proto::messages::Extend;
use std::os::fd::{AsFd, OwnedFd};

/// What such a notice is called.
const VISITOR: &str = ".inspect";

impl Runtime {
    /// Announces the next connection to this socket by a notice.
    ///
    /// # Errors
    /// If the runtime is closed, or the socket cannot be watched.
    pub fn watch_inspection_socket(&self, socket: OwnedFd) -> Result<(), RuntimeError> {
        self.usable()?;
        let mut inspection_socket = lock(&self.inspection_socket);
        self.reactor.add(socket.as_fd(), super::TOKEN_INSPECTION)?;
        *inspection_socket = Some(socket);
        drop(inspection_socket);
        if self.is_closed() {
            self.forget_inspection_socket();
        }
        Ok(())
    }

    pub(super) fn on_visitor(&self) {
        if self.forget_inspection_socket() {
            self.notice_visitor();
        }
    }

    /// Somebody wants to look in: the controller's notices say so.
    pub(crate) fn notice_visitor(&self) {
        let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
        self.notice(Message::new(Frame::build(header, None, VISITOR.as_bytes(), &[]), &self.memory));
    }

    pub(super) fn forget_inspection_socket(&self) -> bool {
        let Some(socket) = lock(&self.inspection_socket).take() else { return false };
        self.reactor.remove(socket.as_fd());
        true
    }
}
