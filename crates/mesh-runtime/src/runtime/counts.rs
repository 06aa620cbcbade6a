//! Figures about a runtime.

use super::Runtime;
use std::sync::atomic::Ordering;

/// Figures about a runtime, for people and for tests of leaks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Live links.
    pub links: usize,
    /// Waiting calls.
    pub calls: usize,
    /// Actors of this process.
    pub actors: usize,
    /// Procs of this host.
    pub procs: usize,
    /// Ports at which this process receives, and ports to which it can send.
    pub ports: usize,
    /// Bytes of shared memory that this process owns.
    pub shm_bytes: usize,
    /// Mailboxes that this process has sent to and still counts messages for.
    pub meters: usize,
    /// Messages that wait here for room at their receivers, and their bytes.
    pub deferred: (usize, u64),
    /// Replies that wait here until their callers' processes read, and their bytes.
    pub replies: (usize, u64),
    /// The same for arguments of spawns.
    pub spawns: (usize, u64),
    /// Bytes of large replies that have arrived and that nobody has looked at.
    pub held: u64,
    /// Values kept here for references, and their bytes.
    pub kept: (usize, u64),
    /// Values of other processes that this process holds references to.
    pub refs: usize,
    /// How often values of this process were fetched, and how many copies of other hosts' values are here.
    pub fetched: (u64, usize),
    /// How many parts of messages were offered by a bypass, and how many arrived that way.
    pub bypassed: (u64, u64),
    /// Messages whose parts are still to come.
    pub landing: usize,
}

impl Runtime {
    /// What waits and what lives.
    pub fn counts(&self) -> Counts {
        // One lock after the other, never two at once.
        let links = self.switch.len();
        let actors = self.inboxes.len();
        let procs = self.agent.len();
        Counts {
            links,
            calls: self.calls.len(),
            actors,
            procs,
            ports: self.ports.len(),
            shm_bytes: self.memory.bytes(),
            meters: self.meters.len(),
            deferred: self.deferred.size(),
            replies: self.answering.size(),
            spawns: self.spawning.size(),
            held: self.held_replies.load(Ordering::Relaxed),
            kept: self.refs.kept(),
            refs: self.refs.foreign(),
            fetched: (self.refs.fetches(), self.remote_values.len()),
            bypassed: (self.road.offered(), self.landings.arrived()),
            landing: self.landings.len(),
        }
    }
}
