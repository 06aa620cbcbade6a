//! Entry for hostile bytes: used by the fuzzer and by the mutation test on a stable compiler.

use mesh_proto::control::{
    Attachment, Closed, Direct, Down, Goodbye, Held, HostDown, HostLost, HostStanding, Inspect, Introduction, Lines,
    News, Revoked, SpawnProcs, StopProcs, Terms, Undeliverable, Visit, Whereabouts, ranks_of,
};
use mesh_proto::messages::{Asked, Meaning, Name, Partial, ProcUp};
use mesh_proto::{Decoder, Frame, ProcAddr, READ_CHUNK, Target};

/// Everything that a receiver does with unknown bytes. Panics if a promise is broken.
pub(crate) fn feed(data: &[u8]) {
    // The first byte sets the size of the pieces in which the rest arrives.
    let Some((&piece, bytes)) = data.split_first() else { return };
    let piece = usize::from(piece) * 97 + 1;
    let mut decoder = Decoder::default();
    let mut received = 0;
    let mut given = 0;
    'link: for chunk in bytes.chunks(piece) {
        decoder.push(chunk);
        received += chunk.len();
        assert!(
            decoder.held() <= 2 * received + 2 * READ_CHUNK,
            "{} bytes are held after {received} arrived",
            decoder.held()
        );
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => {
                    given += frame.wire_len();
                    look_into(&frame);
                }
                Ok(None) => break,
                Err(error) => {
                    // Every error can be displayed.
                    assert!(!error.to_string().is_empty());
                    break 'link;
                }
            }
        }
        assert!(given + decoder.pending() <= received, "more came out than went in");
    }
}

/// Reads everything that a frame states.
pub(crate) fn look_into(frame: &Frame) {
    assert_eq!(frame.header.body_len, frame.body.len() as u64);
    let _ = frame.name();
    if let Ok(parts) = frame.parts() {
        assert_eq!(parts.len(), usize::from(frame.header.parts));
    }
    if let Ok(target) = frame.target() {
        assert_eq!(target.mesh(), frame.header.dst.mesh);
        let _ = (target.len(), target.is_empty());
        let _ = target.index_of(frame.header.dst);
        if let Target::Many(_, region, placement) = &target {
            for rank in region.iter().take(100) {
                let _ = (region.position(rank), placement.addr(1, rank));
            }
            for host in [0, 1, 7, u32::MAX] {
                let _ = placement.ranks_on(host, region.len());
            }
            let _ = (placement.only(), placement.agents(), placement.per_host(region.len()));
        }
    }
    read_as_message(frame);
    read_as_control(frame);
    let one = frame.for_one(ProcAddr { mesh: frame.header.dst.mesh, rank: 7, host: 0 }, 3);
    assert_eq!(one.target(), Ok(Target::One(ProcAddr { mesh: frame.header.dst.mesh, rank: 7, host: 0 })));
    assert_eq!(one.name(), frame.name());
    assert_eq!(one.parts(), frame.parts());
    assert_eq!(one.header.body_len, one.body.len() as u64);
}

/// Reads it as what its header says: the result encodes to the same, and no other reader accepts it (MSG-1).
fn read_as_message(frame: &Frame) {
    let (from, to) = (frame.header.src, frame.header.dst);
    let name = Name::read(frame.name());
    assert_eq!(name.what, Name::what(frame.name()));
    if let Some(up) = ProcUp::read(frame) {
        assert_eq!(ProcUp::read(&up.frame(to)), Some(up));
    }
    let asked = Asked::of(&frame.header);
    assert!(asked.is_none_or(|asked| asked.call != 0 && asked.by == from));
    let (of_header, said) = (Meaning::of(&frame.header), Meaning::read(frame));
    match said {
        Ok(said) => {
            assert_eq!(of_header, Ok(said));
            let again = said.header(from, to).map(|header| Meaning::of(&header));
            assert!(again.is_none_or(|again| again == Ok(said)));
            assert!(asked.is_none_or(|asked| matches!(said, Meaning::Control(_)) || asked.call == said.call()));
            let _ = (said.actor(), said.place(), said.is_for_port());
            if matches!(said, Meaning::Partial(_)) {
                assert!(Partial::caller_in(frame.name()).is_some());
            }
        }
        // Every error can be displayed.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Reads it as every control frame, whatever its kind: results can be displayed, and encode to the same again.
fn read_as_control(frame: &Frame) {
    let (from, to) = (frame.header.src, frame.header.dst);
    if let Some(goodbye) = Goodbye::read(frame) {
        let _ = goodbye.reason.to_string();
        assert_eq!(Goodbye::read(&goodbye.frame(from, to)), Some(goodbye));
    }
    if let Some(down) = Down::read(frame) {
        let _ = (down.ended.reason.to_string(), down.ended.kind().word(), down.ended.never_ran());
        assert_eq!(Down::read(&down.frame(from, to)), Some(down));
    }
    if let Some(back) = Undeliverable::read(frame) {
        let _ = (back.why.to_string(), back.why.word());
        assert_eq!(Undeliverable::read(&back.frame(from, to)), Some(back));
    }
    if let Some(closed) = Closed::read(frame) {
        let _ = (closed.why.to_string(), closed.why.word());
        assert_eq!(Closed::read(&closed.frame(from, to)), Some(closed));
    }
    if let Some(down) = HostDown::read(frame) {
        assert!(!down.end.fate.word().is_empty());
        assert_eq!(HostDown::read(&down.frame(from, to, None)), Some(down));
    }
    if let Some(lost) = HostLost::read(frame) {
        assert_eq!(HostLost::read(&lost.frame(from)), Some(lost));
    }
    if let Some(standing) = HostStanding::read(frame) {
        assert_eq!(HostStanding::read(&standing.frame(from, to, None)), Some(standing));
    }
    if let Some(whereabouts) = Whereabouts::read(frame) {
        assert_eq!(Whereabouts::read(&whereabouts.frame(from, to)), Some(whereabouts));
    }
    if let Some(revoked) = Revoked::read(frame) {
        assert_eq!(Revoked::read(&revoked.frame(from, to, None)), Some(revoked));
    }
    if let Some(direct) = Direct::read(frame) {
        assert_eq!(Direct::read(&direct.frame(from, to)), Some(direct));
    }
    if let Some(held) = Held::read(frame) {
        assert_eq!(Held::read(&held.frame(from, to)), Some(held));
    }
    if let Some(spawn) = SpawnProcs::read(frame) {
        assert_eq!(SpawnProcs::read(&spawn.frame(from, &Target::One(to))), Some(spawn));
    }
    if let Some(stop) = StopProcs::read(frame) {
        assert_eq!(StopProcs::read(&stop.frame(from, &Target::One(to))), Some(stop));
    }
    if let Some(news) = News::read(frame) {
        assert_eq!(News::read(&news.frame(from, to, None)), Some(news));
    }
    assert!(ranks_of(frame, 10).is_none_or(|ranks| ranks.len() <= 10));
    if let Some(lines) = Lines::read(frame) {
        assert_eq!(Lines::read(&lines.frame(from, to, None)), Some(lines));
    }
    if let Some(inspect) = Inspect::read(frame) {
        assert_eq!(Inspect::read(&inspect.frame(from, to, None)), Some(inspect));
    }
    if let Some(visit) = Visit::decode(&frame.body) {
        assert_eq!(Visit::decode(&visit.encode()), Some(visit));
    }
    if let Some(told) = Attachment::decode(frame.name()) {
        assert_eq!(Attachment::decode(&told.encode()), Some(told));
    }
    if let Some(terms) = Terms::decode(frame.name()) {
        assert_eq!(Terms::decode(&terms.encode()), Some(terms));
    }
    if let Some(said) = Introduction::decode(frame.name()) {
        assert_eq!(Introduction::decode(&said.encode()), Some(said));
    }
}
