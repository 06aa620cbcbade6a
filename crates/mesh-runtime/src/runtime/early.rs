//! At an agent: messages that are quicker than the spawn of the procs that they are for. Between hosts there is more than one
//! way.
//!
//! Whoever makes the procs hands them over under the lock under which they were put aside, so that none is forgotten, and
//! nothing that comes later is before them (ERL-1). What waits for actors waits in [`super::inboxes`].

use super::switch::Switch;
use crate::link::Link;
use crate::locks::lock;
use crate::reactor::Reactor;
use mesh_proto::{Early, Ended, Frame, Header, MeshId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a message waits for a spawn. Where that is on its way at all it comes within a few round trips, unless a
/// connection was lost meanwhile.
pub(super) const WITHIN: Duration = Duration::from_secs(5);
/// Bytes that may wait so, in each process.
pub(super) const MOST_BYTES: usize = 64 << 20;
/// Of so many meshes that could not be made the reason is known; of older ones, that they are not there.
const MOST_FAILED: usize = 64;

/// Why a message does not wait.
pub(super) enum NotEarly {
    /// The procs have come just now.
    Known(Frame),
    /// There is no room.
    Refused(Frame),
}

/// See the module.
#[derive(Debug)]
pub(super) struct EarlyFrames {
    frames: Mutex<Early<MeshId, Frame>>,
    /// Why procs could not be made, the oldest first: messages for them may be under way for a while.
    failed: Mutex<VecDeque<(MeshId, Arc<Ended>)>>,
}

impl Default for EarlyFrames {
    fn default() -> Self {
        Self { frames: Mutex::new(Early::new(WITHIN, MOST_BYTES)), failed: Mutex::default() }
    }
}

impl EarlyFrames {
    /// A message has come for a mesh of procs that is not known here.
    pub(super) fn keep(&self, switch: &Switch, frame: Frame, now: Duration) -> Result<(), NotEarly> {
        let header = frame.header;
        let mut frames = lock(&self.frames);
        if switch.local(header.dst.mesh).is_some() {
            return Err(NotEarly::Known(frame));
        }
        frames.keep(header.dst.mesh, frame, header.body_len as usize, header.deadline(), now).map_err(NotEarly::Refused)
    }

    /// Makes these links the procs of a mesh, and gives them what has waited for them. Returns what it was about, and what
    /// was for ranks that are not among them.
    pub(super) fn open(
        &self,
        switch: &Switch,
        reactor: &Reactor,
        (mesh, base): (MeshId, u32),
        fresh: &[Arc<Link>],
    ) -> (Vec<Header>, Vec<Frame>) {
        let mut frames = lock(&self.frames);
        let mut heard = Vec::new();
        let mut strays = Vec::new();
        for frame in frames.come(mesh) {
            let header = frame.header;
            match header.dst.rank.checked_sub(base).and_then(|at| fresh.get(at as usize)) {
                Some(link) => {
                    link.send(reactor, &frame);
                    heard.push(header);
                }
                None => strays.push(frame),
            }
        }
        switch.add(mesh, base, fresh);
        (heard, strays)
    }

    /// These procs could not be made. Returns what has waited for them.
    pub(super) fn fail(&self, mesh: MeshId, ended: &Arc<Ended>) -> Vec<Frame> {
        {
            let mut failed = lock(&self.failed);
            if failed.len() == MOST_FAILED {
                failed.pop_front();
            }
            failed.push_back((mesh, Arc::clone(ended)));
        }
        lock(&self.frames).come(mesh)
    }

    /// Why a mesh could not be made, if that is known.
    pub(super) fn why(&self, mesh: MeshId) -> Option<Arc<Ended>> {
        lock(&self.failed).iter().find(|one| one.0 == mesh).map(|one| Arc::clone(&one.1))
    }

    /// What has waited long enough goes back; and when that is next.
    pub(super) fn turn(&self, now: Duration) -> (Vec<Frame>, Option<Duration>) {
        let mut frames = lock(&self.frames);
        (frames.on_tick(now), frames.next_deadline())
    }
}
