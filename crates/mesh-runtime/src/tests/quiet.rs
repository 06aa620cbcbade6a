//! What polls of the links say about the pipes (LOG-9).

use super::dice::Dice;
use super::pair::{Host, MESH, out};
use super::{SOON, options, soon};
use crate::logs::{LogPeers, Logs};
use crate::reactor::{Handler, Reactor, TOKEN_PIPES};
use crate::{Waited, Which};
use mesh_proto::control::Lines;
use mesh_proto::messages::Request;
use mesh_proto::{HostNo, ProcAddr, Target};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

const LINK: u64 = 7;

/// Reads one link, on which each message is how many lines its sender had written before.
#[derive(Debug)]
struct Process {
    reactor: Arc<Reactor>,
    logs: Arc<Logs>,
    link: UnixStream,
    sender: Target,
    /// Lines that have been shown.
    shown: AtomicU64,
    quiet: AtomicU64,
    loud: AtomicU64,
    /// A quiet message has come since this was last cleared.
    is_quiet: AtomicBool,
    broken: AtomicBool,
}

#[derive(Debug)]
struct Peers(Arc<Reactor>);

impl LogPeers for Peers {
    fn hosts(&self) -> Vec<HostNo> {
        Vec::new()
    }
    fn send(&self, _: HostNo, _: &Lines) {}
    fn cast(&self, _: &Lines) {}
    fn watch_pipes(&self, pipes: BorrowedFd<'_>, first: bool) {
        self.0.watch_once(pipes, TOKEN_PIPES, first);
    }
}

impl Handler for Process {
    fn on_ready(&self, token: u64, _: bool, _: bool) {
        if token == TOKEN_PIPES {
            return self.logs.pipe_watch().written();
        }
        let mut quiet = self.logs.pipe_watch().is_quiet();
        let mut message = [0; 8];
        while (&self.link).read_exact(&mut message).is_ok() {
            let written = u64::from_ne_bytes(message);
            if std::mem::take(&mut quiet) {
                self.quiet.fetch_add(1, Ordering::SeqCst);
                if !self.logs.is_on_its_way(&self.sender) && self.shown.load(Ordering::SeqCst) < written {
                    self.broken.store(true, Ordering::SeqCst);
                }
                self.is_quiet.store(true, Ordering::SeqCst);
            } else {
                self.loud.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn on_poll(&self) {
        self.logs.pipe_watch().poll();
    }

    fn on_turn(&self) -> Option<Instant> {
        None
    }
}

#[test]
fn what_a_quiet_message_follows_has_been_read() {
    let reactor = Arc::new(Reactor::new().unwrap());
    let peers = Arc::new(Peers(Arc::clone(&reactor)));
    let weak: Weak<dyn LogPeers> = Arc::<Peers>::downgrade(&peers);
    let logs = Logs::start(Instant::now(), weak, false).unwrap();
    logs.watch();
    let addr = ProcAddr { mesh: 1, rank: 0, host: 0 };
    let (printed, _err) = logs.open(addr).unwrap();
    let mut printed = File::from(printed);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    reactor.add(ours.as_fd(), LINK).unwrap();
    let (zero, no) = (|| AtomicU64::new(0), || AtomicBool::new(false));
    let process = Arc::new(Process {
        reactor,
        logs,
        link: ours,
        sender: Target::One(addr),
        shown: zero(),
        quiet: zero(),
        loud: zero(),
        is_quiet: no(),
        broken: no(),
    });
    let shower = std::thread::spawn({
        let process = Arc::clone(&process);
        move || {
            while let Some(chunks) = process.logs.next() {
                let lines = chunks.iter().flat_map(|chunk| &chunk.text).filter(|byte| **byte == b'\n').count();
                process.shown.fetch_add(lines as u64, Ordering::SeqCst);
            }
        }
    });
    let reader = std::thread::spawn({
        let process = Arc::clone(&process);
        move || process.reactor.run_io(&*process)
    });
    let mut dice = Dice(9);
    let mut written = 0_u64;
    let end = Instant::now() + SOON;
    for _ in 0..60 {
        for _ in 0..dice.roll(4_u64) {
            printed.write_all(b"line\n").unwrap();
            written += 1;
            theirs.write_all(&written.to_ne_bytes()).unwrap();
        }
        process.is_quiet.store(false, Ordering::SeqCst);
        while !process.is_quiet.load(Ordering::SeqCst) {
            assert!(Instant::now() < end, "no message is quiet");
            theirs.write_all(&written.to_ne_bytes()).unwrap();
            std::thread::yield_now();
        }
    }
    drop(theirs);
    process.reactor.close();
    reader.join().unwrap();
    process.logs.close();
    shower.join().unwrap();
    assert!(!process.broken.load(Ordering::SeqCst), "LOG-9: a line came later than a quiet message that followed it");
    assert!(process.loud.load(Ordering::SeqCst) > 0);
    assert_eq!(process.shown.load(Ordering::SeqCst), written);
}

#[test]
fn results_of_those_who_print_nothing_need_no_look() {
    let host = Host::new(1, options());
    let logs = host.controller.logs().unwrap();
    logs.watch();
    let addr = ProcAddr { mesh: MESH, rank: 0, host: 0 };
    let (printed, _err) = logs.open(addr).unwrap();
    let mut printed = File::from(printed);
    let target = Target::One(addr);
    // Whether a result is behind, and how many looks it took to find out.
    let result = || {
        let (call, _) = host.controller.call(&out(Request::CALL, &target, b"hello", &[]), false).unwrap();
        assert_eq!(host.controller.wait_call(&call, None, soon(), false, false), Waited::Ready, "no answer");
        let before = host.controller.calls.looks().begun();
        let behind = host.controller.is_behind(&call, &target, Which::All);
        (behind, host.controller.calls.looks().begun() - before)
    };
    // Shows a line each time it is told to, and takes the next.
    let (go, told) = std::sync::mpsc::channel::<()>();
    let shower = std::thread::spawn({
        let logs = Arc::clone(&logs);
        move || while logs.next().is_some() && told.recv().is_ok() {}
    });
    let end = Instant::now() + SOON;
    for _ in 0..5 {
        while result() != (false, 0) {
            assert!(Instant::now() < end, "a look each time");
        }
        printed.write_all(b"line\n").unwrap();
        assert!(result().0, "a line is not shown yet");
        go.send(()).unwrap();
        while result().0 {
            assert!(Instant::now() < end, "LOG-9: lines that were shown hold results up");
        }
    }
    drop(go);
    logs.close();
    shower.join().unwrap();
    host.close();
}
