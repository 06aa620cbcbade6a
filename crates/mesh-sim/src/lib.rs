//! A job of up to a hundred thousand hosts in virtual time.
//!
//! Every host runs the runtime's own state machine, [`mesh_proto::hosts::Gateway`]: it attaches hosts, dials, relays,
//! numbers and acknowledges packets, merges replies, notices silence and decides who is dead. It runs on a [`Model`]:
//! links with latency and bandwidth, and gateways, one thread each, that spend time on packets, bytes and destinations.
//! Everything is deterministic.
//!
//! Modelled: the path of every packet and acknowledgement, its bytes on both network cards, what gateways spend on it
//! and the order in which they handle it; connections that the gateway asks for, with their handshakes; segments of
//! large arguments, relayed one by one; procs that reply at different times; timers (holds, late acks, resending,
//! heartbeats); deaths, whether or not connections end, and the tree's repair.
//!
//! Left out: loss and reordering within a connection (TCP handles them) and congestion in switches; what the
//! interpreter does with arguments and replies; other cores that a gateway could use; hosts that differ.
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
