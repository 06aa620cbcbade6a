//! What processes print, on its way to whoever started them.
//!
//! The bytes of a process's stdout and stderr go into its [`Tap`], which splits them into lines and keeps the last
//! lines of stderr. Lines go into the [`Aggregator`], which decides what is shown, and when.
//!
//! A line may begin with a mark, written by Python's streams in a worker (`_system/streams.py`). `␞` is 0x1e, `␟` is
//! 0x1f, and a marked line ends like any other:
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
//! A line without a valid mark is the process's own. The JSON of a record is not parsed here: whoever hands it on reads
//! it without trusting it.
//!
//! Lines that belong together (a traceback, the lines of one record, what was written at once) are one [`Line`], whose
//! text contains line ends.
//!
//! LOG-1: the lines of one rank are shown in the order in which they were written, except for those that others wrote
//! before and that are counted at the end of the window.
//! LOG-2: no two lines of one rank are merged, so nothing that a rank writes goes uncounted.
//! LOG-3: memory is bounded, whatever is written.
//! LOG-7: no rank is shown to have written what it has not: lines are merged only if they are equal, or if it is stated
//! that their numbers differ.

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

/// The stream that a process has written to.
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
    /// Whether lines that differ only in their numbers count as equal.
    pub alike: bool,
    /// How long equal lines of several ranks are counted instead of shown; zero to show them all.
    pub window: Duration,
    /// Records of `logging` below this level are left out.
    pub level: u32,
}

/// [`LogOptions::flags`]: lines are shown.
const SHOWN: u8 = 1;
/// [`LogOptions::flags`]: lines may differ in their numbers.
const ALIKE: u8 = 2;

impl LogOptions {
    /// The two choices as bits: 1 if lines are shown, 2 if numbers make no difference.
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
    /// The stream that it was written to.
    pub stream: Stream,
    /// The level of a `logging` record; 0 for other lines.
    pub level: u32,
    /// The actor, or the mesh of processes.
    pub name: &'a [u8],
    /// Its rank in its mesh.
    pub rank: u32,
    /// Its coordinates, such as `hosts=1,gpus=3`.
    pub point: &'a [u8],
    /// The host it runs on.
    pub host: &'a [u8],
    /// The line, without the line end.
    pub text: &'a [u8],
    /// The `logging` record that the line shows, as JSON; empty if there is none, or if only its text arrived.
    pub record: &'a [u8],
    /// Whether it is shown by itself, even if others write the same.
    pub alone: bool,
}

/// What a [`Tap`] finds in a stream.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// A line.
    Line(Line<'a>),
    /// The process has said who it is: its mesh has this many procs, and these options unless others were set.
    Introduced(u32, LogOptions),
    /// A process sets the options of a mesh that it owns.
    Options(MeshId, LogOptions),
}
