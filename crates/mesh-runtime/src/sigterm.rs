//! SIGTERM: a request to end in order, and an order to end at once where that takes too long.
//!
//! The program's own handler, which the interpreter runs between two of its steps, ends the job in order. The handler here
//! stands before it and needs no interpreter: it starts a timer of the kernel's, which sends the signal again when the
//! grace is over, and lets a second SIGTERM, whoever has sent it, do what it does by default. So a program whose
//! interpreter is held up dies too, and with it its processes.
//!
//! TERM-1: after the first SIGTERM the process ends within the grace.
//! TERM-2: a forked copy dies of SIGTERM at once: what its parent would have stopped is not its own.
//! TERM-3: a program that exits with the status 143 after SIGTERM dies of it, for whoever looks at its status.

use crate::error::RuntimeError;
use rustix::io::Errno;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// What a shell and Python make of a death by SIGTERM.
pub const STATUS: i32 = 128 + libc::SIGTERM;

// A signal's handler has nothing but statics to look at.

/// Whose handler it is.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The handler of the interpreter, or 0.
static INNER: AtomicUsize = AtomicUsize::new(0);
/// SIGTERM has come.
static ASKED: AtomicBool = AtomicBool::new(false);
/// The kernel's timer, and in how many nanoseconds it is to go off.
static TIMER: AtomicI32 = AtomicI32::new(-1);
static GRACE: AtomicU64 = AtomicU64::new(0);
/// Whether `at_exit` has been registered.
static WATCHES_EXIT: AtomicBool = AtomicBool::new(false);

fn pid() -> i32 {
    // SAFETY: it has no preconditions, and may be called in a signal handler.
    unsafe { libc::getpid() }
}

/// Ends this process by SIGTERM; what may be called in a signal handler, no more.
fn die() {
    if pid() == 1 {
        // The first process of a container: the kernel drops signals that it has no handler for, also its own.
        // SAFETY: the end of the process, allowed in handlers.
        unsafe { libc::_exit(STATUS) };
    }
    // SAFETY: calls that POSIX allows in handlers, with valid pointers to memory of this function's.
    unsafe {
        libc::signal(libc::SIGTERM, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::kill(libc::getpid(), libc::SIGTERM);
    }
}

fn start_timer() {
    let timer = TIMER.load(Ordering::SeqCst);
    let grace = Duration::from_nanos(GRACE.load(Ordering::SeqCst));
    if timer < 0 || grace.is_zero() {
        return;
    }
    // SAFETY: all-zero bytes are a valid itimerspec, and the pointers are to live memory; the call is allowed in handlers.
    unsafe {
        let mut spec: libc::itimerspec = std::mem::zeroed();
        spec.it_value.tv_sec = libc::time_t::try_from(grace.as_secs()).unwrap_or(libc::time_t::MAX);
        spec.it_value.tv_nsec = libc::c_long::from(grace.subsec_nanos());
        libc::syscall(libc::SYS_timer_settime, timer, 0, &raw const spec, std::ptr::null_mut::<c_void>());
    }
}

extern "C" fn on_signal(signal: c_int) {
    if OWNER.load(Ordering::SeqCst) != pid() || ASKED.swap(true, Ordering::SeqCst) {
        die();
        return;
    }
    start_timer();
    let inner = INNER.load(Ordering::SeqCst);
    if inner > libc::SIG_IGN {
        // SAFETY: the address of a handler that was installed without SA_SIGINFO is such a function.
        let inner = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(inner) };
        inner(signal);
    }
}

/// At the very end, after the interpreter's.
extern "C" fn at_exit(status: c_int, _: *mut c_void) {
    if status == STATUS && ASKED.load(Ordering::SeqCst) && OWNER.load(Ordering::SeqCst) == pid() {
        // SAFETY: the end of the process; what C has buffered is written first.
        unsafe {
            libc::fflush(std::ptr::null_mut());
        }
        die();
    }
}

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Has `at_exit` called. Where the C library cannot do that the status stays a number.
fn watch_exit() {
    #[cfg(target_env = "gnu")]
    if !WATCHES_EXIT.swap(true, Ordering::SeqCst) {
        // SAFETY: a function that lives as long as the program, and an argument that it does not look at.
        unsafe {
            on_exit(at_exit, std::ptr::null_mut());
        }
    }
}

/// Stands before the handler that the interpreter has installed for SIGTERM just now. The grace begins with the signal;
/// none at all leaves the end to a second SIGTERM.
pub fn guard(grace: Duration) -> Result<(), RuntimeError> {
    let fail = |what| RuntimeError::Os {
        what,
        errno: Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL),
    };
    GRACE.store(u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX), Ordering::SeqCst);
    if OWNER.swap(pid(), Ordering::SeqCst) != pid() {
        // A copy has none of its parent's timers, and was asked nothing.
        TIMER.store(-1, Ordering::SeqCst);
        ASKED.store(false, Ordering::SeqCst);
    }
    if TIMER.load(Ordering::SeqCst) < 0 {
        let mut made: c_int = -1;
        // SAFETY: all-zero bytes are a valid sigevent; both pointers are to live memory.
        let done = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGTERM;
            libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw mut event, &raw mut made)
        };
        if done != 0 {
            return Err(fail("make a timer"));
        }
        TIMER.store(made, Ordering::SeqCst);
    }
    // SAFETY: all-zero bytes are a valid sigaction, and the pointers are to live memory; the new handler is a function that
    // takes the signal's number alone, and is installed without SA_SIGINFO, as the one before was.
    unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGTERM, std::ptr::null(), &raw mut found) != 0 {
            return Err(fail("look at the handler of SIGTERM"));
        }
        let own = on_signal as extern "C" fn(c_int) as usize;
        if found.sa_sigaction != own {
            if found.sa_flags & libc::SA_SIGINFO != 0 {
                return Ok(());
            }
            INNER.store(found.sa_sigaction, Ordering::SeqCst);
            found.sa_sigaction = own;
            if libc::sigaction(libc::SIGTERM, &raw const found, std::ptr::null_mut()) != 0 {
                return Err(fail("stand before the handler of SIGTERM"));
            }
        }
    }
    watch_exit();
    Ok(())
}

/// The interpreter's handler runs: as if the signal had come here first, if somebody has put that handler back alone.
pub fn begin(grace: Duration) -> Result<(), RuntimeError> {
    if !(ASKED.swap(true, Ordering::SeqCst) && OWNER.load(Ordering::SeqCst) == pid()) {
        guard(grace)?;
        ASKED.store(true, Ordering::SeqCst);
        start_timer();
    }
    Ok(())
}

/// Nothing is to be stopped any more: forgets that SIGTERM has come, and stops the timer.
pub fn release() {
    ASKED.store(false, Ordering::SeqCst);
    let timer = TIMER.swap(-1, Ordering::SeqCst);
    if timer >= 0 && OWNER.load(Ordering::SeqCst) == pid() {
        // SAFETY: a timer that this process has made, and deletes once.
        unsafe {
            libc::syscall(libc::SYS_timer_delete, timer);
        }
    }
}
