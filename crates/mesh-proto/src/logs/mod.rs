//! What processes print, on its way to whoever started them.
//!
//! Bytes of a process's stdout and stderr go into its [`Tap`], which makes lines of them and keeps the last ones of
//! stderr. Lines go into the [`Aggregator`], which says what is shown, and when.
//!
//! A line may begin with a mark, written by the streams that Python has in a worker (`_system/streams.py`). `␞` is 0x1e, `␟`
//! is 0x1f, and a mark's line ends like any other:
//!
//! ```text
//! ␞L level ␟ name ␟ rank ␟ point ␟ text      a line of an actor (of the process, if the name is empty); level 0: not logged
//! ␞U level ␟ name ␟ rank ␟ point ␟ text      lines that were written at once, ␝ (0x1d) between them
//! ␞N level ␟ name ␟ rank ␟ point ␟ text      a line of Mesh's own, for whoever reads it: never shown as one with others
//! ␞R level ␟ name ␟ rank ␟ point ␟ text ␟ record   a record of `logging`: as text, as ␞U has it, and as JSON
//! ␞F thread ␟ name ␟ rank ␟ point ␟ text     the beginning of a line; more of it follows from the same thread
//! ␞C thread ␟ name ␟ rank ␟ point ␟ text     the rest of such a line
//! ␞I name ␟ rank ␟ point ␟ host ␟ procs ␟ flags ␟ window in ms ␟ level ␟      who writes here, and what holds for its mesh
//! ␞O mesh ␟ flags ␟ window in ms ␟ level ␟  options of a mesh, from a process that owns it
//! ```
//!
//! What has no mark, or a mark that is none, is a line of the process itself. The JSON of a record is not looked at here:
//! whoever hands it on reads it without trust.
//!
//! Lines that belong together (a traceback, the lines of one record, what was written at once) are one [`Line`], whose text
//! has line ends in it.
//!
//! LOG-1: the lines of one rank are shown in the order in which they were written, but for those that others had said
//! before and that are counted at the end of the window.
//! LOG-2: no two lines of one rank become one, so that nothing that a rank has said goes uncounted.
//! LOG-3: memory is bounded, whatever is written.
//! LOG-7: no rank is shown to have said what it has not: only equal lines become one, or lines of which it is said that
//! their numbers differ.

mod aggregate;
mod batch;
mod label;
mod similar;
mod tap;
mod traceback;

pub use aggregate::{Aggregator, Chunk, Record};
pub use batch::{Batch, Told, read_batch};
pub use tap::{TAIL_LINES, Tap};

use crate::MeshId;
use std::time::Duration;

/// Which of its two streams a process has written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Its stdout.
    Out,
    /// Its stderr.
    Err,
}

/// What is done with the lines of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Whether they are shown at all.
    pub shown: bool,
    /// Whether lines that are equal but for their numbers count as equal.
    pub alike: bool,
    /// How long equal lines of several ranks are counted instead of shown; zero for not at all.
    pub window: Duration,
    /// Records of `logging` below this level are left out.
    pub level: u32,
}

/// [`LogOptions::flags`]: lines are shown.
const SHOWN: u8 = 1;
/// [`LogOptions::flags`]: numbers make no difference.
const ALIKE: u8 = 2;

impl LogOptions {
    /// Its two choices as bits: 1 for lines that are shown, 2 for numbers that make no difference.
    #[must_use]
    pub fn flags(&self) -> u8 {
        (if self.shown { SHOWN } else { 0 }) | (if self.alike { ALIKE } else { 0 })
    }

    /// Options with these [`flags`](Self::flags).
    #[must_use]
    pub fn with(flags: u8, window: Duration, level: u32) -> Self {
        Self { shown: flags & SHOWN != 0, alike: flags & ALIKE != 0, window, level }
    }

    /// Whether a line is left out.
    #[must_use]
    pub fn omit(&self, line: &Line<'_>) -> bool {
        !self.shown || (line.level > 0 && line.level < self.level)
    }
}

/// One line, or several that belong together, and who wrote it.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// Where it was written to.
    pub stream: Stream,
    /// Its level, if it is a record of `logging`; otherwise 0.
    pub level: u32,
    /// The actor, or the mesh of processes.
    pub name: &'a [u8],
    /// Its rank in its mesh.
    pub rank: u32,
    /// Its coordinates, as `hosts=1,gpus=3`.
    pub point: &'a [u8],
    /// The host it runs on.
    pub host: &'a [u8],
    /// The line, without its end.
    pub text: &'a [u8],
    /// The record of `logging` that it shows, as JSON; empty if it is none, or has come as text alone.
    pub record: &'a [u8],
    /// Whether it is shown by itself, whoever else says the same.
    pub alone: bool,
}

/// What a [`Tap`] finds in a stream.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// A line.
    Line(Line<'a>),
    /// The process has said who it is: its mesh has so many procs, and these options unless others were set.
    Introduced(u32, LogOptions),
    /// A process sets the options of a mesh that it owns.
    Options(MeshId, LogOptions),
}
