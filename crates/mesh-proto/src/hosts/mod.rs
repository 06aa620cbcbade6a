//! Many hosts: who relays for whom, what is under way between them, and whether they live. [`Gateway`] is all of it for
//! one host.
//!
//! Nothing here reads a clock or a socket: time is passed in, packets are handed over.

mod cargo;
mod fate;
pub mod gateway;
mod greet;
mod heartbeat;
mod merge;
mod packet;
mod peer_streams;
mod topology;
mod unpack;

pub use fate::{Fate, Parting};
pub use gateway::Gateway;
pub use greet::{Farewell, Join, Look, Refusal, Refuse, Welcome};
pub use heartbeat::{Beat, Heartbeat};
pub use merge::{HOLD, HostMerge, MERGE_LIMIT, RelayMerge, Replies, origins, unmerge};
pub use packet::{Dest, Gap, MAX_HOSTS, MAX_PACKET, MAX_RUNS, PACKET_HEAD, Packet, PacketError, PacketKind, Share};
pub use peer_streams::{Arrival, Cargo, Lane, Lost, PACKET_COST, PeerStreams, SEGMENT};
pub use topology::{DEFAULT_FAN_OUT, Standing, Topology};
pub use unpack::PacketDecoder;

/// A list that is nearly always short: a frame has a header and a body, most packets have one destination.
pub type Short<T> = smallvec::SmallVec<[T; 2]>;

/// Host numbers, kept as runs of neighbours.
pub type HostSet = mesh_topology::RunSet<crate::HostNo>;
