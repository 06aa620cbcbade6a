//! Peers that are not members, or do not speak like members.

use super::Trio;
use super::member::{Job, Member, Site, attach, is_up};
use crate::greeting::{hear, say};
use crate::tests::SOON;
use crate::tls::{Dialed, Identity, Pace, TlsStream, dial};
use bytes::Bytes;
use mesh_proto::hosts::{Farewell, Join, Packet, PacketDecoder, PacketKind, Parting, Refusal, Refuse, Short};
use std::io::{IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn connect(address: &str, identity: &Identity) -> TlsStream {
    let pace = Pace { timeout: SOON, again: Duration::from_millis(500), over: None };
    let Dialed { stream, .. } = dial(address, identity, None, pace).unwrap();
    stream
}

/// Sends a packet and returns the answer; none if the connection ends.
fn answer(address: &str, identity: &Identity, packet: &Packet) -> Option<Packet> {
    let mut stream = connect(address, identity);
    say(&mut stream, packet, Instant::now() + SOON).unwrap();
    hear(&mut stream, &mut PacketDecoder::default(), Instant::now() + SOON).ok()
}

fn join(job: u64, from: u32, to: u32, body: &'static [u8]) -> Packet {
    Join { job, from, to, incarnation: 77, expected: 0, body: Bytes::from_static(body) }.packet()
}

fn with_body(kind: PacketKind, bytes: &'static [u8]) -> Packet {
    let mut packet = Packet::new(kind, 1);
    packet.body = Short::from_iter([Bytes::from_static(bytes)]);
    packet
}

#[test]
fn garbage_at_the_door_disturbs_nobody() {
    let job = Job::new();
    let site = Site::new(&job.host, 1);
    // Not TLS at all.
    let mut stranger = TcpStream::connect(site.address()).unwrap();
    stranger.write_all(&[0; 1000]).unwrap();
    let _ = stranger.read_to_end(&mut Vec::new());
    // A member that begins with garbage.
    for identity in [&job.controller, &job.host, &job.observer] {
        let mut stream = connect(&site.address(), identity);
        stream.write(&[IoSlice::new(&[7; 4096])]).unwrap();
        stream.flush().unwrap();
        assert!(hear(&mut stream, &mut PacketDecoder::default(), Instant::now() + SOON).is_err());
        for packet in [
            Packet::new(PacketKind::Ping, 0),
            with_body(PacketKind::Said, b"{}"),
            with_body(PacketKind::Join, b"short"),
            Farewell { parting: Parting::JobOver, text: String::new() }.packet(0),
        ] {
            assert_eq!(answer(&site.address(), identity, &packet), None);
        }
    }
    // Before the job has begun here, nobody but the controller can begin it.
    for (identity, packet) in [(&job.host, join(5, 0, 1, b"")), (&job.controller, join(5, 0, 1, b"no attachment"))] {
        let refused = Refuse::read(&answer(&site.address(), identity, &packet).unwrap()).unwrap();
        assert!(!refused.text.is_empty());
    }
    assert!(!site.member.gateway.is_active());
    let controller = Member::controller();
    assert!(is_up(&attach(&controller, &job, &[site.address()], 2)[0]));
    controller.close();
}

/// The host may have been open when it was dialed, and closed just afterwards.
#[test]
fn a_gateway_that_is_closed_takes_no_connection() {
    let trio = Trio::plain(2);
    let (job, site) = (trio.controller.gateway.job(), &trio.sites[0]);
    site.member.gateway.close(Duration::ZERO);
    let answer = answer(&site.address(), &trio.job.host, &join(job, 2, 1, b"")).unwrap();
    assert_eq!(Refuse::read(&answer).unwrap().code, Refusal::NoSuchJob);
}

#[test]
fn a_member_that_claims_to_be_another_is_refused() {
    let trio = Trio::plain(2);
    let (job, address) = (trio.controller.gateway.job(), trio.sites[0].address());
    let cases = [
        (&trio.job.host, join(job + 1, 0, 1, b"")),
        (&trio.job.host, join(job, 0, 1, b"")),
        (&trio.job.observer, join(job, 2, 1, b"")),
        // Another run of the controller, not the one that leads the job.
        (&trio.job.controller, join(job, 0, 1, b"")),
    ];
    for (identity, packet) in cases {
        let answer = answer(&address, identity, &packet).unwrap();
        let Refuse { code, text } = Refuse::read(&answer).unwrap();
        assert!(code != Refusal::Busy && !text.is_empty(), "{text}");
    }
    trio.controller.tell(1, 1, 10);
    trio.sites[0].member.until("a message", |heard| heard.from(0) == [1]);
    trio.all_well();
}
