//! What became of an attempt to reach a host. Whatever is decided by it is a code; texts are for people alone.

use mesh_proto::hosts::Fate;

/// Why a host was dialed in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missed {
    /// For the program.
    pub(super) fate: Fate,
    /// For people.
    pub(super) why: String,
    /// It is certainly not there, or not any more: trying again is of no use.
    pub(super) gone: bool,
}

impl Missed {
    /// It may be reached another time.
    pub(super) fn for_now(why: impl Into<String>) -> Self {
        Self { fate: Fate::Unreachable, why: why.into(), gone: false }
    }

    /// It never will.
    pub(super) fn for_good(fate: Fate, why: impl Into<String>) -> Self {
        Self { fate, why: why.into(), gone: true }
    }
}
