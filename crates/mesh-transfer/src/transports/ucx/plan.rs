//! The parts of an operation: which bytes of this process correspond to which of the owner's.

use super::objects::Key;
use super::wire::Name;
use crate::error::{ErrorKind, TransferError};
use crate::handle::Handle;
use crate::operation::Op;
use crate::operation::Work;
use crate::segments::Segments;
use std::collections::{HashMap, VecDeque};

/// The most that one UCX request moves.
const PIECE: u64 = 16 << 20;

/// An export of the owner.
#[derive(Debug)]
pub(super) struct Export {
    pub(super) state: State,
    /// The number of operations that use it.
    pub(super) users: usize,
    /// Closed by its owner: leave it after the last user.
    pub(super) is_revoked: bool,
}

#[derive(Debug)]
pub(super) enum State {
    Asked,
    Shown { writable: bool, segments: Segments, key: Option<Key> },
    Refused(ErrorKind),
}

/// A part of an operation.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: Name,
    pub(super) verb: Verb,
    pub(super) here: u64,
    pub(super) there: u64,
    pub(super) len: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    Get,
    Put,
}

fn is_write(op: &Op) -> bool {
    matches!(op.work, Work::Write { .. })
}

pub(super) fn name_of(handle: &Handle) -> Name {
    (handle.slot, handle.generation)
}

pub(super) fn dropped() -> TransferError {
    TransferError::closed(None)
}

/// None until the owner has shown all exports. Checks everything a hostile handle may say against what the owner says.
pub(super) fn plan(ops: &[Op], entries: &HashMap<Name, Export>) -> Result<Option<VecDeque<Part>>, TransferError> {
    let refused = |why: &str| TransferError::refused(why);
    let is_asked = |op: &Op| entries.get(&name_of(&op.handle)).is_some_and(|entry| matches!(entry.state, State::Asked));
    if ops.iter().any(is_asked) {
        return Ok(None);
    }
    let mut parts = VecDeque::new();
    for op in ops {
        let name = name_of(&op.handle);
        let Some(entry) = entries.get(&name) else { return Err(dropped()) };
        let (writable, there) = match &entry.state {
            State::Shown { writable, segments, .. } => (*writable, segments),
            State::Asked | State::Refused(ErrorKind::Gone) => return Err(dropped()),
            State::Refused(ErrorKind::Refused) => return Err(refused("the owner does not recognise this handle")),
            State::Refused(_) => {
                return Err(TransferError::transport("the owner cannot offer this memory by UCX"));
            }
        };
        let (Work::Read { local, .. } | Work::Write { local, .. }) = &op.work else {
            return Err(TransferError::transport("UCX is used for reads and writes only"));
        };
        if entry.is_revoked {
            return Err(dropped());
        }
        if is_write(op) && !writable {
            return Err(refused("the owner offers this memory for reading only"));
        }
        let (offset, len) = op.work.span();
        let start = op.handle.start.checked_add(offset);
        let Some(start) = start.filter(|start| start.checked_add(len).is_some_and(|end| end <= there.len())) else {
            return Err(refused("the handle names more than the owner offers"));
        };
        let verb = if is_write(op) { Verb::Put } else { Verb::Get };
        let mut theirs = there.window(start, len);
        let mut rest = theirs.next();
        for mut piece in local.window(0, len) {
            while piece.len > 0
                && let Some(place) = &mut rest
            {
                let step = piece.len.min(place.len).min(PIECE);
                parts.push_back(Part { name, verb, here: piece.addr, there: place.addr, len: step });
                piece.addr += step;
                piece.len -= step;
                place.addr += step;
                place.len -= step;
                if place.len == 0 {
                    rest = theirs.next();
                }
            }
        }
    }
    Ok(Some(parts))
}
