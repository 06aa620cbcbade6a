//! A filter of system calls for sandboxes, of what namespaces leave open.
//!
//! * The kernel's keys are kept apart by nothing: who knows the number of a key, which `/proc/keys` shows, may do with it what its user may.
//! * In a user namespace of its own, a process has all privileges again. It could make other namespaces there, in which nobody counts its memory. So it
//!   has in one that its user has made elsewhere, if it finds that in the file system.
//! * A network namespace says nothing of some families of sockets: with `AF_VSOCK`, a process in an empty one still reaches other processes of the
//!   machine, and the host of a virtual machine. `io_uring` makes sockets without that system call, so it is refused too.
//! * The first process of a namespace of processes, which enforces the limits of a sandbox, has the same user as the others. These may not signal it, but
//!   could take its priority, its processors and its descriptors: by its number, or with all that its user has.

use std::io;

/// The architecture, and the numbers of system calls for programs of the other one that the kernel runs.
#[cfg(target_arch = "x86_64")]
const MACHINE: (u32, Foreign) = (
    0xC000_003E,
    Foreign {
        sockets: [102, 359, 360, 425],
        keys: [286, 287, 288],
        unshare: 310,
        setns: 346,
        by_number: [154, 156, 241, 340, 351],
        by_kind: [97, 289],
    },
);
#[cfg(target_arch = "aarch64")]
const MACHINE: (u32, Foreign) = (
    0xC000_00B7,
    Foreign {
        sockets: [102, 281, 288, 425],
        keys: [309, 310, 311],
        unshare: 337,
        setns: 375,
        by_number: [154, 156, 241, 369, 380],
        by_kind: [97, 314],
    },
);

/// System calls of programs of another architecture.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
struct Foreign {
    /// `socketcall`, `socket`, `socketpair` and `io_uring_setup`.
    sockets: [u32; 4],
    keys: [u32; 3],
    unshare: u32,
    setns: u32,
    /// Those that change the process which is their first argument.
    by_number: [u32; 5],
    /// Those that change the processes of the kind which is their first argument, and which is named by the second one.
    by_kind: [u32; 2],
}

/// The same number for all programs of other architectures.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FOREIGN_CLONE: u32 = 120;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FAMILIES: [libc::c_int; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_ALG];

/// The kinds that are all processes of a user: `PRIO_USER` and `IOPRIO_WHO_USER`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const OF_A_USER: [u32; 2] = [2, 3];

/// Refuses these from now on, to this process and all that it starts: keys, user namespaces, other families of sockets, and changes of the first process
/// of the namespace. It must have given up its privileges.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub fn filter_calls(sockets: bool, first_process: bool) -> io::Result<()> {
    let mut filter = filter(sockets, first_process);
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(|_| io::Error::from_raw_os_error(libc::E2BIG))?,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the filter lives until the call returns, and its length is that of the vector.
    let done = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            // Without this, some kernels slow down whatever runs below a filter.
            libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
            std::ptr::from_ref(&program),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Does nothing: the numbers of system calls are not known for this architecture.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn filter_calls(_sockets: bool, _first_process: bool) -> io::Result<()> {
    Ok(())
}

/// When a system call is refused, by an argument of it.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[derive(Clone, Copy)]
enum When {
    Always,
    Is(usize, u32),
    Has(usize, u32),
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn step(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn load(at: u32) -> libc::sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0)
}

/// Passes over so many steps unless what is loaded is this.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn equal(k: u32, otherwise: u8) -> libc::sock_filter {
    step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, 0, otherwise)
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn end(with: u32) -> libc::sock_filter {
    step(libc::BPF_RET | libc::BPF_K, with, 0, 0)
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn refuse(errno: libc::c_int) -> libc::sock_filter {
    end(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs())
}

// Where the kernel shows these (`struct seccomp_data`).
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const NUMBER: u32 = 0;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const ARCHITECTURE: u32 = 4;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const ARGUMENTS: [u32; 2] = [16, 24];

/// Refuses a system call; the number is loaded before and after these.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn rule(number: u32, when: When, errno: libc::c_int) -> Vec<libc::sock_filter> {
    let (argument, found) = match when {
        When::Always => return vec![equal(number, 1), refuse(errno)],
        When::Is(argument, value) => (argument, equal(value, 1)),
        When::Has(argument, bits) => (argument, step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, 0, 1)),
    };
    vec![equal(number, 4), load(ARGUMENTS[argument]), found, refuse(errno), load(NUMBER)]
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn filter(sockets: bool, first_process: bool) -> Vec<libc::sock_filter> {
    // Of the 32-bit programs with 64-bit registers that some kernels run.
    const X32: u32 = 0x4000_0000;
    let (here, others) = MACHINE;
    let allow = end(libc::SECCOMP_RET_ALLOW);
    let mut native =
        vec![load(NUMBER), step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32, 0, 1), refuse(libc::ENOSYS)];
    let mut foreign = vec![load(NUMBER)];
    let mut both = |number: libc::c_long, foreigner: u32, when: When, errno: libc::c_int| {
        native.extend(rule(number as u32, when, errno));
        foreign.extend(rule(foreigner, when, errno));
    };

    for (number, foreigner) in [libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl].into_iter().zip(others.keys)
    {
        both(number, foreigner, When::Always, libc::ENOSYS);
    }
    let users = When::Has(0, libc::CLONE_NEWUSER.unsigned_abs());
    both(libc::SYS_unshare, others.unshare, users, libc::EPERM);
    both(libc::SYS_clone, FOREIGN_CLONE, users, libc::EPERM);
    both(libc::SYS_setns, others.setns, When::Always, libc::EPERM);
    // Its flags are in memory, where a filter does not see them. Libraries use the older one instead.
    both(libc::SYS_clone3, libc::SYS_clone3 as u32, When::Always, libc::ENOSYS);
    if first_process {
        let by_number = [
            libc::SYS_sched_setparam,
            libc::SYS_sched_setscheduler,
            libc::SYS_sched_setaffinity,
            libc::SYS_prlimit64,
            libc::SYS_sched_setattr,
        ];
        for (number, foreigner) in by_number.into_iter().zip(others.by_number) {
            both(number, foreigner, When::Is(0, 1), libc::EPERM);
        }
        let by_kind = [libc::SYS_setpriority, libc::SYS_ioprio_set].into_iter().zip(others.by_kind).zip(OF_A_USER);
        for ((number, foreigner), user) in by_kind {
            both(number, foreigner, When::Is(1, 1), libc::EPERM);
            both(number, foreigner, When::Is(0, user), libc::EPERM);
        }
    }
    if sockets {
        native.extend(rule(libc::SYS_io_uring_setup as u32, When::Always, libc::ENOSYS));
        // All families that have pairs but this one are for networks.
        let pairs = [libc::AF_UNIX];
        for (number, families) in [(libc::SYS_socketpair, &pairs[..]), (libc::SYS_socket, &FAMILIES[..])] {
            native.extend([equal(number as u32, 2 + 2 * families.len() as u8), load(ARGUMENTS[0])]);
            for family in families {
                native.extend([equal(family.unsigned_abs(), 1), allow]);
            }
            native.push(refuse(libc::EAFNOSUPPORT));
        }
        for number in others.sockets {
            foreign.extend(rule(number, When::Always, libc::ENOSYS));
        }
    }
    native.push(allow);
    foreign.push(allow);
    let mut all = vec![load(ARCHITECTURE), equal(here, native.len() as u8)];
    all.extend(native);
    all.extend(foreign);
    all
}
