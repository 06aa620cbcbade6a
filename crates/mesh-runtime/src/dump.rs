//! The stacks of this process's Python threads, without the interpreter's help.
//!
//! The process has registered `faulthandler` for a signal, with a file in memory for its output; a handler of ours stands
//! before it, calls it, and says when the file is written. `faulthandler` walks the threads' frames without the GIL. That is sound as long as no
//! other thread runs bytecode meanwhile, so the signal goes to a thread that the kernel says is running: it is most likely
//! the one that holds the GIL, and stands still while it handles the signal. If none runs, none changes its frames, and
//! this thread handles the signal itself; nobody's sleep is interrupted.

use crate::error::RuntimeError;
use rustix::io::Errno;
use rustix::thread::futex;
use std::io::{Read as _, Seek as _};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a running thread may take to come to the signal.
const PATIENCE: Duration = Duration::from_millis(250);

/// How many dumps are written: a signal handler can reach nothing but a static.
static WRITTEN: AtomicU32 = AtomicU32::new(0);

/// The handler that writes: `faulthandler`'s. Set once, before any signal is sent.
static WRITER: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    let writer = WRITER.load(Ordering::SeqCst);
    if writer > libc::SIG_IGN {
        // SAFETY: a handler that was installed without SA_SIGINFO, as `install` has checked, is such a function.
        let writer = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(writer) };
        writer(signal);
    }
    WRITTEN.fetch_add(1, Ordering::SeqCst);
    // Atomics and a system call: all that a signal handler may do.
    let _ = futex::wake(&WRITTEN, futex::Flags::PRIVATE, u32::MAX);
}

/// Where the dumps go, and by which signal.
#[derive(Debug)]
pub(crate) struct Dumper {
    signal: libc::c_int,
    file: Mutex<std::fs::File>,
}

impl Dumper {
    /// Installs the handler that says when a dump is written, before the one that writes it.
    pub(crate) fn install(signal: i32, file: OwnedFd) -> Result<Self, RuntimeError> {
        // SAFETY: all-zero bytes are a valid sigaction, the pointers are to live memory, and the handler does only what
        // a handler may.
        let (done, before) = unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            let mut done = libc::sigaction(signal, std::ptr::null(), &raw mut before);
            if done == 0 && before.sa_flags & libc::SA_SIGINFO == 0 {
                WRITER.store(before.sa_sigaction, Ordering::SeqCst);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
                // Whoever sleeps in a system call goes on with it.
                action.sa_flags = libc::SA_RESTART;
                done = libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
            (done, before)
        };
        if done != 0 || before.sa_flags & libc::SA_SIGINFO != 0 {
            let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL);
            return Err(RuntimeError::Os { what: "install a handler for dumps of stacks", errno });
        }
        Ok(Self { signal, file: Mutex::new(file.into()) })
    }

    /// The stacks as `faulthandler` writes them; empty if no thread came to write them.
    pub(crate) fn dump(&self) -> Result<String, RuntimeError> {
        let fail = |error: std::io::Error| RuntimeError::Os {
            what: "read the stacks of this process's threads",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let me = rustix::thread::gettid();
        let mut written = false;
        for thread in [running_thread(me.as_raw_pid()), Some(me.as_raw_pid())].into_iter().flatten() {
            file.set_len(0).and_then(|()| file.rewind()).map_err(fail)?;
            if self.ask(thread) {
                written = true;
                break;
            }
        }
        let mut text = Vec::new();
        if written {
            file.rewind().and_then(|()| file.read_to_end(&mut text)).map_err(fail)?;
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn ask(&self, thread: i32) -> bool {
        let before = WRITTEN.load(Ordering::SeqCst);
        // SAFETY: sends a signal that has a handler to a thread of this process; it may have ended, which is an error.
        if unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, self.signal) } != 0 {
            return false;
        }
        let until = Instant::now() + PATIENCE;
        while WRITTEN.load(Ordering::SeqCst) == before {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let timeout = rustix::thread::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let _ = futex::wait(&WRITTEN, futex::Flags::PRIVATE, before, Some(&timeout));
        }
        true
    }
}

/// A thread of this process, other than `me`, that is on a CPU or waits for one.
fn running_thread(me: i32) -> Option<i32> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    tasks.flatten().find_map(|task| {
        let id: i32 = task.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let state = stat.rsplit_once(") ")?.1.as_bytes().first()?;
        (id != me && *state == b'R').then_some(id)
    })
}
