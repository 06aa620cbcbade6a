//! One host: the runtime's gateway, the network as it sees it, and the simulator's counters.

use mesh_proto::hosts::gateway::{Gateway, Wire};
use mesh_proto::hosts::{Packet, Standing};
use mesh_proto::{Header, HostNo};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

/// What a host has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Packets read and written.
    pub packets: u64,
    /// Bytes read and written, including the overhead around packets.
    pub bytes: u64,
    /// Time that its gateway's thread was busy.
    pub busy: Duration,
    /// Connections that it opened or accepted.
    pub connections: u32,
}

impl Load {
    /// What was done since `before`; connections are the current ones.
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

/// One end of a connection: the host at the other end, and the connection's number.
pub(crate) type End = (HostNo, u64);

/// When something was last received and sent on an open connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signs {
    pub(crate) id: u64,
    pub(crate) heard: Duration,
    pub(crate) sent: Duration,
}

/// The network as one host's gateway sees it: what is sent waits until the simulator charges for it.
#[derive(Debug, Default)]
pub(crate) struct Net {
    pub(crate) sent: RefCell<Vec<(HostNo, Packet)>>,
    pub(crate) open: RefCell<HashMap<HostNo, Signs>>,
    pub(crate) woken: Cell<bool>,
}

impl Wire for Net {
    type Connection = End;

    fn send(&self, (to, id): &End, packet: &Packet, now: Duration) {
        if let Some(signs) = self.open.borrow_mut().get_mut(to).filter(|signs| signs.id == *id) {
            signs.sent = now;
            self.sent.borrow_mut().push((*to, packet.clone()));
        }
    }

    fn is_open(&self, (to, id): &End) -> bool {
        self.open.borrow().get(to).is_some_and(|signs| signs.id == *id)
    }

    fn has_room(&self, end: &End) -> bool {
        self.is_open(end)
    }

    fn heard_at(&self, (to, _): &End) -> Duration {
        self.open.borrow().get(to).map_or(Duration::ZERO, |signs| signs.heard)
    }

    fn sent_at(&self, (to, _): &End) -> Duration {
        self.open.borrow().get(to).map_or(Duration::ZERO, |signs| signs.sent)
    }

    fn is_same(&self, one: &End, other: &End) -> bool {
        one == other
    }

    fn wake(&self) {
        self.woken.set(true);
    }
}

/// A host's gateway and agent.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) gateway: Gateway<Net>,
    pub(crate) net: Net,
    /// When its thread, and its network card in each direction, become idle.
    pub(crate) cpu: Duration,
    pub(crate) wire_in: Duration,
    pub(crate) wire_out: Duration,
    /// The tick that was last asked for.
    pub(crate) armed: Option<Duration>,
    /// Whether it has a place in the job.
    pub(crate) attached: bool,
    pub(crate) alive: bool,
    /// Whether only its silence tells of its death.
    pub(crate) silent: bool,
    pub(crate) load: Load,
    /// Frames that have arrived in part, by origin and number.
    pub(crate) partial: HashMap<(HostNo, u32), Header>,
    /// How it thinks that the killed hosts stand.
    pub(crate) holds: HashMap<HostNo, Standing>,
}

impl Node {
    pub(crate) fn new(me: HostNo) -> Self {
        Self {
            gateway: Gateway::new(me, u64::from(me) + 1),
            net: Net::default(),
            cpu: Duration::ZERO,
            wire_in: Duration::ZERO,
            wire_out: Duration::ZERO,
            armed: None,
            attached: me == 0,
            alive: true,
            silent: false,
            load: Load::default(),
            partial: HashMap::new(),
            holds: HashMap::new(),
        }
    }

    /// Its thread is busy for `time` longer.
    pub(crate) fn spend(&mut self, time: Duration) {
        self.cpu += time;
        self.load.busy += time;
    }
}
