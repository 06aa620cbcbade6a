//! When a controller was cut off from all of its hosts, or slept (GTW-4).

use std::time::Duration;

/// What the controller of a job with a hold knows of its own absence.
#[derive(Debug, Default)]
pub(super) struct CutOff {
    /// When it last noticed that it was cut off from all others, or was when one came back.
    pub(super) at: Option<Duration>,
    /// When one of them came back: silence before that does not count for the others.
    pub(super) back: Duration,
    /// When it last ran.
    pub(super) ran: Duration,
    /// Before this time, no check can find it cut off.
    pub(super) look_at: Duration,
}
