//! All tests of what the crate offers, as one program: linking twenty takes a minute.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

mod answers;
mod backlog;
mod control;
mod direct;
mod early;
mod family;
mod flow;
mod frames;
mod gateway_cost;
mod gateway_sim;
mod heartbeat;
mod holders;
mod hostile;
mod landing;
mod logs;
mod machines;
mod merge;
mod messages;
mod moves;
mod packets;
mod peer_streams;
mod peer_streams_cost;
mod peer_streams_sim;
mod topology;
