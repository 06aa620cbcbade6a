//! The references to kept values in a message, as the runtimes on its way see them.
//!
//! They follow the envelope, so that a process that drops a message unread can give them back without unpickling it.

use crate::{ProcAddr, Ticket};

/// One reference in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The process that keeps the value.
    pub owner: ProcAddr,
    /// The value's number there.
    pub id: u64,
    /// The ticket under which it travels; see [`crate::Holders`].
    pub ticket: Ticket,
}

const LEN: usize = 32;
const COUNT: usize = 4;

impl Carried {
    /// How many bytes this many references take.
    #[must_use]
    pub fn size(count: usize) -> usize {
        LEN * count + COUNT
    }

    /// An envelope with references after it.
    ///
    /// # Panics
    /// If there are more than 2^32.
    #[must_use]
    pub fn append(payload: &[u8], all: &[Self]) -> Vec<u8> {
        let mut out = Vec::with_capacity(payload.len() + LEN * all.len() + COUNT);
        out.extend_from_slice(payload);
        for one in all {
            out.extend_from_slice(&one.owner.mesh.to_le_bytes());
            out.extend_from_slice(&one.owner.rank.to_le_bytes());
            out.extend_from_slice(&one.owner.host.to_le_bytes());
            out.extend_from_slice(&one.id.to_le_bytes());
            out.extend_from_slice(&one.ticket.to_le_bytes());
        }
        let count = u32::try_from(all.len()).expect("no memory holds so many references");
        out.extend_from_slice(&count.to_le_bytes());
        out
    }

    /// Where the envelope ends, and the references after it; `None` if the bytes are something else.
    #[must_use]
    pub fn split(raw: &[u8]) -> Option<(usize, Vec<Self>)> {
        let (rest, count) = raw.split_last_chunk::<COUNT>()?;
        let bytes = usize::try_from(u32::from_le_bytes(*count)).ok()?.checked_mul(LEN)?;
        let end = rest.len().checked_sub(bytes)?;
        let number = |raw: &[u8], at: usize| raw[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let small = |raw: &[u8], at: usize| raw[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        let read = |raw: &[u8]| Self {
            owner: ProcAddr { mesh: number(raw, 0), rank: small(raw, 8), host: small(raw, 12) },
            id: number(raw, 16),
            ticket: number(raw, 24),
        };
        Some((end, rest[end..].chunks_exact(LEN).map(read).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::Carried;
    use crate::ProcAddr;

    #[test]
    fn what_stands_behind_an_envelope_is_found_again() {
        let one = |id| Carried { owner: ProcAddr { mesh: 1 << 40, rank: 7, host: 3 }, id, ticket: u64::MAX - id };
        for count in 0..4 {
            let all: Vec<_> = (0..count).map(one).collect();
            assert_eq!(Carried::split(&Carried::append(b"envelope", &all)), Some((8, all)));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        for raw in [&b""[..], b"abc", &[0xff; 4], &[1, 0, 0, 0], &[0xff; 36]] {
            assert_eq!(Carried::split(raw), None);
        }
        assert_eq!(Carried::split(&[0; 4]), Some((0, vec![])));
    }
}
