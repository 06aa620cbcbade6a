//! Strided memory as lists of pieces, against the plain definition.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use mesh_transfer::{MAX_SEGMENTS, Segment, Segments};
use proptest::prelude::*;

/// The address of every byte of an array, in row-major order.
fn every_byte(addr: u64, shape: &[u64], strides: &[i64], item: u64) -> Vec<u64> {
    let mut all = vec![addr];
    for (size, stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|at| (0..*size).map(move |i| at.wrapping_add_signed(stride * i as i64))).collect();
    }
    all.iter().flat_map(|at| (0..item).map(move |byte| at + byte)).collect()
}

fn bytes_of(pieces: impl Iterator<Item = Segment>) -> Vec<u64> {
    pieces.flat_map(|piece| piece.addr..piece.addr + piece.len).collect()
}

proptest! {
    #[test]
    fn every_byte_is_there_in_order(
        dims in prop::collection::vec((0_u64..5, -40_i64..40), 0..4),
        item in 1_u64..9,
        start in 0_u64..200,
        len in 0_u64..200,
    ) {
        let (shape, strides): (Vec<u64>, Vec<i64>) = dims.into_iter().unzip();
        let expected = every_byte(1 << 20, &shape, &strides, item);
        let segments = Segments::strided(1 << 20, &shape, &strides, item).unwrap();
        prop_assert_eq!(segments.len(), expected.len() as u64);
        prop_assert_eq!(&bytes_of(segments.list().iter().copied()), &expected);
        prop_assert!(segments.list().iter().all(|piece| piece.len > 0));
        prop_assert!(segments.list().windows(2).all(|two| two[0].addr + two[0].len != two[1].addr));
        let start = start.min(segments.len());
        let len = len.min(segments.len() - start);
        let window = &expected[start as usize..(start + len) as usize];
        prop_assert_eq!(&bytes_of(segments.window(start, len)), window);
        prop_assert_eq!(&bytes_of(segments.cut(start, len).list().iter().copied()), window);
    }

    #[test]
    fn nonsense_is_refused_and_nothing_overflows(
        addr in any::<u64>(),
        dims in prop::collection::vec((any::<u64>(), any::<i64>()), 0..4),
        item in any::<u64>(),
    ) {
        let (shape, strides): (Vec<u64>, Vec<i64>) = dims.into_iter().unzip();
        if let Ok(segments) = Segments::strided(addr, &shape, &strides, item) {
            prop_assert!(segments.list().iter().all(|piece| piece.addr.checked_add(piece.len).is_some()));
        }
    }
}

#[test]
fn contiguous_arrays_are_one_piece() {
    let rows = Segments::strided(4096, &[3, 5, 7], &[280, 56, 8], 8).unwrap();
    assert_eq!(rows.list(), [Segment { addr: 4096, len: 3 * 5 * 7 * 8 }]);
    assert!(Segments::strided(0, &[0, 5], &[8, 8], 8).unwrap().is_empty());
}

#[test]
fn too_many_pieces_are_an_error_that_says_what_to_do() {
    let many = MAX_SEGMENTS as u64 + 1;
    let error = Segments::strided(4096, &[many], &[16], 8).unwrap_err();
    assert!(error.message.contains("contiguous copy"), "{error}");
}

#[test]
fn overlaps_are_those_of_bytes_and_not_of_what_lies_around_them() {
    let even = Segments::strided(1000, &[8], &[2], 1).unwrap();
    let odd = Segments::strided(1001, &[8], &[2], 1).unwrap();
    assert!(!even.overlaps(&odd) && !odd.overlaps(&even));
    // Back to front.
    let backwards = Segments::strided(1014, &[8], &[-2], 1).unwrap();
    assert!(even.overlaps(&backwards) && !odd.overlaps(&backwards));
    assert!(Segments::one(1015, 10).overlaps(&odd) && !Segments::one(1015, 10).overlaps(&even));
    assert!(!Segments::one(1016, 10).overlaps(&odd));
    assert!(!Segments::default().overlaps(&odd) && !odd.overlaps(&Segments::default()));
}

#[test]
fn a_part_lies_inside() {
    let memory = Segments::strided(1000, &[4], &[10], 3).unwrap();
    assert_eq!(memory.part(2, 5).unwrap().len(), 5);
    assert_eq!(memory.part(12, 0).unwrap().len(), 0);
    for (start, length) in [(0, 13), (12, 1), (13, 0), (u64::MAX, 2)] {
        assert!(memory.part(start, length).is_err(), "{length} from {start} on");
    }
}
