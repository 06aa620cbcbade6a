//! Turns two lists of pieces into copies for the driver, in as few calls as possible.

use super::driver::Rows;
use crate::segments::Segment;

/// The longest pitch that CUDA takes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = (1 << 31) - 1;

/// Copies from the pieces of one list to those of another of equal length; no copy moves more than `most` bytes.
pub(crate) fn rows_of(
    to: impl Iterator<Item = Segment>,
    from: impl Iterator<Item = Segment>,
    most: u64,
) -> impl Iterator<Item = Rows> {
    let mut pairs = Pairs { to, from, ahead: (NOTHING, NOTHING), most };
    let mut next = pairs.next();
    std::iter::from_fn(move || {
        let mut rows = next.take()?;
        loop {
            next = pairs.next();
            match next {
                Some(one) if joins(&rows, &one, most) => {
                    (rows.to_pitch, rows.from_pitch) = pitches(&rows, &one);
                    rows.rows += 1;
                }
                _ => return Some(rows),
            }
        }
    })
}

/// The distance from the last row to this piece, on both sides.
fn pitches(rows: &Rows, one: &Rows) -> (u64, u64) {
    let last = rows.rows - 1;
    let (to, from) = (rows.to + last * rows.to_pitch, rows.from + last * rows.from_pitch);
    (one.to.wrapping_sub(to), one.from.wrapping_sub(from))
}

fn joins(rows: &Rows, one: &Rows, most: u64) -> bool {
    let (to, from) = pitches(rows, one);
    let fits = |pitch: u64| (rows.width..=MAX_PITCH).contains(&pitch);
    one.width == rows.width
        && rows.len() + one.width <= most
        && fits(to)
        && fits(from)
        && (rows.rows == 1 || (to, from) == (rows.to_pitch, rows.from_pitch))
}

const NOTHING: Segment = Segment { addr: 0, len: 0 };

/// Yields pieces that are contiguous on both sides.
struct Pairs<T, F> {
    to: T,
    from: F,
    ahead: (Segment, Segment),
    most: u64,
}

impl<T: Iterator<Item = Segment>, F: Iterator<Item = Segment>> Iterator for Pairs<T, F> {
    type Item = Rows;

    fn next(&mut self) -> Option<Rows> {
        let (to, from) = &mut self.ahead;
        while to.len == 0 {
            *to = self.to.next()?;
        }
        while from.len == 0 {
            *from = self.from.next()?;
        }
        let len = to.len.min(from.len).min(self.most);
        let one = Rows::one(to.addr, from.addr, len);
        for side in [to, from] {
            side.addr += len;
            side.len -= len;
        }
        Some(one)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::Segments;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn bytes(rows: &[Rows]) -> Vec<(u64, u64)> {
        let each = |rows: &Rows| {
            let rows = *rows;
            (0..rows.rows).flat_map(move |row| {
                (0..rows.width)
                    .map(move |at| (rows.to + row * rows.to_pitch + at, rows.from + row * rows.from_pitch + at))
            })
        };
        rows.iter().flat_map(each).collect()
    }

    #[test]
    fn equally_spaced_pieces_are_one_copy() {
        let to = Segments::one(1 << 20, 600);
        let from = Segments::strided(1 << 30, &[100, 6], &[64, 1], 1).unwrap();
        let made: Vec<Rows> = rows_of(to.window(0, 600), from.window(0, 600), 1 << 20).collect();
        let all = Rows { to: 1 << 20, from: 1 << 30, width: 6, rows: 100, to_pitch: 6, from_pitch: 64 };
        assert_eq!(made, [all]);
    }

    #[test]
    fn no_copy_is_longer_than_is_allowed() {
        let (to, from) = (Segments::one(1 << 20, 1000), Segments::one(1 << 30, 1000));
        let made: Vec<Rows> = rows_of(to.window(0, 1000), from.window(0, 1000), 300).collect();
        assert_eq!(made.iter().map(Rows::len).collect::<Vec<_>>(), [300, 300, 300, 100]);
    }

    proptest! {
        #[test]
        fn every_byte_is_copied_to_its_place(
            to in prop::collection::vec((0_u64..4, 1_u64..9), 1..40),
            from in prop::collection::vec((0_u64..4, 1_u64..9), 1..40),
            most in 1_u64..64,
        ) {
            let place = |list: Vec<(u64, u64)>, mut at: u64| {
                Segments::new(list.into_iter().map(|(gap, len)| {
                    let addr = at + gap;
                    at = addr + len;
                    Segment { addr, len }
                })).unwrap()
            };
            let (to, from) = (place(to, 1 << 20), place(from, 1 << 30));
            let len = to.len().min(from.len());
            let made: Vec<Rows> = rows_of(to.window(0, len), from.window(0, len), most).collect();
            let flat = |segments: &Segments| -> Vec<u64> {
                segments.window(0, len).flat_map(|piece| piece.addr..piece.addr + piece.len).collect()
            };
            let wanted: BTreeMap<u64, u64> = flat(&to).into_iter().zip(flat(&from)).collect();
            let copied = bytes(&made);
            prop_assert_eq!(copied.len() as u64, len);
            prop_assert_eq!(copied.into_iter().collect::<BTreeMap<_, _>>(), wanted);
            prop_assert!(made.iter().all(|rows| rows.len() <= most.max(rows.width)));
        }
    }
}
