//! The C library's own stdout in a worker, which native extensions print to.

use std::ffi::{c_char, c_int, c_void};

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
