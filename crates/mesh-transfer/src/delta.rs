//! The changes between two versions of the same memory, encoded in fewer bytes than the memory has.
//!
//! DLT-1: the old version and the changes yield the new version, bit by bit, whatever the bytes mean.
//! DLT-2: changes that do not belong to memory of this length are refused, and nothing outside it is written.
//!
//! Memory is compared in units of 1, 2, 4 or 8 bytes, the size of its numbers. There are two streams: gaps and units. A
//! gap is the number of unchanged units before a changed one; 255 stands for 255 unchanged units with no changed one
//! after them. If one bfloat16 in fifty has changed, each change costs three bytes.

use crate::error::{ErrorKind, TransferError};

const LONG: u8 = 255;
/// Bytes compared at once: units are compared only where a block differs.
const BLOCK: usize = 64;
/// The unit, and the lengths of both streams.
const HEAD: usize = 24;

/// Returns the changes from `old` to `new`; none if they take more than `limit` bytes.
///
/// # Errors
/// If the lengths differ or are no multiple of `unit`, or if `unit` is not the size of a number.
pub fn find_changes(old: &[u8], new: &[u8], unit: usize, limit: usize) -> Result<Option<Vec<u8>>, TransferError> {
    if old.len() != new.len() || !old.len().is_multiple_of(unit.max(1)) {
        return Err(refused(format!(
            "both versions must have one length, a multiple of {unit}, got {} and {}",
            old.len(),
            new.len()
        )));
    }
    match unit {
        1 => Ok(find_in::<1>(old, new, limit)),
        2 => Ok(find_in::<2>(old, new, limit)),
        4 => Ok(find_in::<4>(old, new, limit)),
        8 => Ok(find_in::<8>(old, new, limit)),
        _ => Err(refused(format!("a unit must have 1, 2, 4 or 8 bytes, got {unit}"))),
    }
}

fn find_in<const U: usize>(old: &[u8], new: &[u8], limit: usize) -> Option<Vec<u8>> {
    let (mut gaps, mut units) = (Vec::new(), Vec::new());
    // Unchanged units since the last changed one.
    let mut same = 0_usize;
    for (was, is) in old.chunks(BLOCK).zip(new.chunks(BLOCK)) {
        if was == is {
            same += is.len() / U;
            continue;
        }
        for (was, is) in was.as_chunks::<U>().0.iter().zip(is.as_chunks::<U>().0) {
            if was == is {
                same += 1;
                continue;
            }
            gaps.resize(gaps.len() + same / usize::from(LONG), LONG);
            gaps.push((same % usize::from(LONG)) as u8);
            units.extend_from_slice(is);
            same = 0;
        }
        if HEAD + gaps.len() + units.len() > limit {
            return None;
        }
    }
    let mut made = Vec::with_capacity(HEAD + gaps.len() + units.len());
    for number in [U, gaps.len(), units.len()] {
        made.extend_from_slice(&(number as u64).to_le_bytes());
    }
    made.extend_from_slice(&gaps);
    made.extend_from_slice(&units);
    (made.len() <= limit).then_some(made)
}

/// Turns the old version, in `memory`, into the new one.
///
/// # Errors
/// If the changes do not fit memory of this length. It may then have been changed in part.
pub fn apply_changes(memory: &mut [u8], changes: &[u8]) -> Result<(), TransferError> {
    let (head, rest) = changes.split_at_checked(HEAD).ok_or_else(|| refused("the changes have no beginning"))?;
    let number = |at: usize| head.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    let [Some(unit), Some(gaps), Some(units)] = [number(0), number(8), number(16)] else {
        return Err(refused("the changes have no beginning"));
    };
    let split = usize::try_from(gaps).ok().and_then(|gaps| rest.split_at_checked(gaps));
    let Some((gaps, values)) = split.filter(|(_, values)| values.len() as u64 == units) else {
        return Err(refused("the changes are not as long as they say"));
    };
    match unit {
        1 => apply_in::<1>(memory, gaps, values),
        2 => apply_in::<2>(memory, gaps, values),
        4 => apply_in::<4>(memory, gaps, values),
        8 => apply_in::<8>(memory, gaps, values),
        _ => Err(refused(format!("a unit must have 1, 2, 4 or 8 bytes, got {unit}"))),
    }
}

fn apply_in<const U: usize>(memory: &mut [u8], gaps: &[u8], values: &[u8]) -> Result<(), TransferError> {
    let places = memory.as_chunks_mut::<U>().0;
    let (values, rest) = values.as_chunks::<U>();
    let (mut values, mut at) = (values.iter(), 0_usize);
    for gap in gaps {
        at = at.saturating_add(usize::from(*gap));
        if *gap == LONG {
            continue;
        }
        let (Some(place), Some(value)) = (places.get_mut(at), values.next()) else {
            return Err(refused("the changes go beyond the memory, or lack some"));
        };
        *place = *value;
        at += 1;
    }
    if values.next().is_some() || !rest.is_empty() {
        return Err(refused("there are more changes than places for them"));
    }
    Ok(())
}

fn refused(why: impl Into<String>) -> TransferError {
    TransferError::new(ErrorKind::Invalid, why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom numbers, the same each time.
    fn drawn(seed: u64) -> impl FnMut(usize) -> usize {
        let mut state = seed | 1;
        move |below| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below.max(1) as u64) as usize
        }
    }

    #[test]
    fn old_and_changes_make_new() {
        for seed in 1..200 {
            let mut dice = drawn(seed * 7919);
            let unit = [1, 2, 4, 8][dice(4)];
            let length = dice(3000);
            let old: Vec<u8> = (0..length * unit).map(|_| dice(256) as u8).collect();
            let mut new = old.clone();
            let most = [1, 5, 400][dice(3)];
            for _ in 0..dice(most) {
                if let Some(byte) = {
                    let at = dice(new.len());
                    new.get_mut(at)
                } {
                    *byte ^= dice(256) as u8;
                }
            }
            let changes = find_changes(&old, &new, unit, usize::MAX).unwrap().unwrap();
            let mut memory = old.clone();
            apply_changes(&mut memory, &changes).unwrap();
            assert_eq!(memory, new, "seed {seed}");
            assert_eq!(find_changes(&old, &new, unit, changes.len()).unwrap().as_ref(), Some(&changes));
            assert_eq!(find_changes(&old, &new, unit, changes.len() - 1).unwrap(), None);
        }
    }

    #[test]
    fn one_in_fifty_takes_less_than_four_hundredths() {
        let mut dice = drawn(5);
        let old: Vec<u8> = (0..1 << 20).map(|_| dice(256) as u8).collect();
        let mut new = old.clone();
        for at in 0..new.len() / 2 {
            if dice(50) == 0 {
                new[at * 2] ^= 1;
            }
        }
        let changes = find_changes(&old, &new, 2, usize::MAX).unwrap().unwrap();
        assert!(changes.len() * 25 <= new.len(), "{} of {}", changes.len(), new.len());
    }

    /// DLT-2.
    #[test]
    fn what_does_not_belong_to_the_memory_is_refused() {
        let (old, new) = ([0_u8; 4096], [1_u8; 4096]);
        let changes = find_changes(&old, &new, 2, usize::MAX).unwrap().unwrap();
        assert!(apply_changes(&mut [0; 4094], &changes).is_err());
        for len in 0..changes.len() {
            assert!(apply_changes(&mut [0; 4096], &changes[..len]).is_err(), "{len}");
        }
        assert!(apply_changes(&mut [0; 4096], &[&changes[..], b"x"].concat()).is_err());
        let mut dice = drawn(3);
        for _ in 0..5000 {
            let mut hostile = changes[..dice(changes.len())].to_vec();
            for _ in 0..dice(40) {
                if let Some(byte) = {
                    let at = dice(hostile.len().min(60));
                    hostile.get_mut(at)
                } {
                    *byte = dice(256) as u8;
                }
            }
            // Any result will do, as long as nothing panics.
            let _ = apply_changes(&mut [0; 4096], &hostile);
        }
        assert!(find_changes(&old, &new[..2], 2, 99).is_err());
        assert!(find_changes(&old, &new, 3, 99).is_err() && find_changes(&old, &new, 0, 99).is_err());
        assert!(find_changes(&old[..3], &new[..3], 2, 99).is_err());
    }
}
