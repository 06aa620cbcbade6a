//! Programs that are started with a mark, by which all their descendants can be found.
//!
//! The mark is the limit on file locks (`RLIMIT_LOCKS`), which kernels have ignored since 2.4. Every process has one, and
//! children inherit it across fork and exec, whatever they do to their parents, sessions and environment. Other processes of
//! the user can read it. Python says what the marks mean (`_system/process_marks.py`).

use rustix::process::{Resource, Rlimit, Signal, getpid, getppid, set_parent_process_death_signal, setrlimit, setsid};
use std::ffi::OsString;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A program to be started.
#[derive(Debug)]
pub struct Program {
    /// It and its arguments.
    pub argv: Vec<OsString>,
    /// Its whole environment; this process's own if there is none.
    pub env: Option<Vec<(OsString, OsString)>>,
    /// Where it is to run.
    pub cwd: Option<PathBuf>,
    /// The soft limit, to which its pid is added, and the hard one.
    pub mark: Option<(u64, u64)>,
}

/// From now on, orphaned descendants of this process become its children.
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: the call takes a number, and no memory.
    match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Starts a program in a session of its own, with this stdin, stdout and stderr. Returns its pid: it is a child of this
/// process, which must wait for it. It ends with the thread that calls this, which must last as long.
pub fn start_marked(program: Program, stdio: [BorrowedFd<'_>; 3]) -> io::Result<u32> {
    let Program { argv, env, cwd, mark } = program;
    let mut argv = argv.into_iter();
    let mut command = Command::new(argv.next().unwrap_or_default());
    let [input, output, errors] = stdio;
    command
        .args(argv)
        .stdin(Stdio::from(input.try_clone_to_owned()?))
        .stdout(Stdio::from(output.try_clone_to_owned()?))
        .stderr(Stdio::from(errors.try_clone_to_owned()?));
    if let Some(env) = env {
        command.env_clear().envs(env);
    }
    if let Some(cwd) = cwd {
        command.current_dir(cwd);
    }
    let parent = getpid();
    // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have ended before the request was in place.
            if getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            if let Some((soft, hard)) = mark {
                let pid = getpid().as_raw_nonzero().get().unsigned_abs();
                let current = Some(soft + u64::from(pid));
                setrlimit(Resource::Locks, Rlimit { current, maximum: Some(hard) })?;
            }
            Ok(())
        });
    }
    // Dropping the handle does not end the child. The caller waits for it.
    command.spawn().map(|child| child.id())
}
