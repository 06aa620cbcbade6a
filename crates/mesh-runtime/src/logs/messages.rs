//! Who says what of lines to whom; the frames are [`Lines`].

use crate::runtime::Runtime;
use bytes::Bytes;
use mesh_proto::control::Lines;
use mesh_proto::logs::LogOptions;
use mesh_proto::{Frame, HostNo, MeshId, ProcAddr};
use std::time::{Duration, Instant};

/// How long the end of a job waits for what other hosts have still to tell.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What others have said, for the thread.
#[derive(Debug)]
pub(super) enum Order {
    Found(HostNo, Bytes),
    More,
    Flush(u64),
    Set(MeshId, LogOptions),
    Dead(HostNo),
}

/// What the thread says to others.
#[derive(Debug)]
pub(super) enum Mail {
    Found(Vec<u8>),
    More(HostNo),
    Set(MeshId, LogOptions),
}

impl Runtime {
    /// What hosts tell each other of lines; see the module.
    pub(crate) fn on_lines(&self, frame: &Frame) {
        let header = frame.header;
        if !header.src.is_agent() || !self.me.is_agent() || header.src == self.me {
            return;
        }
        let by_controller = header.src == ProcAddr::CONTROLLER;
        let order = match Lines::read(frame) {
            Some(Lines::Found(batch)) if self.me == ProcAddr::CONTROLLER => Some(Order::Found(header.src.host, batch)),
            Some(Lines::More) if by_controller => Some(Order::More),
            Some(Lines::Flush(ticket)) if by_controller => Some(Order::Flush(ticket)),
            Some(Lines::Set(mesh, options)) if by_controller => Some(Order::Set(mesh, options)),
            _ => None,
        };
        if let Some(order) = order
            && let Ok(logs) = self.logs()
        {
            logs.order(order);
        }
    }

    /// A host is dead: nothing of it is waited for.
    pub(crate) fn forget_lines_of(&self, host: HostNo) {
        if let Some(logs) = self.logs_made() {
            logs.order(Order::Dead(host));
        }
    }

    /// Before the end: what other hosts have still to tell is wanted.
    pub(crate) fn collect_lines(&self) {
        if let Some(logs) = self.logs_made() {
            logs.collect(Instant::now() + LAST_WORDS);
        }
    }

    pub(super) fn send_lines(&self, host: HostNo, said: &Lines) {
        self.dispatch(said.frame(self.me, ProcAddr::agent(host), None), None);
    }

    pub(super) fn cast_lines(&self, said: &Lines) {
        if let Some(agents) = self.other_agents().filter(|_| self.me == ProcAddr::CONTROLLER) {
            self.dispatch(said.frame(self.me, ProcAddr::CONTROLLER, Some(&agents)), None);
        }
    }
}
