//! Copying large parts into shared memory as fast as the machine's memory allows.
//!
//! A part that is larger than any cache is written past the caches: an ordinary store would first read the line that it
//! is about to overwrite. And one core cannot use all of the memory's bandwidth, so that a long copy is shared with a
//! core that has nothing to do.

/// From this length on stores go past the caches.
const STREAM: usize = 2 * 1024 * 1024;
/// From this length on a second core is worth its waking.
const SHARE: usize = 8 * 1024 * 1024;
/// More cores than this do not make memory faster.
const LANES: usize = 4;

#[derive(Clone, Copy)]
struct Place(*mut u8);

// SAFETY: only handed to scoped threads that each write a range of their own.
unsafe impl Send for Place {}

/// Copies `from` to `to`, on up to `spare` cores beside this one.
///
/// # Safety
/// `to` must be writable for as many bytes, by nobody else meanwhile, and not overlap `from`.
pub(crate) unsafe fn copy(from: &[u8], to: *mut u8, spare: usize) {
    let lanes = if from.len() < SHARE { 1 } else { (spare + 1).min(LANES) };
    let step = from.len().div_ceil(lanes).next_multiple_of(64).max(1);
    std::thread::scope(|scope| {
        for (i, piece) in from.chunks(step).enumerate().skip(1) {
            // SAFETY: inside the range that the caller vouches for.
            let place = Place(unsafe { to.add(i * step) });
            let work = move || {
                let place = place;
                // SAFETY: each lane has its own piece of the caller's range.
                unsafe { copy_one(piece, place.0) };
            };
            let spawned = std::thread::Builder::new().name("mesh-copy".to_owned()).stack_size(64 * 1024);
            if spawned.spawn_scoped(scope, work).is_err() {
                // No thread to be had: this one does it.
                work();
            }
        }
        // SAFETY: the first piece, which no other lane has.
        unsafe { copy_one(&from[..step.min(from.len())], to) };
    });
}

/// # Safety
/// As for [`copy`].
unsafe fn copy_one(from: &[u8], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    if from.len() >= STREAM && to.align_offset(16) == 0 {
        // SAFETY: as the caller vouches; the alignment was just checked.
        return unsafe { stream(from, to) };
    }
    // SAFETY: as the caller vouches.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}

/// # Safety
/// As for [`copy`]; `to` must be aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: &[u8], to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let whole = from.len() / 64 * 64;
    let src = from.as_ptr();
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + 64 <= whole <= len` on both sides; SSE2 is part of x86-64; `to` is aligned, and `at` a multiple
        // of 64.
        unsafe {
            let line = src.add(at).cast::<__m128i>();
            let (a, b) = (_mm_loadu_si128(line), _mm_loadu_si128(line.add(1)));
            let (c, d) = (_mm_loadu_si128(line.add(2)), _mm_loadu_si128(line.add(3)));
            let place = to.add(at).cast::<__m128i>();
            _mm_stream_si128(place, a);
            _mm_stream_si128(place.add(1), b);
            _mm_stream_si128(place.add(2), c);
            _mm_stream_si128(place.add(3), d);
        }
        at += 64;
    }
    // SAFETY: part of SSE; it orders the streaming stores with later ones, which nothing else does.
    unsafe { _mm_sfence() };
    // SAFETY: the rest, shorter than a line.
    unsafe { std::ptr::copy_nonoverlapping(src.add(whole), to.add(whole), from.len() - whole) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_number_of_lanes_copies_every_byte() {
        let lengths = [0, 1, 63, 64, 65, STREAM - 1, STREAM, STREAM + 17, SHARE - 1, SHARE, SHARE + 4097];
        let from: Vec<u8> = (0..SHARE + 8192).map(|i| (i % 251) as u8).collect();
        for len in lengths {
            for spare in 0..3 {
                for shift in [0, 1] {
                    let mut to = vec![0_u8; len + 128];
                    // SAFETY: a fresh buffer, longer than what is copied.
                    unsafe { copy(&from[shift..shift + len], to.as_mut_ptr().add(shift), spare) };
                    assert_eq!(to[shift..shift + len], from[shift..shift + len], "{len} bytes, {spare} spare");
                    assert!(to[shift + len..].iter().all(|byte| *byte == 0), "wrote beyond {len} bytes");
                }
            }
        }
    }
}
