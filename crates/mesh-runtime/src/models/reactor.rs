use super::model;
use crate::reactor::{Handler, Reactor};
use crate::spin_board::SpinBoard;
use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering};
use crate::wait::Waiter;
use loom::thread::{JoinHandle, spawn};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process whose links bring each of its threads one message: a link's token is the number of its thread.
struct Process {
    reactor: Reactor,
    board: Arc<SpinBoard>,
    arrived: [AtomicBool; 2],
    waiters: Mutex<[Option<Arc<Waiter>>; 2]>,
    /// What waits for a turn of the I/O thread, and what has had one.
    work: AtomicUsize,
    worked: AtomicUsize,
}

impl Handler for Process {
    fn on_ready(&self, token: u64, _: bool, _: bool) {
        self.reactor.sets().read(token);
        let number = usize::try_from(token).unwrap();
        self.arrived[number].store(true, Ordering::SeqCst);
        let waiter = self.waiters.lock().unwrap()[number].take();
        if let Some(waiter) = waiter {
            waiter.notify(&self.reactor);
        }
    }

    fn on_turn(&self) -> Option<Instant> {
        let work = self.work.swap(0, Ordering::SeqCst);
        self.worked.fetch_add(work, Ordering::SeqCst);
        None
    }
}

impl Process {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            reactor: Reactor::new().unwrap(),
            board: Arc::new(SpinBoard::create().unwrap()),
            arrived: Default::default(),
            waiters: Mutex::new([None, None]),
            work: AtomicUsize::new(0),
            worked: AtomicUsize::new(0),
        })
    }

    /// What a thread does that waits for its message.
    fn wait(&self, number: usize) {
        self.waiters.lock().unwrap()[number] = Some(Waiter::current());
        let ready = || self.arrived[number].load(Ordering::SeqCst);
        assert!(self.reactor.wait(self, &self.board, Duration::ZERO, None, false, &ready));
    }
}

fn run<T: 'static>(process: &Arc<Process>, job: impl FnOnce(&Process) -> T + 'static) -> JoinHandle<T> {
    let process = Arc::clone(process);
    spawn(move || job(&process))
}

/// With nobody waking it but who reads, each gets its message; whoever leads first (LDR-1, LDR-2).
#[test]
fn loom_two_threads_that_wait_are_both_woken() {
    model(2, || {
        let process = Process::new();
        let io = run(&process, |process| process.reactor.run_io(process));
        let other = run(&process, |process| process.wait(1));
        process.reactor.sets().arrive(1);
        process.reactor.sets().arrive(0);
        process.wait(0);
        other.join().unwrap();
        process.reactor.close();
        io.join().unwrap();
    });
}

/// The same where another thread of the process brings it about, and not a link (LDR-2).
#[test]
fn loom_a_leader_is_woken_by_another_thread() {
    model(3, || {
        let process = Process::new();
        let other = run(&process, |process| process.on_ready(0, true, false));
        process.wait(0);
        other.join().unwrap();
    });
}

/// What comes while nobody waits is read by the I/O thread, also just after a leader has left (LDR-1).
#[test]
fn loom_what_comes_when_a_leader_leaves_is_read() {
    model(2, || {
        let process = Process::new();
        let io = run(&process, |process| process.reactor.run_io(process));
        let link = run(&process, |process| {
            process.reactor.sets().arrive(0);
            process.reactor.sets().arrive(1);
        });
        process.wait(0);
        link.join().unwrap();
        while !process.arrived[1].load(Ordering::SeqCst) {
            loom::thread::yield_now();
        }
        process.reactor.close();
        io.join().unwrap();
    });
}

#[test]
fn loom_the_io_thread_hears_every_ring() {
    model(3, || {
        let process = Process::new();
        let io = run(&process, |process| process.reactor.run_io(process));
        let give = |process: &Process| {
            process.work.fetch_add(1, Ordering::SeqCst);
            process.reactor.ring_io();
        };
        let other = run(&process, give);
        give(&process);
        other.join().unwrap();
        while process.worked.load(Ordering::SeqCst) < 2 {
            loom::thread::yield_now();
        }
        process.reactor.close();
        io.join().unwrap();
    });
}
