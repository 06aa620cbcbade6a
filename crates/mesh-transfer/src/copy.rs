//! Copies memory that is mapped here, as fast as the machine's memory allows.

/// From this length on, stores bypass the caches: an ordinary store would first read the line that it overwrites.
const STREAM: usize = 1 << 20;
/// The same for each of many copies that together exceed a cache.
const STREAM_AMONG_MANY: usize = 4096;

/// Copies `len` bytes; `is_one_of_many` says that many more such copies follow.
///
/// # Safety
/// Both must be memory of this process, `to` writable, and not overlap. Other processes may write to either meanwhile:
/// the copy then mixes old and new bytes, as users of shared memory are told.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, is_one_of_many: bool) {
    #[cfg(target_arch = "x86_64")]
    if len >= if is_one_of_many { STREAM_AMONG_MANY } else { STREAM } {
        let ahead = to.align_offset(64).min(len);
        // SAFETY: as the caller vouches; `stream` starts at a line boundary of the target.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, ahead);
            stream(from.add(ahead), to.add(ahead), len - ahead);
        }
        return;
    }
    // SAFETY: as the caller vouches.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// # Safety
/// As for [`copy`]; `to` must be aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let whole = len / 64 * 64;
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + 64 <= whole <= len` on both sides; SSE2 is part of x86-64; `to` is aligned, `at` a multiple of 64.
        unsafe {
            let line = from.add(at).cast::<__m128i>();
            let place = to.add(at).cast::<__m128i>();
            let (a, b) = (_mm_loadu_si128(line), _mm_loadu_si128(line.add(1)));
            let (c, d) = (_mm_loadu_si128(line.add(2)), _mm_loadu_si128(line.add(3)));
            _mm_stream_si128(place, a);
            _mm_stream_si128(place.add(1), b);
            _mm_stream_si128(place.add(2), c);
            _mm_stream_si128(place.add(3), d);
        }
        at += 64;
    }
    // SAFETY: part of SSE; it alone orders the streaming stores before later ones.
    unsafe { _mm_sfence() };
    // SAFETY: the rest, shorter than a line.
    unsafe { std::ptr::copy_nonoverlapping(from.add(whole), to.add(whole), len - whole) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_copies_every_byte_and_no_other() {
        let from: Vec<u8> = (0..STREAM + 8192).map(|at| (at % 251) as u8).collect();
        for len in [0, 1, 63, 4095, 4096, 4097, 4096 + 63, STREAM - 1, STREAM, STREAM + 127] {
            for (shift, is_one_of_many) in [(0, false), (1, true), (63, true), (64, false)] {
                let mut to = vec![0_u8; len + 256];
                // SAFETY: a fresh buffer, longer than what is copied.
                unsafe { copy(from.as_ptr().add(shift), to.as_mut_ptr().add(shift), len, is_one_of_many) };
                assert_eq!(to[shift..shift + len], from[shift..shift + len], "{len} bytes at {shift}");
                assert!(to[..shift].iter().chain(&to[shift + len..]).all(|byte| *byte == 0), "{len} bytes at {shift}");
            }
        }
    }
}
