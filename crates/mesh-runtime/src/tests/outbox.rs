//! A [`Dispatch`] that keeps what it gets.

use crate::dispatch::Dispatch;
use crate::locks::lock;
use mesh_proto::Frame;
use std::collections::VecDeque;
use std::sync::Mutex;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Outbox(Mutex<VecDeque<Frame>>);

impl Dispatch for Outbox {
    fn dispatch(&self, frame: Frame) -> usize {
        lock(&self.0).push_back(frame);
        0
    }
}

impl Outbox {
    /// What was sent since the last call, in order.
    pub(super) fn take(&self) -> Vec<Frame> {
        lock(&self.0).drain(..).collect()
    }
}
