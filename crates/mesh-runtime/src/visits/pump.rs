//! Passing bytes on between two ends, in both directions, until one of them ends.

use crate::timespec::timespec;
use mesh_proto::hosts::{Refusal, Refuse};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The size of a read.
const CHUNK: usize = 32 << 10;
/// How many chunks pass in one direction before the other has its turn.
const TURN: usize = 8;

/// Why nothing passes any more.
#[derive(Clone, Debug)]
pub(super) enum Over {
    /// One end ended in order.
    Left,
    /// One end gave a reason.
    Refused(Refuse),
    /// The connection broke, or brought something unintelligible.
    Broke(String),
}

impl Over {
    pub(super) fn refused(code: Refusal, text: impl Into<String>) -> Self {
        Self::Refused(Refuse { code, text: text.into() })
    }
}

/// One of two ends. No method blocks.
pub(super) trait End {
    fn fd(&self) -> BorrowedFd<'_>;
    /// It is about to be examined: what becomes ready from now on must wake a waiter.
    fn begin(&mut self) {}
    /// What to wait for: `reads` if this end is read from, `writes` if something waits to be written to it.
    fn interest(&self, reads: bool, writes: bool) -> PollFlags;
    /// Reads some bytes; 0 if there are none yet.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over>;
    /// Takes as many bytes as there is room for.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Over>;
    /// Sends what was taken. Returns whether nothing is left of it.
    fn flush(&mut self) -> Result<bool, Over>;
}

/// The limits of a visit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rules {
    /// How long something may wait to be taken.
    pub(super) stall: Option<Duration>,
    /// How long nothing at all may pass.
    pub(super) idle: Option<Duration>,
    /// How often to call `check`.
    pub(super) tick: Option<Duration>,
}

/// One direction.
struct Way {
    buffer: Vec<u8>,
    from: usize,
    to: usize,
}

impl Way {
    fn new() -> Self {
        Self { buffer: vec![0; CHUNK], from: 0, to: 0 }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Passes on what there is. Returns whether that was anything.
    fn pass(&mut self, source: &mut dyn End, sink: &mut dyn End) -> Result<bool, Over> {
        let mut moved = false;
        for _ in 0..TURN {
            if self.is_empty() {
                (self.from, self.to) = (0, source.read(&mut self.buffer)?);
                if self.is_empty() {
                    break;
                }
            }
            let taken = sink.write(&self.buffer[self.from..self.to])?;
            if taken == 0 {
                break;
            }
            self.from += taken;
            moved = true;
        }
        Ok(moved)
    }
}

/// Passes bytes on until one end has ended, or `check` or the rules end it.
pub(super) fn pump(
    one: &mut dyn End,
    other: &mut dyn End,
    rules: Rules,
    mut check: impl FnMut() -> Result<(), Over>,
) -> Over {
    let (mut there, mut back) = (Way::new(), Way::new());
    let (mut last, mut checked) = (Instant::now(), Instant::now());
    loop {
        // Even if something passes all the time.
        if rules.tick.is_some_and(|tick| checked.elapsed() >= tick) {
            checked = Instant::now();
            if let Err(over) = check() {
                return over;
            }
        }
        one.begin();
        other.begin();
        match turn(one, other, &mut there, &mut back) {
            Ok(true) => {
                last = Instant::now();
                continue;
            }
            Ok(false) => {}
            Err(over) => {
                // An end that takes no more may have said why, and that has arrived.
                deliver(other, one, &mut back);
                return over;
            }
        }
        let flushed = match (one.flush(), other.flush()) {
            (Ok(one), Ok(other)) => one && other,
            (Err(over), _) | (_, Err(over)) => {
                deliver(other, one, &mut back);
                return over;
            }
        };
        let waits = !flushed || !there.is_empty() || !back.is_empty();
        let silent = last.elapsed();
        if waits && rules.stall.is_some_and(|most| silent >= most) {
            let limit = rules.stall.unwrap_or_default().as_secs_f64();
            return Over::refused(Refusal::Other, format!("nothing was read for {limit} s of what waited to be"));
        }
        if rules.idle.is_some_and(|most| silent >= most) {
            let limit = rules.idle.unwrap_or_default().as_secs_f64();
            return Over::refused(Refusal::Other, format!("nothing was said for {limit} s"));
        }
        let left = |limit: Option<Duration>| limit.map(|limit| limit.saturating_sub(silent));
        let stall = left(rules.stall).filter(|_| waits);
        let timeout = [stall, left(rules.idle), rules.tick].into_iter().flatten().min();
        if let Err(over) = wait(one, other, (there.is_empty(), !back.is_empty()), timeout) {
            return over;
        }
    }
}

fn turn(one: &mut dyn End, other: &mut dyn End, there: &mut Way, back: &mut Way) -> Result<bool, Over> {
    let moved = there.pass(one, other)?;
    Ok(back.pass(other, one)? || moved)
}

/// Passes on what has arrived at an end that is over, as far as there is room.
fn deliver(source: &mut dyn End, sink: &mut dyn End, way: &mut Way) {
    for _ in 0..TURN {
        if !matches!(way.pass(source, sink), Ok(true)) {
            break;
        }
    }
}

/// Waits until either end can continue: `there_free` if bytes can go there, `back_waits` if some wait to come back.
fn wait(
    one: &dyn End,
    other: &dyn End,
    (there_free, back_waits): (bool, bool),
    timeout: Option<Duration>,
) -> Result<(), Over> {
    let flags = [one.interest(there_free, back_waits), other.interest(!back_waits, !there_free)];
    // A descriptor that has ended is always ready, even if nothing is asked of it.
    let mut fds: Vec<PollFd<'_>> = [one, other]
        .into_iter()
        .zip(flags)
        .filter(|(_, flags)| !flags.is_empty())
        .map(|(end, flags)| PollFd::from_borrowed_fd(end.fd(), flags))
        .collect();
    match poll(&mut fds, timeout.map(timespec).as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Over::Broke(errno.to_string())),
    }
}

/// Sends what an end has taken, within a limit. Returns whether all is gone.
pub(super) fn drain(end: &mut dyn End, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    loop {
        match end.flush() {
            Ok(true) => return true,
            Ok(false) => {}
            Err(_) => return false,
        }
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::from_borrowed_fd(end.fd(), PollFlags::OUT)];
        if left.is_zero() || poll(&mut fds, Some(&timespec(left))).is_err_and(|errno| errno != Errno::INTR) {
            return false;
        }
    }
}
