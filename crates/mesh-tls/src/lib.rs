//! Encryption between hosts: mutual TLS 1.3, in which both sides prove that they belong to the job by certificates of
//! the job's own authority. It cannot be switched off.
//!
//! TLS-1: nobody is admitted without a certificate of this job's authority that is valid now and not revoked.
//! TLS-2: no record number is used twice with a key ([`record`]).
//! TLS-3: a peer that has not authenticated costs a limited number of bytes and seconds, and is told nothing but an
//! alert.

mod authority;
mod budget;
mod der;
mod dial;
mod error;
mod facts;
mod files;
mod identity;
mod listener;
mod provider;
mod record;
mod role;
mod split_stream;
mod store;
mod stream;
#[cfg(test)]
mod tests;
mod verify;
mod whole;

pub use authority::{Authority, CLOCK_SKEW, Issued, Revocation};
pub use dial::{DialError, Dialed, Pace, dial, resolve, split_address};
pub use error::{CredentialError, Reason, TlsError};
pub use facts::PeerFacts;
pub use identity::Identity;
pub use listener::{Limits, ListenError, Listener, ListenerEvent};
pub use record::Truncated;
pub use role::Role;
pub use split_stream::{MOST_QUEUED, TlsReader, TlsWriter};
pub use store::{Entry, Store, certificates_in};
pub use stream::{MOST_HANDSHAKE, Progress, TlsStream};

/// A duration in the kernel's form.
pub(crate) fn timespec(limit: std::time::Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    }
}
