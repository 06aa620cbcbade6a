//! What passes between two ends, and what ends it.

use super::ends::{LocalEnd, PIECE, PacketEnd};
use super::pump::{End, Over, Rules, pump};
use super::tunnel::{Tunnel, TunnelEnd, WINDOW};
use crate::dispatch::Dispatch;
use crate::tls::{Dialed, Identity, Limits, Listener, ListenerEvent, Role, Store, TlsStream, dial};
use bytes::Bytes;
use mesh_proto::control::Step;
use mesh_proto::hosts::{Farewell, Packet, PacketDecoder, PacketKind, Parting, Refusal, Refuse, Short};
use mesh_proto::{Frame, ProcAddr};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Weak, mpsc};
use std::time::Duration;

/// A process that is gone.
struct Nobody;

impl Dispatch for Nobody {
    fn dispatch(&self, _frame: Frame) -> usize {
        0
    }
}

fn pair() -> (UnixStream, LocalEnd) {
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    (one.into(), LocalEnd::new(other))
}

fn run(mut one: LocalEnd, mut other: LocalEnd, rules: Rules) -> std::thread::JoinHandle<Over> {
    std::thread::spawn(move || pump(&mut one, &mut other, rules, || Ok(())))
}

#[test]
fn all_that_is_said_arrives_both_ways() {
    let ((mut left, a), (mut right, b)) = (pair(), pair());
    let pumped = run(a, b, Rules::default());
    let text: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let echo = std::thread::spawn(move || {
        let mut heard = vec![0; 3_000_000];
        right.read_exact(&mut heard).unwrap();
        right.write_all(&heard).unwrap();
    });
    left.write_all(&text).unwrap();
    let mut back = vec![0; text.len()];
    left.read_exact(&mut back).unwrap();
    assert!(back == text);
    echo.join().unwrap();
    drop(left);
    assert!(matches!(pumped.join().unwrap(), Over::Left));
}

#[test]
fn what_was_said_before_the_end_arrives() {
    let ((mut left, a), (mut right, b)) = (pair(), pair());
    left.write_all(b"the last words").unwrap();
    drop(left);
    assert!(matches!(run(a, b, Rules::default()).join().unwrap(), Over::Left));
    let mut heard = String::new();
    right.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "the last words");
}

#[test]
fn one_that_hears_no_more_may_still_speak() {
    let ((mut left, a), (mut right, b)) = (pair(), pair());
    right.shutdown(std::net::Shutdown::Read).unwrap();
    left.write_all(b"a question that comes too late").unwrap();
    let pumped = run(a, b, Rules::default());
    right.write_all(b"the rest").unwrap();
    let mut heard = [0; 8];
    left.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"the rest");
    drop(right);
    assert!(matches!(pumped.join().unwrap(), Over::Left));
}

/// A connection that takes no more, and on which something arrived before that.
struct Reset {
    fd: UnixStream,
    arrived: Vec<u8>,
}

impl End for Reset {
    fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    fn interest(&self, _reads: bool, _writes: bool) -> PollFlags {
        PollFlags::IN
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over> {
        let n = self.arrived.len().min(buffer.len());
        buffer[..n].copy_from_slice(&self.arrived[..n]);
        self.arrived.drain(..n);
        if n == 0 { Err(Over::Left) } else { Ok(n) }
    }

    fn write(&mut self, _bytes: &[u8]) -> Result<usize, Over> {
        Err(Over::Broke("reset".to_owned()))
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(true)
    }
}

#[test]
fn what_has_come_before_a_connection_broke_is_passed_on() {
    let (mut left, mut a) = pair();
    let (fd, _other) = UnixStream::pair().unwrap();
    left.write_all(b"far too much").unwrap();
    let mut reset = Reset { fd, arrived: b"that was too much".to_vec() };
    assert!(matches!(pump(&mut a, &mut reset, Rules::default(), || Ok(())), Over::Broke(_)));
    drop(a);
    let mut heard = String::new();
    left.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, "that was too much");
}

/// VIS-2
#[test]
fn who_does_not_read_or_says_nothing_is_sent_away() {
    let soon = Some(Duration::from_millis(20));
    let ((mut left, a), (_right, b)) = (pair(), pair());
    let pumped = run(a, b, Rules { stall: soon, ..Rules::default() });
    // More than two sockets and a buffer hold.
    let _ = left.write_all(&vec![0; 4 << 20]);
    let Over::Refused(refuse) = pumped.join().unwrap() else { panic!("it goes on") };
    assert_eq!(refuse.code, Refusal::Other);
    assert!(refuse.text.starts_with("nothing was read for 0.02 s"), "{}", refuse.text);

    let ((_left, a), (_right, b)) = (pair(), pair());
    let Over::Refused(refuse) = run(a, b, Rules { idle: soon, ..Rules::default() }).join().unwrap() else {
        panic!("it goes on")
    };
    assert_eq!(refuse.text, "nothing was said for 0.02 s");
}

/// VIS-1
#[test]
fn the_check_is_made_while_nothing_passes_and_while_much_does() {
    let tick = Some(Duration::from_millis(5));
    for busy in [false, true] {
        let ((mut left, mut a), (mut right, mut b)) = (pair(), pair());
        let pumped = std::thread::spawn(move || {
            let mut left = 3;
            let check = || {
                left -= 1;
                if left > 0 { Ok(()) } else { Err(Over::refused(Refusal::NotAllowed, "revoked")) }
            };
            pump(&mut a, &mut b, Rules { tick, ..Rules::default() }, check)
        });
        if busy {
            std::thread::spawn(move || std::io::copy(&mut right, &mut std::io::sink()));
            while left.write_all(&[0; 4096]).is_ok() {}
        }
        let Over::Refused(refuse) = pumped.join().unwrap() else { panic!("it goes on") };
        assert_eq!(refuse.code, Refusal::NotAllowed);
    }
}

/// An end that takes nothing, and counts how often it was asked to.
struct Full {
    never: LocalEnd,
    asked: usize,
}

impl End for Full {
    fn fd(&self) -> BorrowedFd<'_> {
        self.never.fd()
    }

    fn interest(&self, reads: bool, _writes: bool) -> PollFlags {
        self.never.interest(reads, false)
    }

    fn read(&mut self, _buffer: &mut [u8]) -> Result<usize, Over> {
        Ok(0)
    }

    fn write(&mut self, _bytes: &[u8]) -> Result<usize, Over> {
        self.asked += 1;
        Ok(0)
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(false)
    }
}

/// VIS-2
#[test]
fn who_does_not_read_costs_no_time_of_a_core() {
    let (tunnel, nobody) = (Tunnel::new().unwrap(), Weak::<Nobody>::new());
    let mut end = TunnelEnd::new(&nobody, tunnel.clone(), (ProcAddr::agent(1), ProcAddr::CONTROLLER), 1);
    let (_other, never) = pair();
    let mut full = Full { never, asked: 0 };
    tunnel.on(Step::Said(Bytes::from(vec![1; PIECE])));
    let rules = Rules { stall: Some(Duration::from_millis(200)), tick: Some(Duration::from_millis(20)), idle: None };
    // More arrives while it takes nothing.
    let check = || {
        tunnel.on(Step::Said(Bytes::from_static(b"more")));
        Ok(())
    };
    assert!(matches!(pump(&mut full, &mut end, rules, check), Over::Refused(_)));
    assert!(full.asked < 100, "it was asked {} times", full.asked);
}

/// VIS-2
#[test]
fn a_tunnel_holds_no_more_than_its_window() {
    let (tunnel, nobody) = (Tunnel::new().unwrap(), Weak::<Nobody>::new());
    let mut end = TunnelEnd::new(&nobody, tunnel.clone(), (ProcAddr::agent(1), ProcAddr::CONTROLLER), 1);
    // Out: only as much as the other end has room for.
    let (mut sent, chunk) = (0, [0; 10_000]);
    loop {
        match end.write(&chunk).unwrap() {
            0 => break,
            n => sent += n,
        }
    }
    assert_eq!(sent, WINDOW as usize);
    tunnel.on(Step::Taken(7));
    assert_eq!(end.write(&chunk).unwrap(), 7);
    // Room that was never used up is not extra room.
    tunnel.on(Step::Taken(u32::MAX));
    tunnel.on(Step::Taken(u32::MAX));
    let mut sent = 0;
    loop {
        match end.write(&chunk).unwrap() {
            0 => break,
            n => sent += n,
        }
    }
    assert_eq!(sent, WINDOW as usize);
    // In: a peer that sends more breaks off the visit, and what came before is still read.
    let mut buffer = [0; 1 << 16];
    tunnel.on(Step::Said(Bytes::from(vec![1; 1000])));
    assert_eq!(end.read(&mut buffer).unwrap(), 1000);
    assert_eq!(end.read(&mut buffer).unwrap(), 0);
    tunnel.on(Step::Said(Bytes::from(vec![1; WINDOW as usize])));
    tunnel.on(Step::Said(Bytes::from_static(b"1")));
    let mut heard = 0;
    let over = loop {
        match end.read(&mut buffer) {
            Ok(n) => heard += n,
            Err(over) => break over,
        }
    };
    assert_eq!(heard, WINDOW as usize);
    let Over::Broke(why) = over else { panic!("it goes on") };
    assert_eq!(why, "the other end sent more than there was room for");
}

/// Two ends of an encrypted connection: the visitor's and the dialed host's.
fn connection(name: &str) -> (TlsStream, TlsStream) {
    let dir = std::env::temp_dir().join(format!("mesh-packets-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let long = Duration::from_secs(20);
    let store = Store::create(&dir.join("job"), long, long).unwrap();
    store.issue_observer(&dir.join("observer"), long).unwrap();
    let host = Identity::load_as(store.dir(), Role::Host).unwrap();
    let observer = Identity::load_to_look(&dir.join("observer")).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let (tell, told) = mpsc::channel();
    let any = [SocketAddr::from(([127, 0, 0, 1], 0))];
    let listener = Listener::bind(&any, host, Limits::default(), move |event| drop(tell.send(event))).unwrap();
    let Dialed { stream: looker, .. } =
        dial(&listener.addrs()[0].to_string(), &observer, Some(Role::Host), long).unwrap();
    let ListenerEvent::Joined { stream, .. } = told.recv_timeout(long).unwrap() else { panic!("it was not let in") };
    (looker, stream)
}

fn bytes_of(packet: &Packet) -> Vec<u8> {
    let mut bytes = packet.encode_head();
    packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
    bytes
}

fn said(bytes: Vec<u8>) -> Packet {
    let mut packet = Packet::new(PacketKind::Said, 0);
    packet.body = Short::from_iter([Bytes::from(bytes)]);
    packet
}

/// The outcome of a visit whose other end sends this and leaves, and what was passed on.
fn after(name: &str, last: &[u8], notify: bool) -> (Over, String) {
    let (mut looker, stream) = connection(name);
    let (mut local, end) = pair();
    let pumped = std::thread::spawn(move || {
        let mut packets = PacketEnd::new(stream, PacketDecoder::default());
        pump(&mut packets, &mut { end }, Rules::default(), || Ok(()))
    });
    let mut bytes = bytes_of(&said(b"heard".to_vec()));
    bytes.extend_from_slice(last);
    assert_eq!(looker.write(&[IoSlice::new(&bytes)]).unwrap(), bytes.len());
    assert!(looker.flush().unwrap());
    if notify {
        looker.close_notify();
    }
    let mut heard = String::new();
    if last.is_empty() {
        drop(looker);
        local.read_to_string(&mut heard).unwrap();
        return (pumped.join().unwrap(), heard);
    }
    local.read_to_string(&mut heard).unwrap();
    (pumped.join().unwrap(), heard)
}

#[test]
fn the_end_of_a_job_a_refusal_and_a_broken_connection_are_different_things() {
    let farewell = Farewell { parting: Parting::JobOver, text: String::new() }.packet(0);
    let (over, heard) = after("farewell", &bytes_of(&farewell), false);
    assert!(matches!(over, Over::Left) && heard == "heard", "{over:?}");
    let (over, _) = after("notify", &[], true);
    assert!(matches!(over, Over::Left), "{over:?}");
    let refuse = Refuse { code: Refusal::Other, text: "why".to_owned() };
    let (over, heard) = after("refuse", &bytes_of(&refuse.packet(0)), false);
    assert!(matches!(over, Over::Refused(told) if told == refuse) && heard == "heard");
    let (over, heard) = after("broken", &[], false);
    assert!(matches!(over, Over::Broke(_)) && heard == "heard", "{over:?}");
}

#[test]
fn what_is_not_due_ends_a_visit() {
    let mut empty = Packet::new(PacketKind::Said, 0);
    empty.body = Short::from_iter([Bytes::new()]);
    let cases = [
        ("long", bytes_of(&said(vec![0; PIECE + 1]))),
        ("empty", bytes_of(&empty)),
        ("ping", bytes_of(&Packet::new(PacketKind::Ping, 0))),
        ("garbage", vec![7; 100]),
    ];
    for (name, bytes) in cases {
        let (over, heard) = after(name, &bytes, false);
        assert!(matches!(over, Over::Broke(_)) && heard == "heard", "{name}: {over:?}");
    }
}
