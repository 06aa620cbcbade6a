//! When a controller was cut off from all of its hosts, or slept (GTW-4).

use std::time::Duration;

/// What the controller of a job that is held knows of its own absence.
#[derive(Debug, Default)]
pub(super) struct CutOff {
    /// When it was last seen to be cut off from all others, or one of them came back.
    pub(super) at: Option<Duration>,
    /// When one of them came back: no silence of the others counts from before.
    pub(super) back: Duration,
    /// When it last ran.
    pub(super) ran: Duration,
    /// Before then no look at all hosts can find it cut off.
    pub(super) look_at: Duration,
}
