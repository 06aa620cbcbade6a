//! A filter of system calls for sandboxes, of what namespaces leave open.
//!
//! * A network namespace says nothing of some families of sockets: with `AF_VSOCK`, a process in an empty one still reaches other processes of the
//!   machine, and the host of a virtual machine. `io_uring` makes sockets without that system call, so it is refused too.
//! * The first process of a namespace of processes, which enforces the limits of a sandbox, has the same user as the others. These may not signal it, but
//!   could take its priority, its processors and its descriptors.

use std::io;

/// The architecture, and for programs of the other one that the kernel runs: the numbers of the system calls that make sockets and of
/// `io_uring_setup`; of those that change a process, which is their first argument; and of those that name it in the second.
#[cfg(target_arch = "x86_64")]
const MACHINE: (u32, [u32; 3], [u32; 5], [u32; 2]) =
    (0xC000_003E, [102, 359, 425], [154, 156, 241, 340, 351], [97, 289]);
#[cfg(target_arch = "aarch64")]
const MACHINE: (u32, [u32; 3], [u32; 5], [u32; 2]) =
    (0xC000_00B7, [102, 281, 425], [154, 156, 241, 369, 380], [97, 314]);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FAMILIES: [libc::c_int; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_ALG];

/// Refuses these from now on, to this process and all that it starts: other families of sockets, and changes of the first process of the
/// namespace. It must have given up its privileges.
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

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn filter(sockets: bool, first_process: bool) -> Vec<libc::sock_filter> {
    // Where the kernel shows these (`struct seccomp_data`).
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const ARGUMENTS: [u32; 2] = [16, 24];
    // Of the 32-bit programs with 64-bit registers that some kernels run.
    const X32: u32 = 0x4000_0000;
    let (here, foreign_sockets, foreign_first, foreign_second) = MACHINE;
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let equal = |k, otherwise| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, 0, otherwise);
    let end = |with| step(libc::BPF_RET | libc::BPF_K, with, 0, 0);
    let refuse = |errno: libc::c_int| end(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs());
    let allow = end(libc::SECCOMP_RET_ALLOW);
    // The number is loaded before and after these, and they end for a number of theirs.
    let spare = |number: u32, argument: usize| {
        [equal(number, 4), load(ARGUMENTS[argument]), equal(1, 1), refuse(libc::EPERM), allow]
    };

    let mut families = vec![load(ARGUMENTS[0])];
    for family in FAMILIES {
        families.extend([equal(family.unsigned_abs(), 1), allow]);
    }
    families.push(refuse(libc::EAFNOSUPPORT));
    let mut native =
        vec![load(NUMBER), step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32, 0, 1), refuse(libc::ENOSYS)];
    let mut foreign = vec![load(NUMBER)];
    if sockets {
        native.extend([
            equal(libc::SYS_io_uring_setup as u32, 1),
            refuse(libc::ENOSYS),
            equal(libc::SYS_socket as u32, families.len() as u8),
        ]);
        native.extend(families);
        for number in foreign_sockets {
            foreign.extend([equal(number, 1), refuse(libc::ENOSYS)]);
        }
    }
    if first_process {
        let first = [
            libc::SYS_sched_setparam,
            libc::SYS_sched_setscheduler,
            libc::SYS_sched_setaffinity,
            libc::SYS_prlimit64,
            libc::SYS_sched_setattr,
        ];
        for (number, foreigner) in first.into_iter().zip(foreign_first) {
            native.extend(spare(number as u32, 0));
            foreign.extend(spare(foreigner, 0));
        }
        for (number, foreigner) in [libc::SYS_setpriority, libc::SYS_ioprio_set].into_iter().zip(foreign_second) {
            native.extend(spare(number as u32, 1));
            foreign.extend(spare(foreigner, 1));
        }
    }
    native.push(allow);
    foreign.push(allow);
    let mut all = vec![load(ARCHITECTURE), equal(here, native.len() as u8)];
    all.extend(native);
    all.extend(foreign);
    all
}
