//! Messages to actors and their answers: one type for each kind, with the only function that makes its header and the
//! only one that reads it.
//!
//! What a header's fields and flags mean depends on the kind; only these types know it. They are small and `Copy`:
//! reading one costs a few comparisons, and no memory. They do not touch names, which have their own type ([`Name`]),
//! or payloads: both stay in the frame's body.
//!
//! MSG-1: whatever bytes a header has, it is read as something that one of these types can express, or refused with a
//! [`MessageError`]. What was read is written as the same fields and flags again.

mod answers;
mod meaning;
mod names;
mod ports;
mod requests;

pub(crate) use answers::is_mergeable;
pub use answers::{Answer, Gathered, ProcUp, Reply, Unlooked, Unseen};
pub use meaning::{Asked, Meaning, Returned, merged_call};
pub use names::Name;
pub use ports::{Partial, Post};
pub use requests::{Call, Cancel, Cancelled, Extend, Failure, Request, Spawn, SpawnPart, StopActor, Task, Tell};

use crate::frame::flags;
use crate::{Header, Kind};
use thiserror::Error;

/// A header that no process of this version makes.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a frame of kind {kind:?} {what}")]
pub struct MessageError {
    /// The frame's kind.
    pub kind: Kind,
    /// What is wrong with it.
    pub what: &'static str,
}

/// The header's flags that belong to its kind, if the kind is `kind` and there are no flags besides `own`.
fn flags_of(header: &Header, kind: Kind, own: u16) -> Result<u16, MessageError> {
    let bits = header.flags & !flags::OF_FRAMES;
    if header.kind != kind {
        return Err(refused(header, "is read as another kind"));
    }
    if bits & !own != 0 {
        return Err(refused(header, "has a flag that means nothing there"));
    }
    Ok(bits)
}

/// Returns `number` if it is not 0; otherwise refuses the header with `what`.
fn number(header: &Header, number: u64, what: &'static str) -> Result<u64, MessageError> {
    if number == 0 { Err(refused(header, what)) } else { Ok(number) }
}

fn refused(header: &Header, what: &'static str) -> MessageError {
    MessageError { kind: header.kind, what }
}

const NO_CALL: &str = "names no call";
const NO_ACTOR: &str = "names no actor";
const HAS_CALL: &str = "names a call that nobody waits for";
