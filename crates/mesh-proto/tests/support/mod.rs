//! What several tests share: random frames, and the entries for hostile bytes.

#![allow(dead_code, reason = "each test uses its part of it")]

use bytes::Bytes;
use mesh_proto::{Frame, Header, Kind, Part, Placement, ProcAddr, SharedRef, Target};
use mesh_topology::{Extent, Region, Selector, Span};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

pub(crate) mod connection;
pub(crate) mod dice;
pub(crate) mod entry;
pub(crate) mod hosts;
pub(crate) mod peer;

/// A fixed seed: the same cases in every run, and no files left behind.
pub(crate) fn config(cases: u32, seed: u64) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(seed), ..ProptestConfig::default() }
}

pub(crate) const KINDS: &[Kind] = &[
    Kind::Hello,
    Kind::Spawn,
    Kind::Call,
    Kind::Tell,
    Kind::Reply,
    Kind::StopActor,
    Kind::StopProc,
    Kind::Goodbye,
    Kind::Down,
    Kind::SpawnProcs,
    Kind::Undeliverable,
    Kind::Cancel,
    Kind::Gathered,
    Kind::StopProcs,
    Kind::Failure,
    Kind::Post,
    Kind::Closed,
    Kind::Partial,
    Kind::Watch,
    Kind::HostDown,
    Kind::HostLost,
    Kind::Whereabouts,
    Kind::EndJob,
    Kind::Lines,
    Kind::Standing,
    Kind::Revoked,
    Kind::Credit,
    Kind::Inspect,
    Kind::Moved,
    Kind::GivenUp,
    Kind::Direct,
    Kind::Held,
    Kind::Extend,
    Kind::Fetch,
];

pub(crate) fn addr() -> impl Strategy<Value = ProcAddr> {
    (any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(mesh, rank, host)| ProcAddr { mesh, rank, host })
}

pub(crate) fn header() -> impl Strategy<Value = Header> {
    let numbers = (any::<u16>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
    (prop::sample::select(KINDS.to_vec()), addr(), addr(), numbers)
        .prop_map(|(kind, src, dst, numbers)| raw(Header::new(kind, src, dst), numbers))
}

/// A header with these flags, actor, call, index and deadline, meaningful or not, as bytes could have them.
pub(crate) fn raw(header: Header, numbers: (u16, u64, u64, u32, u32)) -> Header {
    let mut bytes = header.encode();
    bytes[4..6].copy_from_slice(&numbers.0.to_le_bytes());
    bytes[40..48].copy_from_slice(&numbers.1.to_le_bytes());
    bytes[48..56].copy_from_slice(&numbers.2.to_le_bytes());
    bytes[60..64].copy_from_slice(&numbers.3.to_le_bytes());
    bytes[68..72].copy_from_slice(&numbers.4.to_le_bytes());
    Header::decode(&bytes).expect("a header without lengths")
}

pub(crate) fn part() -> impl Strategy<Value = Part> {
    let shared = (any::<(u32, u32, u64)>(), any::<(u64, u32, u32)>(), 0..1_u64 << 62).prop_map(|(a, b, len)| {
        let at = SharedRef { pid: a.0, fd: a.1, slab: a.2, offset: b.0, chunk: b.1, turn: b.2 };
        Part::Shared { at, len }
    });
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..200).prop_map(|bytes| Part::Inline(bytes.into())),
        1 => (1_usize..300_000, any::<u8>()).prop_map(|(len, byte)| Part::Inline(Bytes::from(vec![byte; len]))),
        2 => shared,
    ]
}

/// Part of a small mesh: all of it, a strided part, or one row.
pub(crate) fn region() -> impl Strategy<Value = Region> {
    (1_usize..6, 1_usize..6, 0_u8..3, any::<prop::sample::Index>()).prop_map(|(hosts, gpus, cut, at)| {
        let extent = Extent::new([("hosts", hosts), ("gpus", gpus)]).expect("small sizes");
        let whole = Region::whole(&extent);
        let index = isize::try_from(at.index(hosts)).expect("small");
        match cut {
            0 => whole,
            1 => whole.slice(&[("hosts", Selector::At(index))]).expect("inside"),
            _ => whole.slice(&[("gpus", Selector::Span(Span::every(2)))]).expect("inside"),
        }
    })
}

/// A cast's target: a region of a mesh on one host or on several, or the agents.
pub(crate) fn cast() -> impl Strategy<Value = Target> {
    (any::<u64>(), region(), region(), 0_u8..3, any::<u32>()).prop_map(|(mesh, region, hosts, kind, number)| {
        let placement = match kind {
            0 => Placement::On(number),
            1 => Placement::Agents,
            _ => Placement::spread(hosts, number % 9 + 1),
        };
        Target::Many(mesh, region, placement)
    })
}

pub(crate) fn frame() -> impl Strategy<Value = Frame> {
    let name = prop::collection::vec(any::<u8>(), 0..40);
    (header(), prop::option::of(cast()), name, prop::collection::vec(part(), 0..6))
        .prop_map(|(header, cast, name, parts)| Frame::build(header, cast.as_ref(), &name, &parts))
}

/// Frames as a link sends them: numbered, back to back.
pub(crate) fn on_the_wire(frames: &[Frame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (seq, frame) in (0..).zip(frames) {
        let mut header = frame.header;
        header.seq = seq;
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(&frame.body);
    }
    bytes
}
