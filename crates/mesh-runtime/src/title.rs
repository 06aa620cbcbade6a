//! What listings of processes call this one.

use std::sync::OnceLock;

/// Where the command line lies, once it was asked for; in a copy of this process it lies there, too.
static ARGUMENTS: OnceLock<Option<(usize, usize)>> = OnceLock::new();

/// Has `ps` show `title` instead of the command line, as far as there is room, and `top` show `short`.
///
/// Where the kernel does not tell where the command line lies, that stays as it is.
pub fn name_process(title: &str, short: &str) {
    let mut end = short.len().min(15);
    while !short.is_char_boundary(end) {
        end -= 1;
    }
    // Of the main thread, whichever this is.
    let _ = std::fs::write("/proc/self/comm", &short[..end]);
    let Some((start, end)) = *ARGUMENTS.get_or_init(arguments) else { return };
    let Some(room) = end.checked_sub(start).filter(|room| *room > 1) else { return };
    let mut n = title.len().min(room - 1);
    while !title.is_char_boundary(n) {
        n -= 1;
    }
    // SAFETY: the kernel has said that this process's command line lies there: memory of its own stack, writable,
    // that ends where `end` says. The interpreter has copied its arguments when it started; what still points there (the
    // name of the program that libc puts before its own messages) finds an end, since the last byte stays zero.
    unsafe {
        let area = start as *mut u8;
        std::ptr::copy_nonoverlapping(title.as_ptr(), area, n);
        std::ptr::write_bytes(area.add(n), 0, room - n);
    }
}

/// Where this process's command line lies.
fn arguments() -> Option<(usize, usize)> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the name, in parentheses, which may hold anything; `state` is the third.
    let mut fields = stat.get(stat.rfind(')')? + 2..)?.split_ascii_whitespace();
    let start = fields.nth(48 - 3)?.parse().ok()?;
    let end = fields.next()?.parse().ok()?;
    (start != 0).then_some((start, end))
}
