//! What the owner of a certificate may do.

use std::fmt;

/// What a certificate's owner may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// May begin a job on a host, and lead it.
    Controller,
    /// May join an existing job.
    Host,
    /// May only look into jobs: it is not a member, and nobody dials it.
    Observer,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Controller, Self::Host, Self::Observer];

    /// Its name in files and certificates.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Host => "host",
            Self::Observer => "observer",
        }
    }

    /// Whether it may look into jobs. A host may not: what runs there need not see the rest.
    #[must_use]
    pub fn may_look(self) -> bool {
        matches!(self, Self::Controller | Self::Observer)
    }

    /// Whether it may take part in jobs.
    #[must_use]
    pub fn may_join(self) -> bool {
        matches!(self, Self::Controller | Self::Host)
    }

    /// The name of its file of a kind.
    pub(crate) fn file(self, kind: &str) -> String {
        format!("{}.{kind}", self.name())
    }

    /// The name that a certificate of this role and job carries.
    pub(crate) fn san(self, job: &str) -> String {
        format!("{}.{job}.mesh", self.name())
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
