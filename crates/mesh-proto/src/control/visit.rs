//! How somebody on another machine looks into a job: the agent of the host that they reached passes on what they and
//! the controller tell each other.

use bytes::{BufMut, Bytes, BytesMut};

/// One step of a visit. The agent numbers its visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The number of the visit at that agent.
    pub number: u64,
    /// What happens in it.
    pub step: Step,
}

/// See [`Visit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// To the controller: somebody came.
    Begin,
    /// What one side said; no more than the other has room for.
    Said(Bytes),
    /// The other side took this many bytes, so there is room for as many more.
    Taken(u32),
    /// Nothing follows in either direction.
    End,
}

const HEAD: usize = 9;
const BEGIN: u8 = 1;
const SAID: u8 = 2;
const TAKEN: u8 = 3;
const END: u8 = 4;

impl Visit {
    /// Encodes this as bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (code, said): (u8, &[u8]) = match &self.step {
            Step::Begin => (BEGIN, &[]),
            Step::Said(said) => (SAID, said),
            Step::Taken(bytes) => (TAKEN, &bytes.to_le_bytes()),
            Step::End => (END, &[]),
        };
        let mut raw = BytesMut::with_capacity(HEAD + said.len());
        raw.put_u8(code);
        raw.put_u64_le(self.number);
        raw.extend_from_slice(said);
        raw.freeze()
    }

    /// Decodes bytes; `None` if they are something else.
    #[must_use]
    pub fn decode(raw: &Bytes) -> Option<Self> {
        let (head, rest) = raw.split_first_chunk::<HEAD>()?;
        let step = match (head[0], rest.len()) {
            (BEGIN, 0) => Step::Begin,
            (SAID, _) => Step::Said(raw.slice(HEAD..)),
            (TAKEN, 4) => Step::Taken(u32::from_le_bytes(rest.try_into().ok()?)),
            (END, 0) => Step::End,
            _ => return None,
        };
        let number = head.last_chunk::<8>()?;
        Some(Self { number: u64::from_le_bytes(*number), step })
    }
}
