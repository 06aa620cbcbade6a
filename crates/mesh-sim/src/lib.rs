//! A job of up to a hundred thousand hosts in virtual time.
//!
//! The state machine of every host is the runtime's own [`mesh_proto::hosts::Gateway`]: it attaches hosts, dials, relays, numbers and
//! acknowledges packets, merges replies, notices silence and decides who is dead. What it runs on is a [`Model`]: links with latency and bandwidth,
//! and gateways, one thread each, that spend time on packets, bytes and destinations. Everything is deterministic.
//!
//! In the model: the way of every packet and acknowledgement, its bytes on either network card, what gateways spend on
//! it and the order in which they come to it; connections that are made when the gateway asks for them, with their handshakes;
//! segments of large arguments, relayed one by one; procs that reply at different times; timers (holds, late acks,
//! resending, heartbeats); deaths with and without an end of the connection, and the tree's mending.
//!
//! Left out: loss and reordering within a connection (TCP sees to them) and congestion in switches;
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
