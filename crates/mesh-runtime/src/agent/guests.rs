//! Guests: scripts that joined the job, and that no fork server forked; see `runtime/guests.rs`.

use super::watching::relate;
use super::{HostAgent, Spawn, Surroundings};
use crate::error::RuntimeError;
use crate::link::Link;
use crate::locks::lock;
use mesh_proto::{Event, ProcAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// How long a guest may take from its connection to its hello.
const WITHIN: Duration = Duration::from_secs(30);

impl HostAgent {
    /// Registers the process at the other end of `link`. Returns its seat on the host's board.
    ///
    /// # Errors
    /// If the connection cannot be watched.
    pub(crate) fn admit(
        &self,
        around: &impl Surroundings,
        addr: ProcAddr,
        link: OwnedFd,
        pid: u32,
    ) -> Result<u32, RuntimeError> {
        let link = Arc::new(Link::new(self.new_link(), addr, link));
        link.register(&self.reactor)?;
        let mut guard = lock(&self.state);
        let procs = &mut guard.procs;
        let (heard, strays) = around.open_routes(addr.mesh, addr.rank, std::slice::from_ref(&link));
        let (ranks, title) = (addr.rank..addr.rank + 1, Arc::from("script\0"));
        let spawner = (self.me, 0);
        let spawn = Spawn { mesh: addr.mesh, ranks, title: &title, spawner, fork_server: None, within: WITHIN };
        let (seats, _) = procs.add(&spawn, self.now());
        procs.on(addr, Event::Forked(pid), self.now());
        let unwatched = heard.iter().flat_map(|header| relate(&mut procs.family, header)).collect();
        drop(guard);
        self.watch(around, unwatched);
        strays.iter().for_each(|frame| around.refuse(frame));
        // For the new deadline.
        self.reactor.ring_io();
        Ok(seats.first().copied().unwrap_or_default())
    }
}
