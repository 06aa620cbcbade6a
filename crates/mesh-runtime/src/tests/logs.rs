//! The thread that reads what procs print, with pipes that the tests write to.

use crate::completion::Completion;
use crate::logs::{Logs, Look, Looks};
use crate::standing::Standing;
use mesh_proto::hosts::HostSet;
use mesh_proto::logs::{LogOptions, Stream};
use mesh_proto::{ProcAddr, Target};
use rustix::fs::{OFlags, fcntl_setfl};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

fn started() -> Arc<Logs> {
    let logs = Logs::start(Instant::now(), Weak::<crate::Runtime>::new(), false).unwrap();
    logs.watch();
    logs
}

fn open(logs: &Logs, mesh: u64) -> (ProcAddr, File, File) {
    let addr = ProcAddr { mesh, rank: 0, host: 0 };
    let (out, err) = logs.open(addr).unwrap();
    (addr, out.into(), err.into())
}

/// Takes everything until the end, on a separate thread.
fn show(logs: &Arc<Logs>) -> std::thread::JoinHandle<Vec<u8>> {
    let logs = Arc::clone(logs);
    std::thread::spawn(move || {
        let mut shown = Vec::new();
        while let Some(chunks) = logs.next() {
            shown.extend(chunks.into_iter().flat_map(|chunk| chunk.text));
        }
        shown
    })
}

#[test]
fn a_flush_waits_until_what_was_written_is_shown() {
    let logs = started();
    let (_, mut out, mut err) = open(&logs, 1);
    out.write_all(b"one\nbegun").unwrap();
    // Nobody shows anything yet.
    assert!(!logs.flush(Duration::from_millis(20)));
    let first: Vec<u8> = logs.next().unwrap().into_iter().flat_map(|chunk| chunk.text).collect();
    assert_eq!(first, b"[procs rank=0] one\n[procs rank=0] begun\n");
    let shower = show(&logs);
    err.write_all(b"two\n").unwrap();
    assert!(logs.flush(LONG));
    logs.close();
    assert_eq!(shower.join().unwrap(), b"[procs rank=0] two\n");
    assert!(logs.flush(Duration::ZERO), "after the end there is nothing to wait for");
    assert!(err.write_all(b"three\n").is_err(), "nobody reads any more");
}

/// LOG-8: the wait for what `addr` has written, once there is somebody to show it.
fn catch_up(logs: &Logs, addr: ProcAddr, limit: Duration) -> Option<Arc<Completion>> {
    let done = Arc::new(Completion::of(Weak::new(), Arc::new(Standing::new())));
    logs.catch_up(Target::One(addr), &HostSet::default(), limit, &done).then_some(done)
}

#[test]
fn results_wait_for_lines_that_somebody_is_about_to_show() {
    let logs = Logs::start(Instant::now(), Weak::<crate::Runtime>::new(), false).unwrap();
    let (addr, mut out, _err) = open(&logs, 1);
    assert!(catch_up(&logs, addr, LONG).is_none(), "nobody will");
    logs.watch();
    out.write_all(b"early\n").unwrap();
    let first = catch_up(&logs, addr, LONG).unwrap();
    assert!(logs.next().is_some() && !first.is_done());
    logs.close();
    assert!(logs.next().is_none() && first.is_done());
}

fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(it) = ready() {
            return it;
        }
        assert!(Instant::now() < end, "not in time");
        std::thread::yield_now();
    }
}

#[test]
fn results_wait_until_the_lines_of_their_process_are_shown() {
    let logs = started();
    let ((quiet, _silent, _still), (loud, mut out, _err)) = (open(&logs, 1), open(&logs, 2));
    let is_behind = |addr| logs.look(&Target::One(addr)) == Look::OfThese;
    let is_done = |done: &Completion| done.is_done().then_some(());
    out.write_all(b"one\nbegun").unwrap();
    assert!(is_behind(loud));
    // Shows one answer each time it is told to.
    let (go, told) = std::sync::mpsc::channel::<()>();
    let shower = std::thread::spawn({
        let logs = Arc::clone(&logs);
        move || {
            let mut shown = Vec::new();
            while told.recv().is_ok() {
                shown.extend(logs.next().into_iter().flatten().flat_map(|chunk| chunk.text));
            }
            shown
        }
    });
    go.send(()).unwrap();
    let first = until(|| catch_up(&logs, loud, LONG));
    assert!(!first.is_done() && is_behind(loud), "it is shown when the next is asked for");
    assert!(!is_behind(quiet), "another has written");
    go.send(()).unwrap();
    until(|| is_done(&first));
    // A line that has not ended yet is none.
    until(|| (!is_behind(loud)).then_some(()));
    out.write_all(b" and ended\n").unwrap();
    let late = until(|| catch_up(&logs, loud, Duration::from_millis(5)));
    until(|| is_done(&late));
    assert!(is_behind(loud));
    assert!(catch_up(&logs, loud, LONG).is_none(), "nobody waits again where nothing was shown since");
    go.send(()).unwrap();
    until(|| (!is_behind(loud)).then_some(()));
    out.write_all(b"last\n").unwrap();
    let last = until(|| catch_up(&logs, loud, LONG));
    logs.close();
    until(|| is_done(&last));
    until(|| catch_up(&logs, loud, LONG).as_deref().and_then(is_done));
    go.send(()).unwrap();
    drop(go);
    let shown = String::from_utf8(shower.join().unwrap()).unwrap();
    assert_eq!(shown, "[procs rank=0] one\n[procs rank=0] begun and ended\n[procs rank=0] last\n");
}

#[test]
fn a_look_that_finds_nothing_serves_what_was_there_before_it() {
    let (looks, early) = (Looks::default(), 0);
    assert_eq!(looks.begun(), early);
    assert!(!looks.have_served(early), "nobody has looked");
    assert!(looks.take(|| Look::OfThese));
    assert!(!looks.take(|| Look::OfOthers));
    assert!(!looks.have_served(early), "others may be among those");
    let mut during = 0;
    assert!(!looks.take(|| {
        during = looks.begun();
        Look::Nothing
    }));
    assert!(looks.have_served(early));
    assert!(!looks.have_served(during), "what it wrote may have come after the look");
    assert!(!looks.have_served(u64::MAX), "it is not complete");
}

#[test]
fn the_last_words_are_read_before_the_end_is_told() {
    let logs = started();
    let (addr, out, mut err) = open(&logs, 1);
    // LOG-5: even while a child of it still holds the other pipe open.
    err.write_all(b"first\nlast\nwithout an end").unwrap();
    drop(err);
    assert_eq!(logs.ended(addr), ["first", "last", "without an end"]);
    assert_eq!(logs.ended(addr), [""; 0]);
    let shower = show(&logs);
    drop(out);
    logs.close();
    let shown = String::from_utf8(shower.join().unwrap()).unwrap();
    assert_eq!(shown.lines().last(), Some("[procs rank=0] without an end"));
}

#[test]
fn those_who_print_wait_when_nobody_looks_and_nothing_is_lost() {
    let logs = started();
    let (_, mut out, _err) = open(&logs, 1);
    let line = [b'x'; 999];
    let lines = 20_000;
    let writer = std::thread::spawn(move || {
        for _ in 0..lines {
            out.write_all(&line).unwrap();
            out.write_all(b"\n").unwrap();
        }
    });
    // LOG-4: first the queue fills, then the pipe.
    while logs.flush(Duration::from_millis(50)) {}
    assert!(!writer.is_finished());
    // Deaths and options are handled meanwhile.
    let (other, _, mut err) = open(&logs, 2);
    err.write_all(b"bye\n").unwrap();
    assert_eq!(logs.ended(other), ["bye"]);
    logs.set(2, LogOptions { shown: false, alike: false, window: Duration::ZERO, level: 0 });
    let shower = show(&logs);
    writer.join().unwrap();
    assert!(logs.flush(LONG));
    logs.close();
    let shown = shower.join().unwrap();
    assert_eq!(shown.iter().filter(|byte| **byte == b'\n').count(), lines + 1);
}

#[test]
fn without_anybody_to_show_them_lines_are_dropped() {
    let logs = Logs::start(Instant::now(), Weak::<crate::Runtime>::new(), false).unwrap();
    let (addr, mut out, mut err) = open(&logs, 1);
    for _ in 0..100_000 {
        out.write_all(b"a line that nobody sees, and that fills no queue\n").unwrap();
    }
    err.write_all(b"kept\n").unwrap();
    assert_eq!(logs.ended(addr), ["kept"]);
    assert!(logs.flush(LONG));
    logs.close();
    assert!(logs.next().is_none());
}

#[test]
fn streams_keep_apart() {
    let logs = started();
    let (_, mut out, mut err) = open(&logs, 1);
    out.write_all(b"a\n").unwrap();
    err.write_all(b"b\n").unwrap();
    logs.close();
    let mut shown: Vec<(Stream, Vec<u8>)> =
        logs.next().unwrap().into_iter().map(|chunk| (chunk.stream, chunk.text)).collect();
    shown.sort_by_key(|(stream, _)| *stream as u8);
    let expected = [(Stream::Out, b"[procs rank=0] a\n".to_vec()), (Stream::Err, b"[procs rank=0] b\n".to_vec())];
    assert_eq!(shown, expected);
    assert!(logs.next().is_none());
}

#[test]
fn a_host_whose_lines_are_not_asked_for_lets_its_printers_wait() {
    // Nobody takes what it sends: its first batch stays under way for ever.
    let logs = Logs::start(Instant::now(), Weak::<crate::Runtime>::new(), true).unwrap();
    let (_, mut out, _err) = open(&logs, 1);
    fcntl_setfl(&out, OFlags::NONBLOCK).unwrap();
    let mut line = [b'x'; 1000];
    line[999] = b'\n';
    let (mut lines, mut before) = (0, usize::MAX);
    for mesh in 2.. {
        while lines < 20_000 && out.write_all(&line).is_ok() {
            lines += 1;
        }
        assert!(lines < 20_000, "LOG-6: neither the queue nor the pipe takes 20 MB");
        if std::mem::replace(&mut before, lines) == lines {
            break;
        }
        // Once this has been read, the reader has had a turn.
        let (other, _, mut err) = open(&logs, mesh);
        err.write_all(b"bye\n").unwrap();
        assert_eq!(logs.ended(other), ["bye"]);
    }
    logs.close();
    assert_eq!(out.write_all(&line).unwrap_err().kind(), ErrorKind::BrokenPipe, "the pipe closes with the runtime");
}
