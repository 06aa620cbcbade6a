//! The I/O around `mesh-proto`: sockets, shared memory, waiting, child processes. It knows no Python.
//!
//! One [`Runtime`] a process. A thread of its own reads every link; a thread that waits for an answer takes that duty
//! over while it waits, so that the answer reaches it without a hand-over (see [`reactor`]).

mod agent;
mod board;
mod calls;
mod copy;
mod error;
mod inbox;
mod link;
mod message;
mod meter;
mod nursery;
pub mod reactor;
mod runtime;
mod shm;
#[cfg(test)]
mod tests;
mod wait;

pub use agent::SpawnSpec;
pub use calls::{Call, Outcome};
pub use error::RuntimeError;
pub use inbox::{Inbox, LoopWaker};
pub use message::Message;
pub use meter::Meter;
pub use nursery::NurserySpec;
pub use runtime::{Counts, Options, Outgoing, Runtime, Terms, Waited};
pub use rustix::io::Errno;
pub use shm::{PartData, SharedPart};

/// Has the kernel kill this process when its parent ends; at once if its parent is not `parent` any more.
pub fn die_with_parent(parent: u32) {
    use rustix::process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have ended before the request was in place.
    if getppid().is_none_or(|pid| pid.as_raw_nonzero().get().unsigned_abs() != parent) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}
