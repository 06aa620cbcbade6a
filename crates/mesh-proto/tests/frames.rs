//! Frames to bytes and back, however the bytes are cut.

use crate::support::{addr, cast, config, entry, frame, header, on_the_wire, part};
use mesh_proto::messages::Meaning;
use mesh_proto::{Decoder, Frame, FrameError, HEADER_LEN, Header, Kind, MAX_BODY, Part, ProcAddr, READ_CHUNK, Target};
use proptest::prelude::*;

fn all(decoder: &mut Decoder) -> Result<Vec<Frame>, FrameError> {
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next_frame()? {
        frames.push(frame);
    }
    Ok(frames)
}

/// The same frame without its number on the link.
fn unnumbered(frame: &Frame) -> Frame {
    numbered(frame, 0)
}

fn numbered(frame: &Frame, seq: u32) -> Frame {
    let mut frame = frame.clone();
    frame.header.seq = seq;
    frame
}

proptest! {
    #![proptest_config(config(256, 1))]

    #[test]
    fn a_header_says_what_it_was_built_with(header in header(), seq in any::<u32>()) {
        let mut header = header;
        header.seq = seq;
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn a_frame_gives_back_its_name_parts_and_target(
        header in header(),
        cast in prop::option::of(cast()),
        name in prop::collection::vec(any::<u8>(), 0..300),
        parts in prop::collection::vec(part(), 0..8),
    ) {
        let frame = Frame::build(header, cast.as_ref(), &name, &parts);
        let target = match cast {
            Some(Target::Many(_, region, placement)) => Target::Many(header.dst.mesh, region, placement),
            _ => Target::One(header.dst),
        };
        prop_assert_eq!(frame.target(), Ok(target));
        prop_assert_eq!(frame.name(), &name[..]);
        prop_assert_eq!(frame.parts(), Ok(parts));
        prop_assert_eq!(frame.wire_len(), HEADER_LEN + frame.body.len());
        entry::look_into(&frame);
    }

    #[test]
    fn a_plain_frame_is_a_frame_with_one_inline_part(
        header in header(),
        cast in prop::option::of(cast()),
        name in prop::collection::vec(any::<u8>(), 0..40),
        payload in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let part = Part::Inline(payload.clone().into());
        prop_assert_eq!(
            Frame::build_plain(header, cast.as_ref(), &name, &payload),
            Frame::build(header, cast.as_ref(), &name, &[part])
        );
    }

    #[test]
    fn a_cast_for_one_keeps_everything_but_the_region(frame in frame(), to in addr(), index in any::<u32>()) {
        let one = frame.for_one(to, index);
        prop_assert_eq!(one.target(), Ok(Target::One(to)));
        prop_assert_eq!(one.header.src, frame.header.src);
        let (whole, own) = (Meaning::of(&frame.header), Meaning::of(&one.header));
        if let (Ok(whole), Ok(own)) = (whole, own) {
            prop_assert_eq!((whole.call(), whole.actor()), (own.call(), own.actor()));
            // A place in the cast is relative to its first receiver's.
            prop_assert!(own.place() == 0 || own.place() == whole.place().saturating_add(index));
        }
        prop_assert_eq!(one.name(), frame.name());
        prop_assert_eq!(one.parts(), frame.parts());
        // It also survives its own link.
        let mut decoder = Decoder::default();
        decoder.push(&on_the_wire(std::slice::from_ref(&one)));
        prop_assert_eq!(all(&mut decoder), Ok(vec![unnumbered(&one)]));
    }
}

proptest! {
    #![proptest_config(config(96, 2))]

    #[test]
    fn however_the_bytes_are_cut_the_same_frames_come_out(
        frames in prop::collection::vec(frame(), 1..6),
        cuts in prop::collection::vec(prop_oneof![1_usize..100, 1_usize..100_000], 1..40),
    ) {
        let bytes = on_the_wire(&frames);
        let mut decoder = Decoder::default();
        let mut out = Vec::new();
        let mut rest = &bytes[..];
        let mut cuts = cuts.iter().cycle();
        let mut received = 0;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            decoder.push(now);
            rest = later;
            received += now.len();
            prop_assert!(decoder.held() <= 2 * received + 2 * READ_CHUNK);
            out.extend(all(&mut decoder).unwrap());
        }
        prop_assert_eq!(decoder.pending(), 0);
        let numbers: Vec<u32> = out.iter().map(|frame| frame.header.seq).collect();
        prop_assert_eq!(numbers, (0..u32::try_from(frames.len()).unwrap()).collect::<Vec<_>>());
        prop_assert_eq!(out.iter().map(unnumbered).collect::<Vec<_>>(), frames.iter().map(unnumbered).collect::<Vec<_>>());
    }

    /// LNK-1.
    #[test]
    fn a_lost_or_repeated_frame_is_noticed(frames in prop::collection::vec(frame(), 2..5), at in any::<prop::sample::Index>(), lose in any::<bool>()) {
        let numbered: Vec<Frame> = (0..).zip(&frames).map(|(seq, frame)| numbered(frame, seq)).collect();
        let at = at.index(numbered.len() - 1);
        let mut sent = numbered;
        if lose {
            sent.remove(at);
        } else {
            sent.insert(at, sent[at].clone());
        }
        let mut decoder = Decoder::default();
        for frame in &sent {
            decoder.push(&frame.header.encode());
            decoder.push(&frame.body);
        }
        let error = all(&mut decoder).unwrap_err();
        let is_sequence = matches!(error, FrameError::Sequence { .. });
        prop_assert!(is_sequence, "{error}");
    }
}

#[test]
fn a_long_frame_never_makes_the_decoder_run_ahead() {
    let me = ProcAddr::CONTROLLER;
    let payload = vec![7; 5_000_000];
    let frame = Frame::build_plain(Header::new(Kind::Tell, me, me), None, b"", &payload);
    let mut decoder = Decoder::default();
    let mut received = 0;
    let mut out = None;
    for chunk in on_the_wire(std::slice::from_ref(&frame)).chunks(10_007) {
        decoder.push(chunk);
        received += chunk.len();
        assert!(decoder.held() <= 2 * received + 2 * READ_CHUNK, "{} held after {received}", decoder.held());
        out = decoder.next_frame().unwrap().or(out);
    }
    assert_eq!(out, Some(frame));
    // The memory for a long frame is not kept for ever.
    decoder.push(&[0]);
    assert!(decoder.held() <= 8 * READ_CHUNK, "{} held", decoder.held());
}

#[test]
fn a_header_that_claims_a_terabyte_costs_no_memory() {
    let me = ProcAddr::CONTROLLER;
    let mut header = Header::new(Kind::Tell, me, me);
    header.body_len = MAX_BODY;
    let mut decoder = Decoder::default();
    decoder.push(&header.encode());
    assert_eq!(decoder.next_frame(), Ok(None));
    decoder.push(&[0; 1000]);
    assert_eq!(decoder.next_frame(), Ok(None));
    assert!(decoder.held() <= 4 * READ_CHUNK);
    header.body_len = MAX_BODY + 1;
    assert_eq!(Header::decode(&header.encode()), Err(FrameError::TooLong(MAX_BODY + 1)));
}
