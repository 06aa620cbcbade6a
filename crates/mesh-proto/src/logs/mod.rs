//! What processes print, on its way to whoever started them.
//!
//! Bytes of a process's stdout and stderr go into its [`Tap`], which makes lines of them and keeps the last ones of
//! stderr. Lines go into the [`Aggregator`], which says what is shown, and when.
//!
//! A line may begin with a mark, written by the streams that Python has in a worker (`_streams.py`). `␞` is 0x1e, `␟`
//! is 0x1f, and a mark's line ends like any other:
//!
//! ```text
//! ␞L level ␟ name ␟ rank ␟ point ␟ text      a line of an actor (of the process, if the name is empty); level 0: not logged
//! ␞F thread ␟ name ␟ rank ␟ point ␟ text     the beginning of a line; more of it follows from the same thread
//! ␞C thread ␟ name ␟ rank ␟ point ␟ text     the rest of such a line
//! ␞I name ␟ rank ␟ point ␟ host ␟ procs ␟ window in ms ␟ level ␟      who writes here, and what holds for its mesh
//! ␞O mesh ␟ 0 or 1 ␟ window in ms ␟ level ␟  options of a mesh, from a process that owns it
//! ```
//!
//! What has no mark, or a mark that is none, is a line of the process itself.
//!
//! LOG-1: the lines of one rank are shown in the order in which they were written, but for those that others had said
//! before and that are counted at the end of the window.
//! LOG-2: no two lines of one rank become one, so that nothing that a rank has said goes uncounted.
//! LOG-3: memory is bounded, whatever is written.

mod aggregate;
mod batch;
mod label;
mod similar;
mod tap;

pub use aggregate::{Aggregator, Chunk};
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
    /// How long similar lines of several ranks are counted instead of shown; zero for not at all.
    pub window: Duration,
    /// Records of `logging` below this level are left out.
    pub level: u32,
}

impl LogOptions {
    /// Whether a line is left out.
    #[must_use]
    pub fn omit(&self, line: &Line<'_>) -> bool {
        !self.shown || (line.level > 0 && line.level < self.level)
    }
}

/// One line, and who wrote it.
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
