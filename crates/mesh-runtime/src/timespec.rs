//! Durations as the kernel takes them.

use rustix::event::Timespec;
use std::time::Duration;

/// The longest that there is, if it is longer.
pub(crate) fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}
