//! A filter of system calls after which a process has no sockets but those that a namespace of networks keeps apart.
//!
//! A network namespace says nothing of other families: with `AF_VSOCK`, a process in an empty one still reaches other processes of the machine, and
//! the host of a virtual machine. `io_uring` makes sockets without that system call, so it is refused too.

use std::io;

/// Numbers of the system calls that make sockets, and of `io_uring_setup`, for programs of the other architecture that the kernel runs.
#[cfg(target_arch = "x86_64")]
const MACHINE: (u32, [u32; 3]) = (0xC000_003E, [102, 359, 425]);
#[cfg(target_arch = "aarch64")]
const MACHINE: (u32, [u32; 3]) = (0xC000_00B7, [102, 281, 425]);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FAMILIES: [libc::c_int; 6] =
    [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_ALG];

/// Refuses other families of sockets from now on, to this process and all that it starts. It must have given up its privileges.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub fn keep_to_namespaced_sockets() -> io::Result<()> {
    let mut filter = filter();
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
pub fn keep_to_namespaced_sockets() -> io::Result<()> {
    Ok(())
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn filter() -> Vec<libc::sock_filter> {
    // Where the kernel shows these (`struct seccomp_data`).
    const NUMBER: u32 = 0;
    const ARCHITECTURE: u32 = 4;
    const FIRST_ARGUMENT: u32 = 16;
    // Of the 32-bit programs with 64-bit registers that some kernels run.
    const X32: u32 = 0x4000_0000;
    let (here, foreign) = MACHINE;
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |at| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let equal = |k, otherwise| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, 0, otherwise);
    let end = |with| step(libc::BPF_RET | libc::BPF_K, with, 0, 0);
    let refuse = |errno: libc::c_int| end(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs());
    let allow = end(libc::SECCOMP_RET_ALLOW);

    let mut families = vec![load(FIRST_ARGUMENT)];
    for family in FAMILIES {
        families.extend([equal(family.unsigned_abs(), 1), allow]);
    }
    families.push(refuse(libc::EAFNOSUPPORT));
    let mut native = vec![
        load(NUMBER),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, X32, 0, 1),
        refuse(libc::ENOSYS),
        equal(libc::SYS_io_uring_setup as u32, 1),
        refuse(libc::ENOSYS),
        equal(libc::SYS_socket as u32, families.len() as u8),
    ];
    native.extend(families);
    native.push(allow);
    let mut all = vec![load(ARCHITECTURE), equal(here, native.len() as u8)];
    all.extend(native);
    all.push(load(NUMBER));
    for number in foreign {
        all.extend([equal(number, 1), refuse(libc::ENOSYS)]);
    }
    all.push(allow);
    all
}
