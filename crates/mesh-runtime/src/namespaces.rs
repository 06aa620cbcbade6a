//! The kernel's means to keep a process apart: namespaces, mounts, and privileges given up for good.
//!
//! What a sandbox is made of, and in which order, is decided in Python (`_blocks/sandboxes/isolation.py`); each function here is one request
//! to the kernel.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

const HIGHEST_CAPABILITY: libc::c_ulong = 63;
const CAPABILITIES_V3: u32 = 0x2008_0522;
// Root is a user like any other, now and after exec.
const SECURE: libc::c_ulong = 0b1111;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Capabilities {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `keyctl(2)`: numbers of requests, and of the keyring of the session.
const JOIN_SESSION_KEYRING: libc::c_ulong = 1;
const SET_PERMISSIONS: libc::c_ulong = 5;
const SESSION_KEYRING: libc::c_long = -3;

fn checked(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Moves this process into new namespaces, or, for those of processes, its children.
pub fn unshare(kinds: i32) -> io::Result<()> {
    // SAFETY: the call takes a number, and no memory.
    checked(libc::c_long::from(unsafe { libc::unshare(kinds) }))
}

/// Has the children of this process begin in that namespace of processes.
pub fn beget_in(pids: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call takes numbers, and no memory; the descriptor is open.
    checked(libc::c_long::from(unsafe { libc::setns(pids.as_raw_fd(), libc::CLONE_NEWPID) }))
}

/// `mount(2)`.
pub fn mount(
    source: Option<&CStr>,
    target: &CStr,
    kind: Option<&CStr>,
    flags: u64,
    data: Option<&CStr>,
) -> io::Result<()> {
    let text = |given: Option<&CStr>| given.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: the strings live until the call returns.
    let done =
        unsafe { libc::mount(text(source), target.as_ptr(), text(kind), flags as libc::c_ulong, text(data).cast()) };
    checked(libc::c_long::from(done))
}

/// Adds and removes attributes of a mount (`MOUNT_ATTR_*`), and of all below it if wanted.
pub fn change_mount(path: &CStr, add: u64, remove: u64, below: bool) -> io::Result<()> {
    let attributes = libc::mount_attr { attr_set: add, attr_clr: remove, propagation: 0, userns_fd: 0 };
    let flags = if below { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: path and structure live until the call returns, and the size is that of the structure.
    checked(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            ptr::from_ref(&attributes),
            size_of::<libc::mount_attr>(),
        )
    })
}

/// Gives up all capabilities, and the means to get any by running a program.
pub fn give_up_privileges() -> io::Result<()> {
    let header = CapabilityHeader { version: CAPABILITIES_V3, pid: 0 };
    let none = [Capabilities { effective: 0, permitted: 0, inheritable: 0 }; 2];
    // SAFETY: the calls take numbers, and two structures of the layout that this version of the call has.
    unsafe {
        checked(libc::c_long::from(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))?;
        // Who has no privileges cannot do this, and has nothing to lose by it.
        for capability in 0..=HIGHEST_CAPABILITY {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        libc::prctl(libc::PR_SET_SECUREBITS, SECURE, 0, 0, 0);
        checked(libc::syscall(libc::SYS_capset, ptr::from_ref(&header), none.as_ptr()))
    }
}

/// Leaves the keyring of the session, with the keys of the user that programs and the kernel keep there, for one that nobody can use: not even
/// processes that share it may search it, or add to it.
pub fn leave_keyring() -> io::Result<()> {
    let nothing = ptr::null::<libc::c_char>();
    // SAFETY: the calls take numbers, and a null pointer in the place of a name.
    let done = checked(unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, nothing) })
        .and_then(|()| checked(unsafe { libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, SESSION_KEYRING, 0) }));
    match done {
        // A kernel without keys, or a container that forbids them to all that it runs.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
        done => done,
    }
}

/// Whether other processes of the user may look into this one.
pub fn let_look(allowed: bool) -> io::Result<()> {
    // SAFETY: the call takes numbers, and no memory.
    checked(libc::c_long::from(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(allowed), 0, 0, 0) }))
}

/// Has the kernel kill this process when its parent ends, which may live in another namespace of processes.
pub fn ask_to_die_with_parent() -> io::Result<()> {
    // SAFETY: the call takes numbers, and no memory.
    checked(libc::c_long::from(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) }))
}
