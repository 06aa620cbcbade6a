//! Whether the peer of a connection is alive.
//!
//! PLS-1: any arriving byte is a sign of life until [`Beat::Dead`] is returned.
//! PLS-2: silence counts only while this side was running to hear it. Time in which it was itself paused (a stopped
//! process, a frozen machine, a clock that jumped) is credited to the peer, so that both sides survive a pause.
//! PLS-3: an idle connection carries a ping every tenth of the window in each direction, so that one lost or late ping
//! does not make a live peer suspect. A busy connection carries none.

use std::time::Duration;

/// What to do about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Nothing.
    Quiet,
    /// Send a ping; it is already counted as sent.
    Ping,
    /// The peer has just become suspect after a quarter of the window: relay nothing through it until it is heard.
    Suspect,
    /// The peer was silent for the whole window.
    Dead,
}

/// Liveness of one connection. Call [`Heartbeat::on_tick`] whenever [`Heartbeat::next_deadline`] is reached.
///
/// ```
/// # use mesh_proto::hosts::{Beat, Heartbeat};
/// # use std::time::Duration;
/// let seconds = Duration::from_secs;
/// let mut heartbeat = Heartbeat::new(seconds(10), seconds(0));
/// assert_eq!(heartbeat.on_tick(heartbeat.next_deadline()), Beat::Ping);
/// heartbeat.heard(seconds(2));
/// assert!(heartbeat.next_deadline() <= seconds(2));
/// ```
#[derive(Clone, Debug)]
pub struct Heartbeat {
    window: Duration,
    heard: Duration,
    sent: Duration,
    /// When this side was last known to run.
    latest: Duration,
    suspect: bool,
    dead: bool,
}

impl Heartbeat {
    /// A connection that has just come up, whose peer is dead after `window` of silence.
    #[must_use]
    pub fn new(window: Duration, now: Duration) -> Self {
        let window = window.max(Duration::from_millis(1));
        Self { window, heard: now, sent: now, latest: now, suspect: false, dead: false }
    }

    /// Something arrived, even a single byte. Returns whether the peer was suspect until now (PLS-1).
    pub fn heard(&mut self, now: Duration) -> bool {
        self.pass(now);
        self.heard = self.heard.max(now);
        std::mem::take(&mut self.suspect)
    }

    /// Something was sent.
    pub fn sent(&mut self, now: Duration) {
        self.pass(now);
        self.sent = self.sent.max(now);
    }

    /// Returns what to do now. After a pause, read what has arrived before calling this (PLS-2). Call again until it
    /// returns [`Beat::Quiet`]. Death is final.
    pub fn on_tick(&mut self, now: Duration) -> Beat {
        self.pass(now);
        let silent = self.silent(now);
        if self.dead || silent >= self.window {
            self.dead = true;
            return Beat::Dead;
        }
        if silent >= self.window / 4 && !self.suspect {
            self.suspect = true;
            return Beat::Suspect;
        }
        if now.saturating_sub(self.sent) >= self.window / 10 {
            self.sent = now;
            return Beat::Ping;
        }
        Beat::Quiet
    }

    /// When to call [`Heartbeat::on_tick`] next.
    #[must_use]
    pub fn next_deadline(&self) -> Duration {
        let silence = if self.suspect { self.window } else { self.window / 4 };
        (self.sent + self.window / 10).min(self.heard + silence)
    }

    /// How long the peer has been silent, not counting this side's pauses.
    #[must_use]
    pub fn silent(&self, now: Duration) -> Duration {
        now.saturating_sub(self.heard)
    }

    /// Whether the peer is suspect.
    #[must_use]
    pub fn is_suspect(&self) -> bool {
        self.suspect
    }

    /// Notes that this side runs. A tick is due at most a tenth of the window after the last send. If this side is late
    /// by another tenth it was paused, and the pause does not count as the peer's silence (PLS-2).
    fn pass(&mut self, now: Duration) {
        let gap = now.saturating_sub(self.latest);
        if gap > self.window / 5 {
            self.heard = (self.heard + gap).min(now);
        }
        self.latest = self.latest.max(now);
    }
}
