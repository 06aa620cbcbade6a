//! Frames as they travel between hosts.

use super::{Cargo, Lane, Short};
use crate::control::down_of;
use crate::{Frame, HEADER_LEN, Header};
use bytes::Bytes;

/// Bodies up to this length are copied behind their header: one piece is cheaper than two.
const SMALL: usize = 1024;

impl Cargo {
    /// The pieces of a frame with this header.
    #[must_use]
    pub fn new(header: &Header, frame: Short<Bytes>) -> Self {
        // The notice of a proc's end travels in that proc's lane, so it cannot overtake what the proc sent.
        let sender = down_of(header).unwrap_or(header.src);
        let lane = Lane { sender: (sender.mesh, sender.rank, sender.host), mesh: header.dst.mesh };
        Self { frame, lane }
    }

    /// A frame without shared memory, in one piece or two.
    #[must_use]
    pub fn of(frame: &Frame) -> Self {
        let head = frame.header.encode();
        let pieces = if frame.body.len() > SMALL {
            Short::from([Bytes::copy_from_slice(&head), frame.body.clone()])
        } else {
            let mut whole = Vec::with_capacity(HEADER_LEN + frame.body.len());
            whole.extend_from_slice(&head);
            whole.extend_from_slice(&frame.body);
            Short::from_iter([Bytes::from(whole)])
        };
        Self::new(&frame.header, pieces)
    }
}

impl Frame {
    /// Reassembles a frame from its pieces. `None` if they do not form one.
    #[must_use]
    pub fn from_pieces(pieces: &[Bytes]) -> Option<Self> {
        let whole = match pieces {
            [one] => one.clone(),
            [head, body] if head.len() == HEADER_LEN => {
                let header = Header::decode(head.first_chunk::<HEADER_LEN>()?).ok()?;
                return (header.body_len == body.len() as u64).then(|| Self { header, body: body.clone() });
            }
            many => many.concat().into(),
        };
        let header = Header::decode(whole.first_chunk::<HEADER_LEN>()?).ok()?;
        let is_whole = header.body_len == (whole.len() - HEADER_LEN) as u64;
        is_whole.then(|| Self { header, body: whole.slice(HEADER_LEN..) })
    }
}
