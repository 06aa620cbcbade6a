//! Many hosts: relaying, the packets under way between hosts, and liveness. [`Gateway`] combines it all for one host.
//!
//! Nothing here reads a clock or a socket: the caller passes in the time and the packets.

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

/// A list that is nearly always short: a frame has a header and a body, and most packets have one destination.
pub type Short<T> = smallvec::SmallVec<[T; 2]>;

/// Host numbers, kept as runs of neighbours.
pub type HostSet = mesh_topology::RunSet<crate::HostNo>;
