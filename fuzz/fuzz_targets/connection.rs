//! Bytes from a connection: `cargo fuzz run -s none connection`. `crates/mesh-proto/tests/hostile.rs` runs the same
//! entry for a fixed number of rounds on a stable compiler.
#![no_main]
#![allow(dead_code, reason = "the entries share their parts")]

#[path = "../../crates/mesh-proto/tests/support/entry.rs"]
mod entry;
#[path = "../../crates/mesh-proto/tests/support/connection.rs"]
mod connection;

libfuzzer_sys::fuzz_target!(|data: &[u8]| connection::feed(data));
