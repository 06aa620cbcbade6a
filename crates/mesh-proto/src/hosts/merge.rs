//! Merging the replies of one call on their way up.
//!
//! An agent merges the replies of its procs into one `Gathered` frame, with equal payloads stored once ([`HostMerge`]).
//! A relay merges the frames of several hosts ([`RelayMerge`]). The caller splits them into replies again
//! ([`unmerge`]).
//!
//! ```text
//! part 0: number of entries (4), then of each: flags (2), parts (2), number of runs (4), runs (16 each)
//! part 1 + n: body of entry n, as it was in the reply
//! ```
//!
//! A run says that hosts `origin`, `origin + 1`, ... each sent the payload for `each` consecutive places, counting from
//! `first`. So each host's share can be taken or dropped separately, and a regular cast is one run. The highest bit of
//! the number of hosts means that nothing more comes from them, so relays stop waiting for them.
//!
//! If no two replies are equal, an entry is a series, marked by the highest bit of the number of runs: it has one run,
//! each place of which has its own payload. The lengths (4 each) follow the run, and the body is all the payloads.
//!
//! - MRG-1: every reply that goes in comes out once, with its flags, bytes and place; none waits longer than the hold.
//! - MRG-2: what one proc, or one host, sends to one receiver comes out in the order in which it went in.
//! - MRG-3: an origin is in a merged frame at most once: one number covers its share.
//! - MRG-4: memory and waiting are bounded (calls, bytes, time), even for calls that are never answered.
//! - MRG-5: bytes from another host never yield more replies than the call has places, and never a panic.

mod host;
mod pending_calls;
mod pending_replies;
mod relay;
mod replies;
mod table;

pub use host::HostMerge;
pub use relay::RelayMerge;
pub use replies::{Replies, unmerge};
pub use table::origins;

use std::time::Duration;

/// How long a reply may wait for others to merge with.
pub const HOLD: Duration = Duration::from_millis(1);
/// A reply with a longer body travels alone: merging would gain nothing and hold up the others.
pub const MERGE_LIMIT: usize = 64 << 10;

/// A merged frame does not grow beyond this, and is never cut into segments.
const MERGED_MAX: usize = 192 << 10;
/// Payloads in one merged frame.
const PAYLOADS_MAX: usize = 1024;
/// Calls whose replies are awaited at a time. Beyond that, the oldest is dropped and its replies travel alone.
const CALLS_MAX: usize = 4096;
