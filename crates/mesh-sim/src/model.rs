//! What the hosts and their network are like: the simulator's inputs.

use std::time::Duration;

/// The inputs of a run. The default costs are what `mesh-sim measure` measured on two slow cores, plus something for
/// what a runtime does around the state machines: locks, wake-ups, TLS.
#[derive(Clone, Debug)]
pub struct Model {
    /// Hosts besides the controller's.
    pub hosts: u32,
    /// Procs on each host.
    pub procs: u32,
    /// How many hosts each host relays to.
    pub fan_out: u32,
    /// From sending the last bit to receiving it, over an idle network.
    pub latency: Duration,
    /// Bytes per second of each host's network card, in each direction.
    pub bandwidth: u64,
    /// Bytes of a call's arguments.
    pub payload: usize,
    /// Bytes of a reply.
    pub reply: usize,
    /// Whether all replies to a call are equal; if not, all differ.
    pub equal: bool,
    /// How long a host may be silent before it is dead.
    pub window: Duration,
    /// What things cost.
    pub costs: Costs,
}

/// What a gateway's thread spends on things; each host has one.
#[derive(Clone, Debug)]
pub struct Costs {
    /// A packet read: its share of a wake-up and a system call, a TLS record, its header.
    pub packet_in: Duration,
    /// A packet written: the same.
    pub packet_out: Duration,
    /// Picoseconds for each byte read or written: encryption or decryption, and copies to and from the kernel.
    pub byte_ps: u64,
    /// A run of destinations with one number, at their origin.
    pub number: Duration,
    /// A copy of a cast that a relay makes: choosing its destinations, and the packet.
    pub plan: Duration,
    /// An answer that a relay merges with others.
    pub merge: Duration,
    /// What each reply in such an answer adds, if no two replies are equal.
    pub distinct: Duration,
    /// A run of destinations or shares that a relay looks at.
    pub run: Duration,
    /// A run of shares that a merged packet's receiver takes.
    pub share: Duration,
    /// A reply that the caller's runtime extracts from a merged frame, and puts in its place.
    pub outcome: Duration,
    /// A message to or from a proc on the same host.
    pub local: Duration,
    /// From a call's arrival at a proc to its reply.
    pub endpoint: Duration,
    /// A TLS handshake, for each end.
    pub handshake: Duration,
    /// Making a proc; a host makes one after the other.
    pub spawn: Duration,
    /// Bytes around a packet: a TLS record and the headers below it.
    pub around: usize,
    /// Bytes of a host's address in what its parent is told.
    pub address: usize,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            packet_in: Duration::from_micros(5),
            packet_out: Duration::from_micros(5),
            byte_ps: 700,
            number: Duration::from_nanos(400),
            plan: Duration::from_nanos(650),
            merge: Duration::from_nanos(450),
            distinct: Duration::from_nanos(40),
            run: Duration::from_nanos(20),
            share: Duration::from_nanos(600),
            outcome: Duration::from_nanos(60),
            local: Duration::from_micros(2),
            endpoint: Duration::from_micros(30),
            handshake: Duration::from_micros(400),
            spawn: Duration::from_millis(12),
            around: 22 + 52,
            address: 40,
        }
    }
}

impl Default for Model {
    fn default() -> Self {
        Self {
            hosts: 1000,
            procs: 8,
            fan_out: 16,
            latency: Duration::from_micros(100),
            bandwidth: 1_250_000_000,
            payload: 256,
            reply: 32,
            equal: true,
            window: Duration::from_secs(10),
            costs: Costs::default(),
        }
    }
}

impl Model {
    /// How long `bytes` take on the wire.
    #[must_use]
    pub fn wire(&self, bytes: usize) -> Duration {
        Duration::from_nanos(bytes as u64 * 1_000_000_000 / self.bandwidth.max(1))
    }
}

impl Costs {
    /// The cost of `count` things at `each`.
    #[must_use]
    pub fn times(each: Duration, count: usize) -> Duration {
        each * u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// The cost of reading or writing `bytes`, on top of the packet's.
    #[must_use]
    pub fn bytes(&self, bytes: usize) -> Duration {
        Duration::from_nanos(bytes as u64 * self.byte_ps / 1000)
    }
}
