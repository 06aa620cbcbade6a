//! SIGTERM: a request to end in order, and an order to end at once where that takes too long.
//!
//! The program's own handler, which the interpreter runs between two of its steps, ends the job in order. The handler here
//! stands before it and needs no interpreter: it starts a timer of the kernel's, which sends the signal again when the
//! grace is over, and lets a second SIGTERM, whoever has sent it, do what it does by default. So a program whose
//! interpreter is held up dies too, and with it its processes.
//!
//! Until the interpreter's handler runs, the timer also goes off now and then, on the main thread: that may have been about
//! to block when SIGTERM came, in an event loop for example, or another thread may have taken the signal. There only the
//! interruption counts.
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

/// The main thread is interrupted for the first time after so many nanoseconds, then each time after ten times as many.
const FIRST: u64 = 20_000_000;
const NEXT: u64 = 10 * FIRST;
/// So long whatever has lost what the interpreter's handler raised has time to finish.
const SOON: u64 = 1_000_000;

// A signal's handler has nothing but statics to look at.

/// Whose handler it is.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The handler of the interpreter, or 0.
static INNER: AtomicUsize = AtomicUsize::new(0);
/// SIGTERM has come.
static ASKED: AtomicBool = AtomicBool::new(false);
/// The interpreter's handler runs, or has run.
static BEGUN: AtomicBool = AtomicBool::new(false);
/// The interpreter's handler is to run once more.
static LOST: AtomicBool = AtomicBool::new(false);
/// The kernel's timer.
static TIMER: AtomicI32 = AtomicI32::new(-1);
/// The grace, and when it ends on the monotonic clock, in nanoseconds; 0 without one.
static GRACE: AtomicU64 = AtomicU64::new(0);
static END: AtomicU64 = AtomicU64::new(0);
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

fn now() -> u64 {
    // SAFETY: a pointer to live memory; the call is allowed in handlers.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
        time
    };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Has the timer go off then, by the monotonic clock.
fn set_timer(then: u64) {
    let timer = TIMER.load(Ordering::SeqCst);
    if timer < 0 {
        return;
    }
    // SAFETY: all-zero bytes are a valid itimerspec, and the pointers are to live memory; the call is allowed in handlers.
    unsafe {
        let mut spec: libc::itimerspec = std::mem::zeroed();
        spec.it_value.tv_sec = libc::time_t::try_from(then / 1_000_000_000).unwrap_or(libc::time_t::MAX);
        spec.it_value.tv_nsec = libc::c_long::try_from(then % 1_000_000_000).unwrap_or(0);
        let none = std::ptr::null_mut::<c_void>();
        libc::syscall(libc::SYS_timer_settime, timer, libc::TIMER_ABSTIME, &raw const spec, none);
    }
}

/// The grace begins.
fn begin_grace() {
    let grace = GRACE.load(Ordering::SeqCst);
    END.store(if grace == 0 { 0 } else { now().saturating_add(grace) }, Ordering::SeqCst);
}

/// Has the main thread interrupted after so many nanoseconds, or at the end of the grace.
fn interrupt_after(pause: u64) {
    let end = END.load(Ordering::SeqCst);
    let then = now() + pause;
    set_timer(if end == 0 { then } else { then.min(end) });
}

/// Whether the timer has sent a signal, and not the last one.
fn is_interruption(info: *const libc::siginfo_t) -> bool {
    // SAFETY: the kernel gives a handler a valid one, and what a timer sends has a value.
    let ours = unsafe { (*info).si_code == libc::SI_TIMER && (*info).si_value().sival_ptr == mark() };
    let end = END.load(Ordering::SeqCst);
    ours && (end == 0 || now() < end)
}

/// What the timer's signals are known by.
fn mark() -> *mut c_void {
    TIMER.as_ptr().cast()
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    if OWNER.load(Ordering::SeqCst) != pid() {
        die();
        return;
    }
    if ASKED.swap(true, Ordering::SeqCst) {
        if !is_interruption(info) {
            die();
            return;
        }
        if BEGUN.load(Ordering::SeqCst) {
            return;
        }
        interrupt_after(NEXT);
        if !LOST.swap(false, Ordering::SeqCst) {
            return;
        }
    } else {
        begin_grace();
        interrupt_after(FIRST);
    }
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
        BEGUN.store(false, Ordering::SeqCst);
    }
    if TIMER.load(Ordering::SeqCst) < 0 {
        let mut made: c_int = -1;
        // SAFETY: all-zero bytes are a valid sigevent; both pointers are to live memory.
        let done = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_notify_thread_id = pid();
            event.sigev_signo = libc::SIGTERM;
            event.sigev_value.sival_ptr = mark();
            libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw mut event, &raw mut made)
        };
        if done != 0 {
            return Err(fail("make a timer"));
        }
        TIMER.store(made, Ordering::SeqCst);
    }
    // SAFETY: all-zero bytes are a valid sigaction, and the pointers are to live memory; the new handler is a function that
    // takes what SA_SIGINFO has the kernel give it.
    unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGTERM, std::ptr::null(), &raw mut found) != 0 {
            return Err(fail("look at the handler of SIGTERM"));
        }
        let own = on_signal as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        if found.sa_sigaction != own {
            if found.sa_flags & libc::SA_SIGINFO != 0 {
                return Ok(());
            }
            INNER.store(found.sa_sigaction, Ordering::SeqCst);
            found.sa_sigaction = own;
            found.sa_flags |= libc::SA_SIGINFO;
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
        begin_grace();
    }
    BEGUN.store(true, Ordering::SeqCst);
    // None at all stops the timer.
    set_timer(END.load(Ordering::SeqCst));
    Ok(())
}

/// What the interpreter's handler raised is lost: it runs once more, soon, as if the signal had come then.
pub fn repeat() {
    if ASKED.load(Ordering::SeqCst) && OWNER.load(Ordering::SeqCst) == pid() {
        LOST.store(true, Ordering::SeqCst);
        BEGUN.store(false, Ordering::SeqCst);
        interrupt_after(SOON);
    }
}

/// Nothing is to be stopped any more: forgets that SIGTERM has come, and stops the timer.
pub fn release() {
    ASKED.store(false, Ordering::SeqCst);
    BEGUN.store(false, Ordering::SeqCst);
    let timer = TIMER.swap(-1, Ordering::SeqCst);
    if timer >= 0 && OWNER.load(Ordering::SeqCst) == pid() {
        // SAFETY: a timer that this process has made, and deletes once.
        unsafe {
            libc::syscall(libc::SYS_timer_delete, timer);
        }
    }
}
