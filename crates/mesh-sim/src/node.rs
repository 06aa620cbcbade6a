//! One host: the real state machines, and what the simulator counts of it.

use crate::model::Model;
use mesh_proto::hosts::{HostMerge, PeerStreams, RelayMerge, Topology};
use mesh_proto::{Header, HostNo, ProcAddr};
use std::collections::HashMap;
use std::time::Duration;

/// What a host has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Packets read and written.
    pub packets: u64,
    /// Bytes read and written, with what is around packets.
    pub bytes: u64,
    /// Time that its gateway's thread was busy.
    pub busy: Duration,
    /// Connections that it has opened or accepted.
    pub connections: u32,
}

impl Load {
    /// What was done since; connections are those that there are.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            packets: self.packets - before.packets,
            bytes: self.bytes - before.bytes,
            busy: self.busy - before.busy,
            connections: self.connections,
        }
    }
}

/// A host's gateway and agent.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) topology: Topology,
    pub(crate) peer_streams: PeerStreams,
    pub(crate) merge: HostMerge,
    pub(crate) relay: RelayMerge,
    /// Until when its thread, and its network card in each direction, are busy.
    pub(crate) cpu: Duration,
    pub(crate) wire_in: Duration,
    pub(crate) wire_out: Duration,
    /// The earliest tick that was asked for.
    pub(crate) armed: Option<Duration>,
    /// Whether it has a place in the job.
    pub(crate) attached: bool,
    pub(crate) alive: bool,
    /// Whether its death is to be found out from its silence.
    pub(crate) silent: bool,
    pub(crate) load: Load,
    /// Frames of which segments have arrived, by origin and number.
    pub(crate) partial: HashMap<(HostNo, u32), Header>,
}

impl Node {
    pub(crate) fn new(me: HostNo) -> Self {
        Self {
            topology: Topology::new(me),
            peer_streams: PeerStreams::new(me, 8 << 20),
            merge: HostMerge::new(me, ProcAddr::agent(me)),
            relay: RelayMerge::new(me),
            cpu: Duration::ZERO,
            wire_in: Duration::ZERO,
            wire_out: Duration::ZERO,
            armed: None,
            attached: me == 0,
            alive: true,
            silent: false,
            load: Load::default(),
            partial: HashMap::new(),
        }
    }

    /// The host learns its place among the others.
    pub(crate) fn join(&mut self, model: &Model) {
        self.attached = true;
        self.topology.add_group(1, model.hosts, model.fan_out);
    }

    /// Its thread is busy for so much longer.
    pub(crate) fn spend(&mut self, time: Duration) {
        self.cpu += time;
        self.load.busy += time;
    }

    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        [self.peer_streams.next_deadline(), self.merge.next_deadline(), self.relay.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }
}
