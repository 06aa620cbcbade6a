//! The stacks of this process's Python threads, without the interpreter's help.
//!
//! `faulthandler` can walk the threads' frames without the GIL. But while threads run, their frames change under it, and it
//! may follow a pointer into freed memory. So it walks in a forked copy of the process, which shares only the file in memory
//! that the stacks are written to. No other thread runs in the copy. If the fork happened in the middle of a change and the
//! copy crashes, another copy is made. The process itself is not interrupted, not even by a signal.
//!
//! The copy calls only functions that a signal handler may call: any lock may have been held when it was forked.

use crate::error::RuntimeError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::io::{Read as _, Seek as _};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// How many copies are tried, should they crash.
const ATTEMPTS: usize = 8;
/// How long a copy may take.
const LIMIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The signals of a crash. The program may have handlers for them, which would report the copy's crash as its own.
const CRASHES: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];

/// What writes the stacks: the handler that `faulthandler` has registered for a signal, and the file that it writes to.
#[derive(Debug)]
pub(crate) struct Dumper {
    signal: libc::c_int,
    writer: extern "C" fn(libc::c_int),
    file: Mutex<std::fs::File>,
}

impl Dumper {
    /// Finds the handler that is registered for `signal`.
    pub(crate) fn find(signal: i32, file: OwnedFd) -> Result<Self, RuntimeError> {
        // SAFETY: all-zero bytes are a valid sigaction, and the pointer is to live memory.
        let (done, found) = unsafe {
            let mut found: libc::sigaction = std::mem::zeroed();
            (libc::sigaction(signal, std::ptr::null(), &raw mut found), found)
        };
        // The two dispositions that are no functions are 0 and 1.
        if done != 0 || found.sa_flags & libc::SA_SIGINFO != 0 || found.sa_sigaction <= libc::SIG_IGN {
            return Err(RuntimeError::Os { what: "find the handler that writes stacks", errno: Errno::INVAL });
        }
        // SAFETY: a handler that was installed without SA_SIGINFO is such a function.
        let writer = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(found.sa_sigaction) };
        Ok(Self { signal, writer, file: Mutex::new(file.into()) })
    }

    /// The stacks as `faulthandler` writes them.
    pub(crate) fn dump(&self) -> Result<String, RuntimeError> {
        let fail = |error: std::io::Error| RuntimeError::Os {
            what: "read the stacks of this process's threads",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        };
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = Vec::new();
        for _ in 0..ATTEMPTS {
            file.set_len(0).and_then(|()| file.rewind()).map_err(fail)?;
            let whole = self.walk()?;
            text.clear();
            file.rewind().and_then(|()| file.read_to_end(&mut text)).map_err(fail)?;
            if whole {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Makes a copy that writes the stacks. False if it crashed; what it had written by then is in the file.
    fn walk(&self) -> Result<bool, RuntimeError> {
        // SAFETY: a plain fork: without the C library's handlers, which may wait for other threads, and without a signal at
        // the child's end, which would reach the program. The child calls nothing but what follows.
        let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        if child == 0 {
            // SAFETY: system calls, and a function that is written to be a signal handler.
            unsafe {
                for signal in CRASHES {
                    libc::signal(signal, libc::SIG_DFL);
                }
                // A crash leaves no core file. The child dies with the thread that waits for it.
                libc::prctl(libc::PR_SET_DUMPABLE, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                (self.writer)(self.signal);
                libc::_exit(0);
            }
        }
        let child = i32::try_from(child).ok().and_then(Pid::from_raw).ok_or(RuntimeError::Os {
            what: "make a copy of this process, in which its stacks are walked",
            errno: Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN),
        })?;
        if let Ok(fd) = pidfd_open(child, PidfdFlags::empty())
            && poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&LIMIT)) != Ok(1)
        {
            let _ = kill_process(child, Signal::KILL);
        }
        let mut status = 0;
        // SAFETY: waits for a child that nobody else knows of, and writes to live memory.
        while unsafe { libc::waitpid(child.as_raw_pid(), &raw mut status, libc::__WALL) } < 0 {
            if std::io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
                return Ok(false);
            }
        }
        Ok(status == 0)
    }
}
