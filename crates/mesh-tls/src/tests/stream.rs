//! What goes through a connection, and how it ends.

use super::*;
use crate::record::MOST_RECORD;
use rustls::ContentType;
use std::io::{ErrorKind, IoSlice};

#[test]
fn what_is_written_arrives_both_ways() {
    let job = Job::new();
    let (mut client, mut server) = pair(&job);
    assert_eq!(client.write(&[IoSlice::new(b"he"), IoSlice::new(b""), IoSlice::new(b"llo")]).unwrap(), 5);
    let mut buf = [0; 5];
    read_all(&mut server, &mut buf).unwrap();
    assert_eq!(&buf, b"hello");
    server.write(&[IoSlice::new(b"world")]).unwrap();
    read_all(&mut client, &mut buf).unwrap();
    assert_eq!(&buf, b"world");
    let empty = client.read(&mut buf).unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::WouldBlock);
}

/// Bytes that depend on their position.
fn pattern(len: usize, salt: u32) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(salt) >> 13) as u8).collect()
}

#[test]
fn a_lot_in_odd_pieces_arrives_as_it_was_while_both_directions_are_busy() {
    let job = Job::new();
    let (client, server) = pair(&job);
    let run = |stream: TlsStream, out: Vec<u8>, expected: Vec<u8>, step: usize| {
        std::thread::spawn(move || {
            let (mut reader, mut writer) = stream.into_split().unwrap();
            let reading = std::thread::spawn(move || {
                let mut got = Vec::new();
                let mut buf = vec![0; step * 7 + 1];
                while got.len() < expected.len() {
                    match reader.read(&mut buf) {
                        Ok(n) => got.extend_from_slice(&buf[..n]),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            let fd =
                                rustix::event::PollFd::from_borrowed_fd(reader.as_fd(), rustix::event::PollFlags::IN);
                            rustix::event::poll(&mut [fd], None).unwrap();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                assert!(got == expected, "what arrived differs");
                reader
            });
            let mut done = 0;
            while done < out.len() || writer.wants_write() {
                let (a, b) = ((done + step).min(out.len()), (done + 3 * step + 1).min(out.len()));
                let slices = [IoSlice::new(&out[done..a]), IoSlice::new(&out[a..b]), IoSlice::new(&[])];
                let written = if done < out.len() { writer.write(&slices) } else { writer.flush().map(|_| 0) };
                match written {
                    Ok(n) => done += n,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => panic!("{error}"),
                }
                if writer.wants_write() {
                    let fd = rustix::event::PollFd::from_borrowed_fd(writer.as_fd(), rustix::event::PollFlags::OUT);
                    rustix::event::poll(&mut [fd], None).unwrap();
                }
            }
            (reading.join().unwrap(), writer)
        })
    };
    let (up, down) = (pattern(5_000_003, 1), pattern(3_000_017, 2));
    let one = run(client, up.clone(), down.clone(), 977);
    let other = run(server, down, up, 40_001);
    one.join().unwrap();
    other.join().unwrap();
}

#[test]
fn what_the_socket_does_not_take_is_bounded() {
    let job = Job::new();
    let (mut client, mut server) = pair(&job);
    let data = pattern(1 << 20, 3);
    let mut taken = 0;
    let full = loop {
        match client.write(&[IoSlice::new(&data[taken % data.len()..])]) {
            Ok(n) => taken += n,
            Err(error) => break error,
        }
        assert!(taken < 64 << 20, "it takes for ever");
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    assert!(client.wants_write());
    assert!(!client.flush().unwrap());
    let (_, writer) = client.into_split().unwrap();
    assert!(writer.queued() <= MOST_QUEUED + MOST_RECORD, "{}", writer.queued());
    // All that was taken arrives, in order, once somebody reads.
    let flushing = std::thread::spawn(move || {
        let mut writer = writer;
        while !writer.flush().unwrap() {
            let fd = rustix::event::PollFd::from_borrowed_fd(writer.as_fd(), rustix::event::PollFlags::OUT);
            rustix::event::poll(&mut [fd], None).unwrap();
        }
        writer
    });
    let mut got = vec![0; taken];
    assert_eq!(read_all(&mut server, &mut got).unwrap(), taken);
    let mut from = 0;
    while from < taken {
        let n = (taken - from).min(data.len() - from % data.len());
        assert!(got[from..from + n] == data[from % data.len()..from % data.len() + n]);
        from += n;
    }
    flushing.join().unwrap();
}

#[test]
fn a_farewell_is_an_end_and_its_lack_is_an_error() {
    let job = Job::new();
    let (mut client, mut server) = pair(&job);
    client.write(&[IoSlice::new(b"last")]).unwrap();
    client.close_notify();
    client.close_notify();
    assert_eq!(client.write(&[IoSlice::new(b"more")]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    let mut buf = [0; 16];
    assert_eq!(read_all(&mut server, &mut buf).unwrap(), 4);
    assert_eq!(server.read(&mut buf).unwrap(), 0);
    assert_eq!(server.read(&mut buf).unwrap(), 0);
    // The other direction is still open.
    server.write(&[IoSlice::new(b"bye")]).unwrap();
    assert_eq!(client.read(&mut buf).or_else(|_| read_all(&mut client, &mut buf[..3])).unwrap(), 3);
    drop(server);
    let error = read_error(&mut client);
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert!(error.get_ref().is_some_and(|inner| inner.is::<Truncated>()), "{error:?}");
    // The same again on the next call.
    assert_eq!(read_error(&mut client).kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn what_arrived_before_the_end_is_read_before_it_is_told() {
    let job = Job::new();
    let (mut client, mut server) = pair(&job);
    client.write(&[IoSlice::new(b"last words")]).unwrap();
    drop(client);
    let mut buf = [0; 64];
    let mut got = 0;
    let error = loop {
        match server.read(&mut buf[got..]) {
            Ok(n) => got += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(&server, rustix::event::PollFlags::IN),
            Err(error) => break error,
        }
    };
    assert_eq!(&buf[..got], b"last words");
    assert!(matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{error}");
}

/// TLS-2: numbers restart only with a new key.
#[test]
fn keys_are_changed_before_they_are_worn_out() {
    let job = Job::new();
    let (client, mut server) = pair(&job);
    let (_reader, mut writer) = client.into_split().unwrap();
    writer.sealer().wear_out_after(3);
    for i in 0..20_u8 {
        // Numbers restart after each key change, so 20 records take several.
        writer.write(&[IoSlice::new(&[i; 100])]).unwrap();
        let mut buf = [0; 100];
        assert_eq!(read_all(&mut server, &mut buf).unwrap(), 100);
        assert_eq!(buf, [i; 100]);
    }
    assert!(writer.sealer().number() < 4, "{}", writer.sealer().number());
}

#[test]
fn a_peer_that_asks_for_new_keys_gets_them() {
    let job = Job::new();
    let (client, mut server) = pair(&job);
    let (mut reader, mut writer) = client.into_split().unwrap();
    server.write(&[IoSlice::new(b"x")]).unwrap();
    let record = writer.update_and_ask().unwrap();
    writer.push_raw(record).unwrap();
    writer.write(&[IoSlice::new(b"after")]).unwrap();
    let mut buf = [0; 5];
    read_all(&mut server, &mut buf).unwrap();
    assert_eq!(&buf, b"after");
    let before = server.write(&[IoSlice::new(b"new key")]);
    assert_eq!(before.unwrap(), 7);
    let mut all = [0; 8];
    let mut got = 0;
    while got < 8 {
        match reader.read(&mut all[got..]) {
            Ok(n) => got += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let fd = rustix::event::PollFd::from_borrowed_fd(reader.as_fd(), rustix::event::PollFlags::IN);
                rustix::event::poll(&mut [fd], None).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(&all, b"xnew key");
}

/// What a reader says to a record that a member sealed, but should not have.
fn objection(typ: ContentType, payload: &[u8], times: usize) -> std::io::Error {
    let job = Job::new();
    let (client, mut server) = pair(&job);
    let (_reader, mut writer) = client.into_split().unwrap();
    for _ in 0..times {
        let record = writer.sealer().any(typ, payload).unwrap();
        writer.push_raw(record).unwrap();
    }
    read_error(&mut server)
}

#[test]
fn what_has_no_place_in_a_connection_ends_it() {
    for (typ, payload, times) in [
        // A second hello, a key update of the wrong length, one followed by something, one with a bad value.
        (ContentType::Handshake, &[1, 0, 0, 1, 0][..], 1),
        (ContentType::Handshake, &[24, 0, 0, 2, 0, 0], 1),
        (ContentType::Handshake, &[24, 0, 0, 1, 0, 24], 1),
        (ContentType::Handshake, &[24, 0, 0, 1, 2], 1),
        // A ticket that is too long.
        (ContentType::Handshake, &[4, 0xff, 0xff, 0xff, 0], 1),
        (ContentType::Alert, &[1], 1),
        (ContentType::Heartbeat, &[1], 1),
        // Records that only cost time.
        (ContentType::ApplicationData, &[], 100),
        (ContentType::Handshake, &[24, 0, 0], 1000),
    ] {
        let error = objection(typ, payload, times);
        assert!(matches!(error.kind(), ErrorKind::InvalidData), "{error:?} for {payload:?}");
    }
    let error = objection(ContentType::Alert, &[2, 44], 1);
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
    assert!(error.to_string().contains("revoked"), "{error}");
}

#[test]
fn tampering_is_noticed() {
    for (change, at) in [(1_u8, 0), (1, 1), (0xff, 3), (1, 5), (0x80, 40)] {
        let job = Job::new();
        let (client, mut server) = pair(&job);
        let (_reader, mut writer) = client.into_split().unwrap();
        let mut record = writer.sealer().any(ContentType::ApplicationData, &[7; 64]).unwrap();
        record[at] ^= change;
        writer.push_raw(record).unwrap();
        assert_eq!(read_error(&mut server).kind(), ErrorKind::InvalidData, "byte {at}");
        // And it stays broken.
        writer.write(&[IoSlice::new(b"hello")]).unwrap();
        assert_eq!(read_error(&mut server).kind(), ErrorKind::InvalidData);
    }
}

/// TLS-2: the number of an unsent record is used up.
#[test]
fn a_record_that_is_sent_again_or_left_out_is_noticed() {
    for again in [true, false] {
        let job = Job::new();
        let (client, mut server) = pair(&job);
        let (_reader, mut writer) = client.into_split().unwrap();
        let first = writer.sealer().any(ContentType::ApplicationData, &[1]).unwrap();
        let second = writer.sealer().any(ContentType::ApplicationData, &[2]).unwrap();
        if again {
            writer.push_raw(first.clone()).unwrap();
            writer.push_raw(first).unwrap();
            assert_eq!(read_all(&mut server, &mut [0]).unwrap(), 1);
        } else {
            writer.push_raw(second).unwrap();
        }
        assert_eq!(read_error(&mut server).kind(), ErrorKind::InvalidData);
    }
}

#[test]
fn a_small_message_is_read_with_one_look_at_the_socket() {
    let job = Job::new();
    let (mut client, mut server) = pair(&job);
    client.write(&[IoSlice::new(&[1; 300])]).unwrap();
    wait(&server, rustix::event::PollFlags::IN);
    let mut buf = [0; 4096];
    // Fewer than asked for: the socket was found empty, without reading it twice.
    assert_eq!(server.read(&mut buf).unwrap(), 300);
    let mut pieces = Vec::new();
    client.write(&[IoSlice::new(&[2; 20_000])]).unwrap();
    let mut got = 0;
    let (mut reader, _writer) = server.into_split().unwrap();
    while got < 20_000 {
        match reader.read_with(usize::MAX, |plain| pieces.push(plain.len())) {
            Ok(n) => got += n,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    assert_eq!(pieces, [16_384, 3616]);
}
