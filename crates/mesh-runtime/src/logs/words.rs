//! What hosts tell each other of lines, in frames.

use crate::runtime::Runtime;
use bytes::Bytes;
use mesh_proto::logs::LogOptions;
use mesh_proto::{Frame, Header, HostNo, Kind, MeshId, Part, ProcAddr};
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
        let part = || match frame.parts().ok()?.into_iter().next()? {
            Part::Inline(bytes) => Some(bytes),
            Part::Shared { .. } => None,
        };
        let order = match frame.name() {
            b"found" if self.me == ProcAddr::CONTROLLER => part().map(|raw| Order::Found(header.src.host, raw)),
            b"more" if header.src == ProcAddr::CONTROLLER => Some(Order::More),
            b"flush" if header.src == ProcAddr::CONTROLLER => Some(Order::Flush(header.actor)),
            b"set" if header.src == ProcAddr::CONTROLLER => {
                part().and_then(|raw| LogOptions::decode(&raw)).map(|options| Order::Set(header.actor, options))
            }
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

    pub(super) fn send_lines(&self, host: HostNo, name: &[u8], parts: &[Part]) {
        let header = Header::new(Kind::Lines, self.me, ProcAddr::agent(host));
        self.dispatch(Frame::build(header, None, name, parts), None);
    }

    pub(super) fn cast_lines(&self, name: &[u8], about: u64, parts: &[Part]) {
        let Some(target) = self.other_agents().filter(|_| self.me == ProcAddr::CONTROLLER) else { return };
        let mut header = Header::new(Kind::Lines, self.me, ProcAddr::CONTROLLER);
        header.actor = about;
        self.dispatch(Frame::build(header, Some(&target), name, parts), None);
    }
}
