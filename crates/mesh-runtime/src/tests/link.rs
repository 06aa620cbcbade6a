//! One socket: order, back-pressure, and its end.

use crate::link::{Link, ReadEnd, Rest, socket_number};
use crate::link_page::{End, LinkPage};
use crate::reactor::Reactor;
use mesh_proto::messages::Extend;
use mesh_proto::{EndReason, Frame, ProcAddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

fn sockets() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None).unwrap()
}

fn links() -> (Reactor, Link, Link) {
    let reactor = Reactor::new().unwrap();
    let (ours, theirs) = sockets();
    let (a, b) = (Link::new(1, ProcAddr::CONTROLLER, ours), Link::new(2, ProcAddr::CONTROLLER, theirs));
    a.register(&reactor).unwrap();
    b.register(&reactor).unwrap();
    (reactor, a, b)
}

fn frame(call: u64, len: usize) -> Frame {
    let me = ProcAddr::CONTROLLER;
    let header = Extend { call, place: 0 }.header(me, me);
    Frame::build_plain(header, None, b"f", &vec![(call % 251) as u8; len])
}

/// Flushes one end and reads the other until nothing waits.
fn pump(reactor: &Reactor, from: &Link, to: &Link, seen: &mut Vec<(u64, usize)>) {
    loop {
        from.flush(reactor);
        let end = to.read(|frame| {
            let body = frame.parts().unwrap().remove(0);
            let mesh_proto::Part::Inline(bytes) = body else { panic!("an inline part was sent") };
            let call = Extend::read(&frame.header).unwrap().call;
            assert!(bytes.iter().all(|byte| u64::from(*byte) == call % 251), "torn");
            seen.push((call, bytes.len()));
        });
        assert!(matches!(end, ReadEnd::Drained));
        if from.queued() == 0 {
            return;
        }
    }
}

#[test]
fn what_the_socket_does_not_take_waits_in_order() {
    let (reactor, a, b) = links();
    // Small frames, frames that go into chunks, frames written in place, and one of many MiB.
    let lens = [0, 10, 3000, 5000, 70_000, 1, 9_000_000, 2, 4096, 4095, 200_000, 0];
    let mut sent = Vec::new();
    let mut most = 0;
    for round in 0..20 {
        for (i, len) in lens.iter().enumerate().filter(|(_, len)| round == 0 || **len < 1_000_000) {
            let call = (round * 100 + i) as u64;
            most = most.max(a.send(&reactor, &frame(call, *len)).unwrap());
            sent.push((call, *len));
        }
    }
    assert!(most > 9_000_000, "the socket cannot hold that much");
    assert_eq!(a.queued(), most);
    let mut seen = Vec::new();
    pump(&reactor, &a, &b, &mut seen);
    // Read what the socket still holds.
    pump(&reactor, &a, &b, &mut seen);
    assert_eq!(seen, sent);
}

#[test]
fn senders_wait_for_room_and_are_let_in() {
    let (reactor, a, b) = links();
    while a.send(&reactor, &frame(1, 100_000)).unwrap() < 4_000_000 {}
    assert!(!a.wait_room(1_000_000, Duration::ZERO));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| a.wait_room(1_000_000, super::SOON));
        pump(&reactor, &a, &b, &mut Vec::new());
        assert!(waiting.join().unwrap());
    });
    assert_eq!(a.queued(), 0);
}

#[test]
fn a_closed_peer_ends_the_link_for_all_who_wait() {
    let (reactor, a, b) = links();
    while a.send(&reactor, &frame(1, 100_000)).unwrap() < 1_000_000 {}
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| a.wait_room(0, super::SOON));
        b.close(&reactor);
        drop(b);
        a.flush(&reactor);
        assert!(waiting.join().unwrap(), "whoever waits is let go");
    });
    assert_eq!(a.send(&reactor, &frame(2, 1)), None);
    assert_eq!(a.queued(), 0, "nothing is kept for nobody");
    assert!(matches!(a.read(|_| {}), ReadEnd::Closed(_)));
    a.close(&reactor);
    a.close(&reactor);
    assert_eq!(a.send(&reactor, &frame(2, 1)), None);
}

#[test]
fn a_write_that_fails_is_seen_at_both_ends() {
    let (reactor, a, b) = links();
    b.send(&reactor, &frame(3, 10)).unwrap();
    b.close(&reactor);
    assert_eq!(a.send(&reactor, &frame(1, 10)), None);
    // What came before the end is still read.
    let mut last_words = 0;
    let end = loop {
        match a.read(|_| last_words += 1) {
            ReadEnd::Drained | ReadEnd::HasPage => {}
            ReadEnd::Closed(why) => break why,
        }
    };
    assert_eq!((last_words, end.to_string().as_str()), (1, "its connection closed"));
}

#[test]
fn an_end_within_a_message_and_broken_bytes_are_told_apart() {
    let (reactor, a, _b) = links();
    let (ours, theirs) = sockets();
    let whole = frame(1, 100);
    let mut bytes = whole.header.encode().to_vec();
    bytes.extend_from_slice(&whole.body);
    rustix::io::write(&theirs, &bytes[..100]).unwrap();
    drop(theirs);
    let torn = Link::new(3, ProcAddr::CONTROLLER, ours);
    let why = loop {
        match torn.read(|_| panic!("no whole frame came")) {
            ReadEnd::Drained | ReadEnd::HasPage => {}
            ReadEnd::Closed(why) => break why,
        }
    };
    assert!(matches!(why, EndReason::ConnectionClosed(1..)), "{why}");
    let (ours, theirs) = sockets();
    rustix::io::write(&theirs, &[0xff; 200]).unwrap();
    let ReadEnd::Closed(why) = Link::new(4, ProcAddr::CONTROLLER, ours).read(|_| {}) else { panic!("accepted") };
    assert!(matches!(why, EndReason::Protocol(_)), "{why}");
    a.close(&reactor);
}

#[test]
fn drain_writes_out_what_waits_or_gives_up_in_time() {
    let (reactor, a, b) = links();
    while a.send(&reactor, &frame(1, 100_000)).unwrap() < 3_000_000 {}
    // Nobody reads, so the limit applies.
    a.drain(&reactor, Duration::from_millis(20));
    assert!(a.queued() > 0);
    std::thread::scope(|scope| {
        let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let told = Arc::clone(&done);
        let b = &b;
        scope.spawn(move || {
            while !told.load(std::sync::atomic::Ordering::SeqCst) {
                let _ = b.read(|_| {});
                std::thread::yield_now();
            }
        });
        a.drain(&reactor, super::SOON);
        done.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    assert_eq!(a.queued(), 0);
}

#[test]
fn while_a_link_is_held_everything_is_queued_in_order() {
    let (reactor, a, b) = links();
    let (reactor, a) = (Arc::new(reactor), Arc::new(a));
    let read = |seen: &mut Vec<u64>| {
        b.read(|frame| seen.push(Extend::read(&frame.header).unwrap().call));
        seen.clone()
    };
    let mut seen = Vec::new();
    let (first, second) = (a.hold(&reactor), a.hold(&reactor));
    a.send(&reactor, &frame(1, 10)).unwrap();
    a.send(&reactor, &frame(2, 10_000)).unwrap();
    a.flush(&reactor);
    assert!(read(&mut seen).is_empty() && a.queued() > 10_000);
    drop(first);
    a.send(&reactor, &frame(3, 10)).unwrap();
    assert!(read(&mut seen).is_empty());
    drop(second);
    assert_eq!(a.queued(), 0);
    a.send(&reactor, &frame(4, 10)).unwrap();
    assert_eq!(read(&mut seen), [1, 2, 3, 4]);
    // If the socket is full, the rest goes once there is room, as usual.
    let held = a.hold(&reactor);
    a.send(&reactor, &frame(5, 4_000_000)).unwrap();
    drop(held);
    assert!(a.queued() > 0);
    drop(a.hold(&reactor));
    let mut rest = Vec::new();
    pump(&reactor, &a, &b, &mut rest);
    assert_eq!(rest, [(5, 4_000_000)]);
}

#[test]
fn descriptors_go_in_their_place_among_the_frames() {
    let reactor = Reactor::new().unwrap();
    let (ours, theirs) = sockets();
    let (a, b) = (Link::new(1, ProcAddr::CONTROLLER, ours), Link::with_descriptors(2, ProcAddr::CONTROLLER, theirs));
    a.register(&reactor).unwrap();
    let number = |socket: &OwnedFd| socket_number(socket.as_fd()).unwrap();
    let mut seen: Vec<u64> = Vec::new();
    for long in [10, 4_000_000] {
        let (first, second) = sockets();
        let (third, fourth) = sockets();
        let numbers = [&first, &second, &third, &fourth].map(number);
        assert!(b.take_with(numbers[0]).is_none());
        a.send(&reactor, &frame(seen.len() as u64, long)).unwrap();
        a.send_with(&reactor, &frame(seen.len() as u64 + 1, 10), vec![first]);
        a.send_with(&reactor, &frame(seen.len() as u64 + 2, 10), vec![second, third, fourth]);
        a.send(&reactor, &frame(seen.len() as u64 + 3, 10)).unwrap();
        let start = seen.len();
        while seen.len() < start + 4 {
            a.flush(&reactor);
            // A read takes all that is there, though the system lets it end at a socket.
            b.read(|frame| seen.push(Extend::read(&frame.header).unwrap().call));
            assert!(a.queued() > 0 || seen.len() == start + 4);
        }
        let came = [b.take_with(numbers[0]).unwrap(), b.take_with(numbers[1]).unwrap()];
        assert_eq!(came.iter().flatten().map(number).collect::<Vec<_>>(), numbers);
        assert!(b.take_with(numbers[0]).is_none());
    }
    assert_eq!(seen, (0..8).collect::<Vec<_>>());
}
/// Reads what has come: the calls of the frames, in order.
fn read_calls(link: &Link) -> Vec<u64> {
    let mut calls = Vec::new();
    let end = link.read(|frame| calls.push(Extend::read(&frame.header).unwrap().call));
    assert!(matches!(end, ReadEnd::Drained));
    calls
}

/// What rests in a link; each frame comes a microsecond after the one before.
struct Rush<'a> {
    link: &'a Link,
    time: u64,
    call: u64,
}

impl Rush<'_> {
    fn rest(&mut self, len: usize) -> Rest {
        self.time += 1_000;
        let rest = self.link.rest(&frame(self.call + 1, len), self.time);
        self.call += u64::from(rest != Rest::Refused);
        rest
    }
}

#[test]
fn what_rests_is_written_together_and_in_order() {
    let (reactor, a, b) = links();
    a.send(&reactor, &frame(1, 9)).unwrap();
    let mut rush = Rush { link: &a, time: 1_000_000, call: 1 };
    assert_eq!(rush.rest(10), Rest::Begun { first: true });
    assert_eq!(rush.rest(10), Rest::Begun { first: false });
    assert_eq!((read_calls(&b), a.queued()), (vec![1], 0), "what rests does not wait for room");
    a.write_bundle(&reactor, true);
    assert_eq!(read_calls(&b), [2, 3]);
    assert_eq!(rush.rest(10), Rest::Begun { first: true });
    // Any other message takes along what rests.
    a.send(&reactor, &frame(5, 9)).unwrap();
    assert_eq!(read_calls(&b), [4, 5]);
    a.write_bundle(&reactor, false);
    assert_eq!(read_calls(&b), []);
}

#[test]
fn what_rests_is_due_once_it_is_much_or_old_and_a_long_message_never_rests() {
    let (reactor, a, b) = links();
    let mut rush = Rush { link: &a, time: 1_000_000, call: 0 };
    while rush.rest(1) != Rest::Due {}
    // Much: a frame takes about 100 bytes.
    assert!((100..200).contains(&rush.call), "after {} frames", rush.call);
    a.write_bundle(&reactor, true);
    assert_eq!(rush.rest(1), Rest::Begun { first: true });
    rush.time += 1_000_000;
    assert_eq!(rush.rest(1), Rest::Due, "after a millisecond");
    assert_eq!(rush.rest(100_000), Rest::Refused);
    a.write_bundle(&reactor, true);
    let mut seen = Vec::new();
    pump(&reactor, &a, &b, &mut seen);
    pump(&reactor, &a, &b, &mut seen);
    assert_eq!(seen.iter().map(|(call, _)| *call).collect::<Vec<_>>(), (1..=rush.call).collect::<Vec<_>>());
}

#[test]
fn nothing_rests_behind_what_waits_for_room_or_is_held_or_where_others_wait_for_it() {
    let (reactor, a, b) = links();
    let (reactor, a) = (Arc::new(reactor), Arc::new(a));
    let mut rush = Rush { link: &a, time: 1_000_000, call: 0 };
    rush.rest(10);
    let hold = a.hold(&reactor);
    a.write_bundle(&reactor, true);
    assert_eq!(read_calls(&b), [], "a hold holds what rests too");
    assert_eq!(hold.release(), 0);
    assert_eq!(read_calls(&b), [1]);
    let hold = a.hold(&reactor);
    assert_eq!(rush.rest(10), Rest::Refused);
    assert_eq!(hold.release(), 0);
    // The socket is full.
    while rush.rest(3000) != Rest::Refused {
        a.write_bundle(&reactor, true);
    }
    assert!(a.queued() > 0);
    let mut seen = Vec::new();
    pump(&reactor, &a, &b, &mut seen);
    pump(&reactor, &a, &b, &mut seen);
    assert_eq!(seen.last().map(|(call, _)| *call), Some(rush.call));
    // Nothing is kept for an end that is gone.
    b.close(&reactor);
    drop(b);
    while rush.rest(10) != Rest::Refused {
        a.write_bundle(&reactor, true);
    }
    assert_eq!((a.queued(), a.send(&reactor, &frame(1, 1))), (0, None));
    let (_, a, _b) = links();
    a.set_page(LinkPage::open(LinkPage::create().unwrap(), End::First).unwrap());
    assert_eq!(a.rest(&frame(1, 10), 1_000_000), Rest::Refused);
}
