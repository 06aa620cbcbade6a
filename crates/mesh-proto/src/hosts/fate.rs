//! Why a host has no part in the job any more: what programs decide by, beside the text that people read.

use crate::codes::codes;
use std::fmt;

codes! {
    /// Why a host is dead, by the controller's word.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Fate {
        /// No more is known than the text says.
        #[default]
        Other = 0,
        /// Nothing was heard of it for the window.
        Silent = 1,
        /// It was lost, and could not be connected to again.
        Unreachable = 2,
        /// It refuses to go on.
        Refused = 3,
        /// It was started anew: what ran there is gone.
        Restarted = 4,
        /// It has said that it ends.
        Left = 5,
        /// Its credentials, or those of this side, hold no more.
        Expelled = 6,
        /// It never was part of the job: it could not be attached.
        NotAttached = 7,
        /// It never was part of the job, since one side does not accept the other's credentials.
        NotAuthenticated = 8,
        /// The job has let it go in order.
        Released = 9,
        /// It is not part of the job, or not yet.
        Absent = 10,
    }
}

impl Fate {
    /// As a number on the wire.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// From the wire. A code that this side does not know is [`Fate::Other`].
    ///
    /// ```
    /// # use mesh_proto::hosts::Fate;
    /// assert_eq!(Fate::of(Fate::Left.code().into()), Fate::Left);
    /// assert_eq!(Fate::of(999), Fate::Other);
    /// ```
    #[must_use]
    pub fn of(code: u32) -> Self {
        u8::try_from(code).ok().and_then(Self::from_code).unwrap_or_default()
    }

    /// In one word, for programs.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::Silent => "silent",
            Self::Unreachable => "unreachable",
            Self::Refused => "refused",
            Self::Restarted => "restarted",
            Self::Left => "left",
            Self::Expelled => "expelled",
            Self::NotAttached => "not_attached",
            Self::NotAuthenticated => "not_authenticated",
            Self::Released => "released",
            Self::Absent => "absent",
        }
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

codes! {
    /// Why one end of a connection says farewell.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Parting {
        /// The sender ends for a reason that only the text tells.
        #[default]
        Other = 0,
        /// The job is over. It counts as an order if the controller says it.
        JobOver = 1,
        /// The sender's agent was stopped.
        Stopped = 2,
        /// The sender was declared dead, or has lost the controller, and ends its work.
        CutOff = 3,
        /// The *receiver* was declared dead. It counts only from the controller, or from a host between the two.
        YouAreDead = 4,
    }
}

impl Parting {
    /// From the wire. A code that this side does not know is [`Parting::Other`].
    #[must_use]
    pub fn of(code: u8) -> Self {
        Self::from_code(code).unwrap_or_default()
    }
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Other => "it has ended",
            Self::JobOver => "the job has ended",
            Self::Stopped => "its agent was stopped",
            Self::CutOff => "it was cut off from the job, and has stopped its work",
            Self::YouAreDead => "this host was declared dead",
        })
    }
}
