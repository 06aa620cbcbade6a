//! Why a host is no longer part of the job: codes that programs act on, beside the text for people.

use crate::codes::codes;
use std::fmt;

codes! {
    /// Why the controller declared a host dead.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Fate {
        /// The text is all that is known.
        #[default]
        Other = 0,
        /// Silent for the whole heartbeat window.
        Silent = 1,
        /// The connection was lost, and connecting again failed.
        Unreachable = 2,
        /// It refuses to continue.
        Refused = 3,
        /// It was restarted: what ran there is gone.
        Restarted = 4,
        /// It said farewell.
        Left = 5,
        /// Its credentials, or this side's, are no longer valid.
        Expelled = 6,
        /// It was never part of the job: it could not be attached.
        NotAttached = 7,
        /// It was never part of the job: one side does not accept the other's credentials.
        NotAuthenticated = 8,
        /// The job released it in order.
        Released = 9,
        /// It is not part of the job, or not yet.
        Absent = 10,
    }
}

impl Fate {
    /// The code on the wire.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Decodes a code. One that this side does not know is [`Fate::Other`].
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

    /// One word, for programs.
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
        /// Only the text tells the reason.
        #[default]
        Other = 0,
        /// The job is over. From the controller, this is an order.
        JobOver = 1,
        /// The sender's agent was stopped.
        Stopped = 2,
        /// The sender was declared dead or has lost the controller, and stops its work.
        CutOff = 3,
        /// The *receiver* was declared dead. Counts only from the controller, or from a host between the two.
        YouAreDead = 4,
    }
}

impl Parting {
    /// Decodes a code. One that this side does not know is [`Parting::Other`].
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
