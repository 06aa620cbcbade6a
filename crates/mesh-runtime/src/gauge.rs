//! What an actor has done and is doing now: figures that can be read even while the actor is stuck.
//!
//! GAU-1: an actor's thread takes the gauge's lock for a few dozen nanoseconds when it begins and when it ends a message,
//! and never while it runs Python. So the reader, which must answer for a stuck process, never waits for it.

use crate::locks::lock;
use bytes::Bytes;
use mesh_proto::messages::Spawn;
use mesh_proto::{Frame, ProcAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// How much the latest message weighs in the mean.
const WEIGHT: f64 = 1.0 / 16.0;

/// A message that is being handled.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    serial: u64,
    /// The frame's name: the endpoint up to the first NUL.
    pub(crate) name: Bytes,
    pub(crate) src: ProcAddr,
    pub(crate) since: Instant,
    /// What [`stood`] was then.
    stood: Duration,
}

/// How long the clocks of this process's actors have stood still; see [`ClockStop`].
#[derive(Debug)]
struct Stops {
    /// How many stops are in force, and since when the first of them.
    count: usize,
    since: Option<Instant>,
    /// Of earlier stops.
    total: Duration,
}

static STOPS: Mutex<Stops> = Mutex::new(Stops { count: 0, since: None, total: Duration::ZERO });
/// Whether a clock was ever stopped. Most processes never stop one, and pay only for this check.
static EVER: AtomicBool = AtomicBool::new(false);

fn stops() -> MutexGuard<'static, Stops> {
    lock(&STOPS)
}

/// How long clocks have stood still in total.
fn stood(now: Instant) -> Duration {
    if !EVER.load(Ordering::Acquire) {
        return Duration::ZERO;
    }
    let stops = stops();
    stops.total + stops.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
}

/// While one exists, the time that this process's actors spend on messages counts as waiting for others. Several may overlap.
#[derive(Debug)]
pub struct ClockStop(());

impl ClockStop {
    /// Stops the clocks.
    #[must_use]
    pub fn begin() -> Self {
        let mut stops = stops();
        stops.count += 1;
        stops.since.get_or_insert_with(Instant::now);
        EVER.store(true, Ordering::Release);
        Self(())
    }
}

impl Drop for ClockStop {
    fn drop(&mut self) {
        let mut stops = stops();
        stops.count -= 1;
        if stops.count == 0
            && let Some(since) = stops.since.take()
        {
            stops.total += since.elapsed();
        }
    }
}

#[derive(Debug, Default)]
struct Work {
    next: u64,
    running: Vec<Running>,
    handled: u64,
    failed: u64,
    mean: f64,
    /// The part of the mean in which clocks stood still.
    waited: f64,
    longest: Duration,
    /// The second (since the actor's birth) that is being counted, its count, and that of the one before.
    second: u64,
    count: u64,
    before: u64,
}

/// The figures at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) running: Vec<Running>,
    pub(crate) handled: u64,
    pub(crate) failed: u64,
    pub(crate) mean: Duration,
    /// The part of the mean in which clocks stood still.
    pub(crate) waited: Duration,
    pub(crate) longest: Duration,
    /// Messages handled in the last second.
    pub(crate) rate: f64,
}

/// One actor's figures, in its inbox.
#[derive(Debug)]
pub struct Gauge {
    work: Mutex<Work>,
    /// The name field of the spawn: the actor's name, and the shape of its mesh.
    pub(crate) title: Box<[u8]>,
    pub(crate) rank: u32,
    pub(crate) owner: ProcAddr,
    pub(crate) born: Instant,
    class: OnceLock<Box<str>>,
    /// The interpreter's number of the actor's own thread; 0 if it runs on the loop.
    thread: AtomicU64,
    up: AtomicBool,
}

impl Gauge {
    /// The gauge of an actor, made from its spawn; without one, of the process itself.
    pub(crate) fn new(spawn: Option<(&Frame, Spawn)>) -> Self {
        let (title, rank, owner) = match spawn {
            // A copy, because the frame's bytes hold the actor's arguments, and would live as long as the actor.
            Some((frame, spawn)) => (frame.name().into(), spawn.place, frame.header.src),
            None => (Box::default(), 0, ProcAddr::CONTROLLER),
        };
        Self {
            work: Mutex::default(),
            title,
            rank,
            owner,
            born: Instant::now(),
            class: OnceLock::new(),
            thread: AtomicU64::new(0),
            up: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }

    /// The handling of a message begins. [`Self::end`] takes the number.
    pub fn begin(&self, name: Bytes, src: ProcAddr) -> u64 {
        let since = Instant::now();
        let stood = stood(since);
        let mut work = self.lock();
        work.next += 1;
        let serial = work.next;
        work.running.push(Running { serial, name, src, since, stood });
        serial
    }

    /// The handling of a message is over. A number that has ended already is ignored.
    pub fn end(&self, serial: u64, failed: bool) {
        let now = Instant::now();
        let stood = stood(now);
        let mut work = self.lock();
        let Some(at) = work.running.iter().position(|one| one.serial == serial) else { return };
        let ended = work.running.swap_remove(at);
        let took = now.saturating_duration_since(ended.since);
        let waited = stood.saturating_sub(ended.stood).min(took);
        work.handled += 1;
        work.failed += u64::from(failed);
        work.longest = work.longest.max(took);
        // The first few count alike: the very first one imports and compiles, and would dominate the mean for long.
        let weight = WEIGHT.max(1.0 / work.handled as f64);
        work.mean += (took.as_nanos() as f64 - work.mean) * weight;
        work.waited += (waited.as_nanos() as f64 - work.waited) * weight;
        work.turn(now.saturating_duration_since(self.born).as_secs());
        work.count += 1;
    }

    pub(crate) fn read(&self) -> Reading {
        let age = self.born.elapsed();
        let mut work = self.lock();
        work.turn(age.as_secs());
        let passed = f64::from(age.subsec_micros()) * 1e-6;
        Reading {
            running: work.running.clone(),
            handled: work.handled,
            failed: work.failed,
            mean: Duration::from_nanos(work.mean as u64),
            waited: Duration::from_nanos(work.waited as u64),
            longest: work.longest,
            rate: work.before as f64 * (1.0 - passed) + work.count as f64,
        }
    }

    /// Says what the actor is, once that is known.
    pub fn describe(&self, class: &str) {
        // A second description is that of the same class.
        let _ = self.class.set(class.into());
    }

    pub(crate) fn class(&self) -> &str {
        self.class.get().map_or("", |class| class)
    }

    /// Says which of the interpreter's threads runs the actor.
    pub fn worked_by(&self, thread: u64) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    pub(crate) fn thread(&self) -> u64 {
        self.thread.load(Ordering::Relaxed)
    }

    /// The constructor has returned.
    pub(crate) fn set_up(&self) {
        self.up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }
}

impl Work {
    fn turn(&mut self, second: u64) {
        if second != self.second {
            self.before = if second == self.second + 1 { self.count } else { 0 };
            self.count = 0;
            self.second = second;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_is_seen_until_it_ends_once() {
        let gauge = Gauge::new(None);
        let first = gauge.begin(Bytes::from_static(b"step"), ProcAddr { mesh: 7, rank: 1, host: 0 });
        let second = gauge.begin(Bytes::from_static(b"serve"), ProcAddr::CONTROLLER);
        let names: Vec<_> = gauge.read().running.iter().map(|one| one.name.clone()).collect();
        assert_eq!(names, [&b"step"[..], b"serve"]);
        gauge.end(first, false);
        gauge.end(first, true);
        let reading = gauge.read();
        assert_eq!((reading.handled, reading.failed, reading.running.len()), (1, 0, 1));
        gauge.end(second, true);
        let reading = gauge.read();
        assert_eq!((reading.handled, reading.failed, reading.running.len()), (2, 1, 0));
        assert!(reading.longest >= reading.mean);
        assert!(reading.rate > 0.0);
    }

    #[test]
    fn time_in_which_the_clock_stands_is_told_apart() {
        let (gauge, pause) = (Gauge::new(None), Duration::from_millis(20));
        let serial = gauge.begin(Bytes::from_static(b"step"), ProcAddr::CONTROLLER);
        std::thread::sleep(pause);
        let (first, second) = (ClockStop::begin(), ClockStop::begin());
        drop(first);
        std::thread::sleep(pause);
        drop(second);
        gauge.end(serial, false);
        let Reading { mean, waited, .. } = gauge.read();
        assert!(waited >= pause && mean >= waited + pause, "{waited:?} of {mean:?}");
        // One that is still in force counts up to now.
        let last = ClockStop::begin();
        let serial = gauge.begin(Bytes::from_static(b"step"), ProcAddr::CONTROLLER);
        std::thread::sleep(10 * pause);
        gauge.end(serial, false);
        // The mean of both messages.
        assert!(gauge.read().waited > waited);
        drop(last);
    }

    #[test]
    fn a_rate_is_that_of_the_last_second() {
        let mut work = Work { count: 10, second: 3, ..Work::default() };
        work.turn(4);
        assert_eq!((work.before, work.count), (10, 0));
        work.turn(6);
        assert_eq!((work.before, work.count), (0, 0));
    }
}
