//! A job of up to a hundred thousand hosts in virtual time.
//!
//! The state machines are those of the runtime: [`mesh_proto::hosts`] decides who relays, numbers and acknowledges
//! packets, merges replies and notices silence. What they run on is a [`Model`]: links with latency and bandwidth,
//! and gateways, one thread each, that spend time on packets, bytes and destinations. Everything is deterministic.
//!
//! In the model: the way of every packet and acknowledgement, its bytes on either network card, what gateways spend on
//! it and the order in which they come to it; connections that are made when they are first used, with their handshakes;
//! segments of large arguments, relayed one by one; procs that reply at different times; timers (holds, late acks,
//! resending); deaths with and without an end of the connection, and the tree's mending.
//!
//! Left out: loss and reordering within a connection (TCP sees to them) and congestion in switches; pings of idle connections;
//! what the interpreter does with arguments and replies; other cores that a gateway could use; hosts that differ.
#![forbid(unsafe_code)]

mod chart;
mod gateway;
pub mod measure;
mod model;
mod node;
mod queue;
mod report;
mod scenario;
mod world;

pub use chart::{Chart, Series};
pub use model::{Costs, Model};
pub use node::Load;
pub use report::{charts, table};
pub use scenario::{Figures, Work, figures};
pub use world::{Progress, Purpose, World};
