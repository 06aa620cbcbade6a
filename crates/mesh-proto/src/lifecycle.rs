//! A proc from its spawn to the one notice of its end.
//!
//! Two events signal a proc's end, in either order: its link closes, and its parent reaps it. If the link closes first,
//! the machine waits a short while for the other, so that the notice can name the exit status.
//!
//! A proc must say hello within the time that its spawn allows. The imports of its fork server do not count, as long as the
//! fork server makes progress, but for [`MOST_EXTENSIONS`] times that time at most.
//!
//! LIF-1: the end of a proc is reported exactly once, however it comes about.

use crate::hosts::Fate;
use crate::{EndKind, EndReason};
use std::time::Duration;

/// How long the notice of an end waits for the exit status after the link has closed. The reaper reports it within a
/// millisecond, unless the machine is overloaded; only a proc that has closed its link and lives on takes all of this
/// time.
pub(crate) const STATUS_GRACE: Duration = Duration::from_millis(500);

/// How long the notice waits for the exit status after a kill.
pub(crate) const KILL_GRACE: Duration = Duration::from_secs(1);

/// How many times the time for a proc's hello is extended while its fork server imports modules.
pub const MOST_EXTENSIONS: u32 = 9;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// It exited with this status.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// The kernel killed it with SIGKILL because memory was short; as far as can be told.
    OutOfMemory,
    /// Unknown: the process that would have reaped it is gone.
    Unknown,
}

impl Exit {
    /// What the kernel kills with; 9 on every architecture of Linux.
    const SIGKILL: i32 = 9;

    /// The status that it exited with.
    #[must_use]
    pub fn code(self) -> Option<i32> {
        match self {
            Self::Code(code) => Some(code),
            Self::Signal(_) | Self::OutOfMemory | Self::Unknown => None,
        }
    }

    /// The signal that killed it.
    #[must_use]
    pub fn signal(self) -> Option<i32> {
        match self {
            Self::Signal(signal) => Some(signal),
            Self::OutOfMemory => Some(Self::SIGKILL),
            Self::Code(_) | Self::Unknown => None,
        }
    }
}

/// The end of a proc, as everyone who waits for it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The process id, if it was ever known.
    pub pid: Option<u32>,
    /// How it ended.
    pub exit: Exit,
    /// Whether it was asked to stop, so that this is no failure.
    pub orderly: bool,
    /// What is known beyond the status.
    pub reason: EndReason,
    /// The last lines of its stderr, added by whoever reports the end.
    pub stderr_tail: Vec<String>,
}

impl Ended {
    /// The end of a proc whose process is not known.
    #[must_use]
    pub fn unmade(reason: EndReason) -> Self {
        Self { pid: None, exit: Exit::Unknown, orderly: false, reason, stderr_tail: Vec::new() }
    }

    /// What became of its host, if it ended with its host.
    #[must_use]
    pub fn fate(&self) -> Option<Fate> {
        match &self.reason {
            EndReason::Host(end) => Some(end.fate),
            _ => None,
        }
    }

    /// The kind of end, whether asked for or not.
    #[must_use]
    pub fn kind(&self) -> EndKind {
        match (&self.reason, self.exit) {
            (EndReason::Host(end), _) => end.fate.into(),
            // The status is a consequence of the failed bootstrap.
            (EndReason::Bootstrap(_), _) => EndKind::BootstrapFailed,
            (_, Exit::Code(_)) => EndKind::Exited,
            (_, Exit::Signal(_)) => EndKind::Killed,
            (_, Exit::OutOfMemory) => EndKind::OutOfMemory,
            (EndReason::NotMade(_), _) => EndKind::SpawnFailed,
            (EndReason::Late(..), _) => EndKind::SpawnTimeout,
            (EndReason::ForkServerEnded(_), _) => EndKind::ForkServerDied,
            (EndReason::ConnectionClosed(_) | EndReason::ConnectionBroke(_) | EndReason::Protocol(_), _) => {
                EndKind::ConnectionLost
            }
            (
                EndReason::Unstated
                | EndReason::Unreaped
                | EndReason::LongAgo
                | EndReason::NeverKnown
                | EndReason::NoSuchProc(_)
                | EndReason::Shutdown
                | EndReason::JobLost
                | EndReason::Unknown(_),
                Exit::Unknown,
            ) => EndKind::Unknown,
        }
    }

    /// Whether, as far as is known, its process was never made, though nobody asked it to stop.
    #[must_use]
    pub fn never_ran(&self) -> bool {
        let in_spawn = matches!(
            self.kind(),
            EndKind::SpawnFailed | EndKind::SpawnTimeout | EndKind::ForkServerDied | EndKind::ConnectionLost
        );
        self.pid.is_none() && in_spawn && !self.orderly
    }
}

/// What happens to a proc, as seen by its host agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It was requested, and must say hello by the deadline.
    Asked {
        /// How long it may take.
        within: Duration,
    },
    /// The fork server has made the process.
    Forked(u32),
    /// It said hello, and which process it is: the fork server may report that later.
    Hello(u32),
    /// It was asked to stop, and must be gone by the deadline.
    StopAsked {
        /// How long it may take.
        within: Duration,
    },
    /// It said goodbye: its end is no failure, unless its exit status signals one. Then this is the reason, if it gave
    /// one.
    Goodbye(EndReason),
    /// Its link has closed or broke.
    LinkClosed(EndReason),
    /// It was reaped.
    Exited(Exit),
    /// It could not be made.
    SpawnFailed(EndReason),
    /// Its fork server has imported everything, and is about to make it: its time begins now.
    Imported,
    /// Time has passed, in which its fork server was importing modules.
    Importing {
        /// The one that it is importing now.
        module: String,
        /// Whether it has made progress within the time that the spawn allows.
        progress: bool,
    },
    /// Time has passed.
    Tick,
}

/// Where a proc is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Requested; perhaps not yet a process.
    Starting,
    /// Said hello.
    Running,
    /// Was asked to stop.
    Stopping,
    /// Its end was noticed but not reported yet.
    Ending,
    /// Its end was reported.
    Ended,
}

/// What the host agent must do next.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Actions {
    /// Kill the process: it did not stop in time, or its link is gone.
    pub kill: bool,
    /// The notice for everyone who waits for this end.
    pub notice: Option<Ended>,
}

/// The state machine. Times are durations since any fixed moment.
#[derive(Debug)]
pub struct Lifecycle {
    stage: Stage,
    pid: Option<u32>,
    orderly: bool,
    link_closed: Option<EndReason>,
    last_words: Option<EndReason>,
    exit: Option<Exit>,
    deadline: Option<Duration>,
    killed: bool,
    /// How long it may take to say hello.
    allowed: Duration,
    /// How many times that was extended because its fork server was importing.
    extensions: u32,
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self {
            stage: Stage::Starting,
            pid: None,
            orderly: false,
            link_closed: None,
            last_words: None,
            exit: None,
            deadline: None,
            killed: false,
            allowed: Duration::ZERO,
            extensions: 0,
        }
    }
}

impl Lifecycle {
    /// Where the proc is in its life.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The process id, once it was made.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// When the machine needs [`Event::Tick`] next.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// How long it may take to say hello.
    #[must_use]
    pub fn allowed(&self) -> Duration {
        self.allowed
    }

    /// Takes one event at time `now`.
    pub fn on(&mut self, event: Event, now: Duration) -> Actions {
        if self.stage == Stage::Ended {
            return Actions::default();
        }
        match event {
            Event::Asked { within } => {
                if self.stage == Stage::Starting {
                    self.deadline = Some(now + within);
                    self.allowed = within;
                }
            }
            Event::Forked(pid) => self.pid = Some(pid),
            Event::Hello(pid) => {
                self.pid.get_or_insert(pid);
                if self.stage == Stage::Starting {
                    self.stage = Stage::Running;
                    self.deadline = None;
                }
            }
            Event::StopAsked { within } => {
                self.orderly = true;
                if matches!(self.stage, Stage::Starting | Stage::Running) {
                    self.stage = Stage::Stopping;
                }
                if self.stage == Stage::Stopping {
                    let by = now + within;
                    self.deadline = Some(self.deadline.map_or(by, |earlier| earlier.min(by)));
                }
            }
            Event::Goodbye(why) => {
                self.orderly = true;
                self.last_words = Some(why).filter(|why| !why.is_unstated());
            }
            Event::LinkClosed(why) => {
                if self.link_closed.is_none() {
                    self.link_closed = Some(why);
                    self.stage = Stage::Ending;
                    self.deadline = Some(now + STATUS_GRACE);
                }
            }
            Event::Exited(exit) => {
                self.exit = Some(exit);
                return self.end(None);
            }
            Event::SpawnFailed(why) => {
                self.exit.get_or_insert(Exit::Unknown);
                return self.end(Some(why));
            }
            Event::Imported => {
                if self.stage == Stage::Starting && self.deadline.is_some() {
                    self.deadline = Some(now + self.allowed);
                }
            }
            Event::Importing { module, progress } => {
                if self.stage != Stage::Starting {
                    return self.on(Event::Tick, now);
                }
                if self.deadline.is_some_and(|by| now >= by) {
                    if progress && !self.allowed.is_zero() && self.extensions < MOST_EXTENSIONS {
                        self.extensions += 1;
                        self.deadline = Some(now + self.allowed);
                    } else {
                        return self.late(module);
                    }
                }
            }
            Event::Tick => {
                if self.deadline.is_some_and(|by| now >= by) {
                    if self.stage == Stage::Starting {
                        return self.late(String::new());
                    }
                    self.deadline = None;
                    let kill = !std::mem::replace(&mut self.killed, true);
                    let why = if !kill && self.link_closed.is_none() { Some(EndReason::Unreaped) } else { None };
                    // Without a link it is of no more use.
                    if why.is_some() || self.link_closed.is_some() {
                        return Actions { kill, ..self.end(why) };
                    }
                    // It did not stop: it is killed, and the reaper reports its status.
                    self.deadline = Some(now + KILL_GRACE);
                    return Actions { kill, notice: None };
                }
            }
        }
        Actions::default()
    }

    /// It has not said hello in time, and was never of use.
    fn late(&mut self, module: String) -> Actions {
        let within = self.allowed.saturating_mul(1 + self.extensions);
        let kill = !std::mem::replace(&mut self.killed, true);
        Actions { kill, ..self.end(Some(EndReason::Late(within, module))) }
    }

    fn end(&mut self, why: Option<EndReason>) -> Actions {
        self.stage = Stage::Ended;
        self.deadline = None;
        let exit = self.exit.unwrap_or(Exit::Unknown);
        let reason = why.or_else(|| self.last_words.take()).or_else(|| self.link_closed.take()).unwrap_or_default();
        let orderly = self.orderly && (self.killed || matches!(exit, Exit::Code(0) | Exit::Unknown));
        Actions { kill: false, notice: Some(Ended { pid: self.pid, exit, orderly, reason, stderr_tail: Vec::new() }) }
    }
}
