//! Durations as the kernel takes them, and its clock.

use rustix::event::Timespec;
use std::time::Duration;

/// The longest that there is, if it is longer.
pub(crate) fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}

/// The clock of this host, the same for all its processes, in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
