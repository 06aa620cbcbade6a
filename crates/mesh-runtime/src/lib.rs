//! The I/O around `mesh-proto`: sockets, shared memory, waiting, child processes. It knows no Python.
//!
//! One [`Runtime`] a process. A thread of its own reads every link; a thread that waits for an answer takes that duty
//! over while it waits, so that the answer reaches it without a hand-over (see [`reactor`]).

mod agent;
mod awaited;
mod buffer;
mod bypass;
mod call;
mod call_filter;
mod calls;
mod completion;
mod copy;
mod dispatch;
mod dump;
mod error;
mod fork_server;
mod gate;
mod gateway;
mod gauge;
mod greeting;
mod handling;
mod home;
mod host;
mod inbox;
mod inspect;
mod intake;
mod interfaces;
mod journal;
mod link;
mod link_page;
mod locks;
mod logs;
mod loop_waker;
mod marked;
mod message;
mod meter;
#[cfg(all(test, loom))]
mod models;
mod namespaces;
mod oom;
mod ports;
mod promises;
pub mod reactor;
mod refs;
mod remote_meshes;
mod runtime;
mod sender;
#[cfg_attr(loom, path = "models/sets.rs")]
mod sets;
mod shm;
pub mod sigterm;
mod spin_board;
mod standing;
mod stdio;
#[cfg_attr(loom, path = "models/sync.rs")]
mod sync;
#[cfg(all(test, not(loom)))]
mod tests;
mod timespec;
mod title;
mod unseen;
mod usage;
mod visits;
mod wait;
mod waits;

pub use agent::SpawnSpec;
pub use buffer::Buffer;
pub use bypass::{BYPASS_VERSION, Bypass, RawBypass};
pub use call::{Call, Callee, Outcome};
pub use call_filter::filter_calls;
pub use completion::{Completion, Fate, Finisher};
pub use error::{ErrorKind, RuntimeError};
pub use fork_server::{ForkServerSpec, Spare, Standby};
pub use gate::{Admission, Bid, Doubt, Full, Gate, Receivers, Turn, Verdict};
pub use gateway::{GatewayOptions, HostState, HostView, agents};
pub use gauge::{ClockStop, Gauge};
pub use handling::Handling;
pub use host::{Host, HostOptions, HostTold};
pub use inbox::{Inbox, Side};
pub use interfaces::interfaces;
pub use journal::{Entries, Journal};
pub use logs::Logs;
pub use loop_waker::LoopWaker;
pub use marked::{Program, adopt_orphans, start_marked};
pub use mesh_tls as tls;
pub use message::Message;
pub use meter::Meter;
pub use namespaces::{
    ask_to_die_with_parent, beget_in, change_mount, give_up_privileges, leave_keyring, let_look, mount, unshare,
};
pub use ports::{Receive, Way};
pub use refs::{Hold, Kept, Opened, RefAddr, Refs, View, pack};
pub use runtime::{
    Body, Calling, Counts, Deferral, EventLoop, EventLoops, Later, Mailbox, Options, Outgoing, Outlet, Packed, Posted,
    Posting, Runtime, Said, Spawned, Terms, Wait, Waited, Which,
};
pub use rustix::io::Errno;
pub use sender::{Road, Sender, SenderSpec, Taken, TooLong};
pub use shm::{PartData, SharedPart};
pub use stdio::{flush_stdio, line_buffer_stdio, write_whole};
pub use title::name_process;
pub use visits::{VisitEnd, VisitError, Visited, jobs_at, visit};

/// Has the kernel kill this process when its parent ends; at once if its parent is not `parent` any more.
pub fn die_with_parent(parent: u32) {
    use rustix::process::{Signal, getpid, getppid, kill_process, set_parent_process_death_signal};
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have ended before the request was in place.
    if getppid().is_none_or(|pid| pid.as_raw_nonzero().get().unsigned_abs() != parent) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

static EXIT_STATUS: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);

extern "C" fn exit_now() {
    // SAFETY: the end of the process; what C has buffered is written first, as `exit` would after its handlers.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(EXIT_STATUS.load(std::sync::atomic::Ordering::SeqCst));
    }
}

/// Has the process end with `status` when it exits, whatever status it exits with.
pub fn exit_with(status: i32) {
    EXIT_STATUS.store(status, std::sync::atomic::Ordering::SeqCst);
    // SAFETY: a function without arguments that lives as long as the program; a full table of handlers is an error that
    // costs the status alone.
    unsafe {
        libc::atexit(exit_now);
    }
}
