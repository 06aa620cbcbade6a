//! Replies of one call becoming one on the way up.
//!
//! An agent puts the replies of its procs into one `Gathered` frame, equal payloads once ([`HostMerge`]); a relay
//! puts the frames of several hosts into one ([`RelayMerge`]); who called makes replies of it again ([`unmerge`]).
//!
//! ```text
//! part 0: number of entries (4), then of each: flags (2), parts (2), number of runs (4), runs (16 each)
//! part 1 + n: body of entry n, as it was in the reply
//! ```
//!
//! A run says that hosts `origin`, `origin + 1`, ... each sent the payload for `each` places, which follow one another
//! from `first` on. So the share of each host can be taken or left by itself, and a regular cast is one run. The highest
//! bit of the number of hosts says that nothing more comes from them: then a relay waits for them no longer.
//!
//! Where no two replies are equal, an entry is a series, which the highest bit of the number of runs says: each place of
//! its one run has a payload of its own. Their lengths (4 each) follow the run, and the body is all of them.
//!
//! - MRG-1: every reply that goes in comes out once, with its flags, bytes and place; none waits longer than the hold.
//! - MRG-2: what one proc, or one host, sends to one receiver comes out in the order in which it went in.
//! - MRG-3: an origin is in a merged frame at most once: one number speaks for its share.
//! - MRG-4: what is kept is bounded: calls, bytes and time, whatever is never answered.
//! - MRG-5: bytes of another host make at most as many replies as the call has places, and never a panic.

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

/// How long a reply may wait for others.
pub const HOLD: Duration = Duration::from_millis(1);
/// A reply with a longer body goes by itself: there is nothing to be gained, and it would hold up the others.
pub const MERGE_LIMIT: usize = 64 << 10;

/// A merged frame does not grow beyond this; it stays in one piece on its way.
const MERGED_MAX: usize = 192 << 10;
/// Payloads of one merged frame.
const PAYLOADS_MAX: usize = 1024;
/// Calls whose replies are awaited at one time; above that the oldest is let go, and its replies go by themselves.
const CALLS_MAX: usize = 4096;
