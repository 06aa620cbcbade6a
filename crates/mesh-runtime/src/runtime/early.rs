//! At an agent: messages that overtake the spawn of the procs that they are for, since there are several paths between
//! hosts, and between the procs of one.
//!
//! The code that makes the procs hands them over under the lock under which they were put aside, so that none is
//! forgotten, and nothing later gets ahead of them (ERL-1). What waits for actors waits in [`super::inboxes`].

use super::switch::Switch;
use crate::link::Link;
use crate::locks::lock;
use crate::reactor::Reactor;
use mesh_proto::{Early, Ended, Frame, Header, MeshId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a message waits for a spawn. A spawn under way arrives within a few round trips, unless a connection was
/// lost meanwhile.
pub(super) const WITHIN: Duration = Duration::from_secs(5);
/// How many bytes may wait like this, in each process.
pub(super) const MOST_BYTES: usize = 64 << 20;
/// The reason is known for this many meshes that could not be made; older ones are merely unknown.
const MOST_FAILED: usize = 64;

/// Why a message does not wait.
pub(super) enum NotEarly {
    /// The procs have just appeared.
    Known(Frame),
    /// There is no room.
    Refused(Frame),
}

/// See the module.
#[derive(Debug)]
pub(super) struct EarlyFrames {
    frames: Mutex<Early<MeshId, Frame>>,
    /// Why procs could not be made, oldest first: messages for them may be under way for a while.
    failed: Mutex<VecDeque<(MeshId, Arc<Ended>)>>,
}

impl Default for EarlyFrames {
    fn default() -> Self {
        Self { frames: Mutex::new(Early::new(WITHIN, MOST_BYTES)), failed: Mutex::default() }
    }
}

impl EarlyFrames {
    /// Puts aside a message for an unknown mesh of procs.
    pub(super) fn keep(&self, switch: &Switch, frame: Frame, now: Duration) -> Result<(), NotEarly> {
        let header = frame.header;
        let mut frames = lock(&self.frames);
        if switch.local(header.dst.mesh).is_some() {
            return Err(NotEarly::Known(frame));
        }
        frames.keep(header.dst.mesh, frame, header.body_len as usize, header.deadline(), now).map_err(NotEarly::Refused)
    }

    /// Makes these links the procs of a mesh, and sends them what waited for them. Returns the headers of what was
    /// sent, and frames for ranks that are not among them.
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

    /// Notes that these procs could not be made. Returns what waited for them.
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

    /// Returns what has waited long enough, and when that is next the case.
    pub(super) fn turn(&self, now: Duration) -> (Vec<Frame>, Option<Duration>) {
        let mut frames = lock(&self.frames);
        (frames.on_tick(now), frames.next_deadline())
    }
}
