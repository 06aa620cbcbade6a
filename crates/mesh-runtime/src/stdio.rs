//! A worker's stdout and stderr: the C library's own stream, which native extensions print to, and the descriptors.

use rustix::io::Errno;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::BorrowedFd;

/// Of the C library: "as soon as a line is complete"; the same number on glibc and musl.
const LINE_BUFFERED: c_int = 1;

unsafe extern "C" {
    static stdout: *mut c_void;
    fn setvbuf(stream: *mut c_void, buffer: *mut c_char, mode: c_int, size: usize) -> c_int;
    fn fflush(stream: *mut c_void) -> c_int;
}

/// Has the C library write out every line at once, though its stdout is a pipe: else it would keep lines back until
/// there are pages of them, and lose them in a crash.
pub fn line_buffer_stdio() {
    // SAFETY: `stdout` is the C library's own stream, valid all along; without a buffer given it keeps to its own.
    unsafe {
        setvbuf(stdout, std::ptr::null_mut(), LINE_BUFFERED, 0);
    }
}

/// Writes out what the C library has buffered: a worker leaves without the interpreter's end, which would.
pub fn flush_stdio() {
    // SAFETY: a null stream stands for all output streams.
    unsafe {
        fflush(std::ptr::null_mut());
    }
}

/// Writes all of `data` to a descriptor that blocks.
///
/// # Errors
/// How much was written before an error, and the error.
pub fn write_whole(fd: i32, data: &[u8]) -> Result<(), (usize, Errno)> {
    // SAFETY: the caller writes to its own stdout or stderr. Should those be closed the kernel says so.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut done = 0;
    while done < data.len() {
        done += rustix::io::write(fd, &data[done..]).map_err(|errno| (done, errno))?;
    }
    Ok(())
}
