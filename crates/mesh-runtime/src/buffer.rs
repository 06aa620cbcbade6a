//! Buffers of messages, as they lie at the sender.

use bytes::Bytes;

/// Memory that becomes one part of a message: one piece, or many small ones that are laid side by side.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<'a>(&'a [&'a [u8]]);

impl<'a> Buffer<'a> {
    /// Each piece begins at a multiple of this, the length of a cache line, which numerical code may rely on.
    const ALIGN: usize = 64;

    /// A buffer of these pieces.
    #[must_use]
    pub fn of(pieces: &'a [&'a [u8]]) -> Self {
        Self(pieces)
    }

    /// Where the next piece begins in a buffer whose pieces so far end at `end`.
    #[must_use]
    pub fn after(end: usize) -> usize {
        end.next_multiple_of(Self::ALIGN)
    }

    /// The number of bytes, with those between the pieces.
    #[must_use]
    pub fn len(self) -> usize {
        self.0.iter().fold(0, |end, piece| Self::after(end) + piece.len())
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The pieces, each with its place in the buffer.
    pub fn pieces(self) -> impl Iterator<Item = (usize, &'a [u8])> {
        self.0.iter().scan(0, |end, piece| {
            let at = Self::after(*end);
            *end = at + piece.len();
            Some((at, *piece))
        })
    }

    /// A copy of its bytes.
    #[must_use]
    pub fn to_bytes(self) -> Bytes {
        if let [piece] = self.0 {
            return Bytes::copy_from_slice(piece);
        }
        let mut joined = Vec::with_capacity(self.len());
        for (at, piece) in self.pieces() {
            joined.resize(at, 0);
            joined.extend_from_slice(piece);
        }
        joined.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_begin_at_cache_lines_and_are_where_the_copy_has_them() {
        for lens in [&[][..], &[0], &[5], &[64, 64], &[1, 0, 63, 65, 200, 7]] {
            let owned: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, len)| vec![i as u8 + 1; *len]).collect();
            let pieces: Vec<&[u8]> = owned.iter().map(Vec::as_slice).collect();
            let buffer = Buffer::of(&pieces);
            let bytes = buffer.to_bytes();
            assert_eq!(bytes.len(), buffer.len());
            assert_eq!(buffer.pieces().count(), lens.len());
            for (at, piece) in buffer.pieces() {
                assert_eq!(at % Buffer::ALIGN, 0);
                assert_eq!(&bytes[at..at + piece.len()], piece);
            }
            let data: usize = lens.iter().sum();
            assert_eq!(
                bytes.iter().filter(|byte| **byte == 0).count(),
                bytes.len() - data,
                "what lies between is zero"
            );
        }
    }
}
