//! Bytes from a link: `cargo fuzz run -s none decode`. `crates/mesh-proto/tests/hostile.rs` runs the same entry for a
//! fixed number of rounds on a stable compiler.
#![no_main]

#[path = "../../crates/mesh-proto/tests/support/entry.rs"]
mod entry;

libfuzzer_sys::fuzz_target!(|data: &[u8]| entry::feed(data));
