//! Bytes that nobody honest sends: nothing panics, nothing grows. The fuzzer runs the same entry without end.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use mesh_proto::{Frame, Header, Kind, Part, Placement, ProcAddr, Target};
use proptest::prelude::*;
use support::{config, entry, frame, on_the_wire};

proptest! {
    #![proptest_config(config(400, 3))]

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        entry::feed(&bytes);
    }

    #[test]
    fn truncated_flipped_and_spliced_frames(
        frames in prop::collection::vec(frame(), 1..4),
        piece in any::<u8>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        splice in prop::option::of((any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 0..64))),
    ) {
        let mut bytes = on_the_wire(&frames);
        for (at, mask) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        if let Some((at, extra)) = splice {
            let at = at.index(bytes.len());
            bytes.splice(at..at, extra);
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        bytes.insert(0, piece);
        entry::feed(&bytes);
    }

    /// The header is sound, so that every byte of the body is believed: tables, regions and parts at random.
    #[test]
    fn hostile_bodies_behind_a_sound_header(
        body in prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(255), Just(128)], 0..600),
        name in 0_u16..40,
        target in 0_u16..80,
        parts in 0_u16..30,
    ) {
        let me = ProcAddr::CONTROLLER;
        let mut header = Header::new(Kind::Call, me, me);
        header.body_len = body.len() as u64;
        (header.name_len, header.target_len, header.parts) = (name, target, parts);
        if Header::decode(&header.encode()).is_ok() {
            entry::look_into(&Frame { header, body: body.clone().into() });
        }
        let mut bytes = vec![9];
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(&body);
        entry::feed(&bytes);
    }
}

/// A stream of numbers that is the same with every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % (below as u64)).unwrap()
    }
}

/// What the fuzzer does, for a fixed number of rounds and on any compiler: inputs grow out of each other.
#[test]
fn thousands_of_mutations() {
    let me = ProcAddr::CONTROLLER;
    let extent = mesh_topology::Extent::new([("procs", 8_usize)]).unwrap();
    let region = mesh_topology::Region::whole(&extent);
    let cast = Target::Many(0, region, Placement::On(0));
    let parts = [Part::Inline(vec![1; 30].into()), Part::Inline(vec![2; 300].into())];
    let seeds = [
        Frame::build(Header::new(Kind::Hello, me, me), None, b"", &[]),
        Frame::build(Header::new(Kind::Call, me, me), Some(&cast), b"step", &parts),
        Frame::build_plain(Header::new(Kind::Reply, me, me), None, b"", &[5; 90]),
    ];
    let mut pool: Vec<Vec<u8>> = vec![[vec![3], on_the_wire(&seeds)].concat()];
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for _ in 0..4_000 {
        let mut bytes = pool[dice.roll(pool.len())].clone();
        for _ in 0..=dice.roll(4) {
            let at = dice.roll(bytes.len());
            match dice.roll(6) {
                0 => bytes[at] = u8::try_from(dice.roll(256)).unwrap(),
                1 => bytes[at] ^= 1 << dice.roll(8),
                2 => bytes[at] = [0, 1, 127, 128, 255][dice.roll(5)],
                3 => drop(bytes.drain(at..(at + dice.roll(20)).min(bytes.len()))),
                4 => bytes.extend_from_within(at..),
                _ => bytes.insert(at, u8::try_from(dice.roll(256)).unwrap()),
            }
            if bytes.is_empty() {
                bytes.push(1);
            }
            bytes.truncate(4096);
        }
        entry::feed(&bytes);
        if pool.len() < 64 {
            pool.push(bytes);
        } else {
            let at = 1 + dice.roll(63);
            pool[at] = bytes;
        }
    }
}
