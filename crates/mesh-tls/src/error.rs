//! Errors of credentials and of peers.

use super::role::Role;
use rustls::CertificateError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// A job's credentials cannot be made, read or used.
#[derive(Debug, Error)]
pub enum CredentialError {
    /// A file or folder is missing or unusable.
    #[error("cannot {what} {}: {error}", path.display())]
    Io {
        /// What was tried: a verb.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// There is no such folder.
    #[error("folder {} does not exist; {remedy}", path.display())]
    NoFolder {
        /// What was given.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// The revocation list is missing: revoked members would be admitted.
    #[error(
        "{} is missing, so nobody can tell which certificates were revoked: copy it from the folder of the job's owner; if it is \
         lost there, `mesh credentials renew` with that folder writes an empty one, and revoked certificates have to be revoked again",
        path.display()
    )]
    NoList {
        /// Where it should be.
        path: PathBuf,
    },
    /// A folder holds no credentials of the requested kind.
    #[error("{} holds no credentials of {role}; {remedy}", path.display())]
    None {
        /// The folder.
        path: PathBuf,
        /// Whose.
        role: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// Others may read a key.
    #[error(
        "{} may be read or written by others (mode {mode:04o}): whoever has this key is a member of the job; \
         say `chmod 600 {}`, and if others may have read it, make new credentials",
        path.display(), path.display()
    )]
    Readable {
        /// The key's file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A file that is trusted belongs to another user.
    #[error("{} belongs to user {owner}, and this process runs as user {user}: copy it as the user that runs Mesh", path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// A folder in which credentials were to be created belongs to another user.
    #[error(
        "{} belongs to user {owner}, who could replace what is put there, and this process runs as user {user}; nothing was \
         written: take another folder",
        path.display()
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// Others may change who is trusted.
    #[error(
        "{} may be written by everybody (mode {mode:04o}): it says who belongs to the job; say `chmod go-w {}`, and if others \
         may have changed it, copy it again",
        path.display(), path.display()
    )]
    Writable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A file does not contain what it should.
    #[error("{} is damaged: {why}; copy the folder again, or make new credentials", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A certificate has expired.
    #[error("{} has expired: `mesh credentials renew` makes another one for the same key; only that has to be copied", path.display())]
    Expired {
        /// The certificate's file.
        path: PathBuf,
    },
    /// A revoked key.
    #[error("the key {} was revoked and cannot get another certificate; `mesh credentials issue` makes a new key", path.display())]
    Revoked {
        /// The key's file.
        path: PathBuf,
    },
    /// A certificate that Mesh did not issue.
    #[error("this is not a certificate of a Mesh job")]
    NotOurs,
    /// Something already exists there.
    #[error("{} exists already; nothing was written: use another folder, or remove this one first", path.display())]
    Exists {
        /// What is there.
        path: PathBuf,
    },
    /// Nothing from this authority matches the name.
    #[error("this authority has issued no certificate {0:?}; `mesh credentials show` lists those that it has")]
    Unknown(String),
    /// Several certificates match it.
    #[error("{0:?} matches several certificates: give more of the name")]
    Ambiguous(String),
    /// Cryptography failed.
    #[error("cannot {what}: {why}")]
    Crypto {
        /// What was tried: a verb.
        what: &'static str,
        /// What the library said.
        why: String,
    },
}

impl CredentialError {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::Io { what, path, error }
    }

    pub(crate) fn crypto<E: std::fmt::Display>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Crypto { what, why: error.to_string() }
    }
}

/// Why a peer is not admitted, or no longer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Reason {
    /// It showed no certificate.
    #[error("it has no certificate of any job")]
    NoCertificate,
    /// Another authority made its certificate.
    #[error("its certificate is another job's")]
    OtherJob,
    /// Its certificate has expired.
    #[error("its certificate has expired: renew it, or compare the clocks of the two machines")]
    Expired,
    /// Its certificate is from the future.
    #[error("its certificate is not valid yet: compare the clocks of the two machines")]
    NotYet,
    /// Its certificate was revoked.
    #[error("its certificate was revoked")]
    Revoked,
    /// Its role is not the one expected at this address.
    #[error("it is a {found}, where a {expected} is expected")]
    WrongRole {
        /// Its role.
        found: Role,
        /// The expected role.
        expected: Role,
    },
    /// Its certificate is invalid for another reason.
    #[error("its certificate is not valid: {0}")]
    BadCertificate(String),
    /// It speaks another protocol, or plaintext.
    #[error("it does not speak TLS 1.3: {0}")]
    NotTls(String),
    /// It sent more than a handshake needs.
    #[error("it sent more than {0} bytes before it was authenticated")]
    TooMuch(usize),
    /// It took too long.
    #[error("it was not authenticated within {0:?}")]
    TooSlow(std::time::Duration),
    /// Other connections needed its place.
    #[error("it was not authenticated yet and had to make room: {0} others were waiting")]
    Crowded(usize),
    /// It closed the connection.
    #[error("it closed the connection before it was authenticated")]
    Left,
    /// It refused this side.
    #[error("it refused this side: {0}")]
    RefusedUs(String),
    /// It could not read what this side sent, or shares no protocol with it.
    #[error("it refused this side: {0}")]
    Misread(String),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broke(String),
}

impl Reason {
    /// Whether damaged bytes may look like this, where an undamaged handshake would succeed. TLS 1.3 encrypts
    /// certificates and alerts about them, so a verdict on a certificate is never due to damage.
    #[must_use]
    pub fn may_be_damage(&self) -> bool {
        matches!(self, Self::NotTls(_) | Self::Misread(_) | Self::TooMuch(_))
    }

    /// Translates an error of rustls.
    pub(crate) fn of(error: &rustls::Error) -> Self {
        use rustls::Error;
        match error {
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(error) => Self::of_certificate(error),
            Error::AlertReceived(alert) => Self::of_alert(*alert, alert_text(*alert)),
            Error::InvalidMessage(_) | Error::PeerIncompatible(_) | Error::PeerMisbehaved(_) => {
                Self::NotTls(error.to_string())
            }
            Error::DecryptError => Self::NotTls("what it sent cannot be decrypted".to_owned()),
            other => Self::NotTls(other.to_string()),
        }
    }

    fn of_alert(alert: rustls::AlertDescription, text: String) -> Self {
        if is_about_damage(alert) { Self::Misread(text) } else { Self::RefusedUs(text) }
    }

    fn of_certificate(error: &CertificateError) -> Self {
        use CertificateError as Bad;
        match error {
            Bad::Expired | Bad::ExpiredContext { .. } => Self::Expired,
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => Self::NotYet,
            Bad::Revoked => Self::Revoked,
            // The same name, signed by someone else, or a revocation list of another job.
            Bad::UnknownIssuer | Bad::BadSignature | Bad::UnknownRevocationStatus => Self::OtherJob,
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => Self::OtherJob,
            Bad::Other(other) => match other.0.downcast_ref::<Self>() {
                Some(reason) => reason.clone(),
                None => Self::BadCertificate(other.to_string()),
            },
            other => Self::BadCertificate(format!("{other:?}")),
        }
    }
}

/// The peer ended an encrypted connection by an alert.
#[derive(Debug, Error)]
#[error("the peer ended the connection: {}", alert_text(self.0))]
pub(crate) struct Alerted(pub(crate) rustls::AlertDescription);

impl Alerted {
    pub(crate) fn reason(&self) -> Reason {
        Reason::of_alert(self.0, self.to_string())
    }
}

/// Whether a peer may send this alert because bytes were damaged on their way.
fn is_about_damage(alert: rustls::AlertDescription) -> bool {
    use rustls::AlertDescription as Alert;
    matches!(
        alert,
        Alert::UnexpectedMessage
            | Alert::BadRecordMac
            | Alert::RecordOverflow
            | Alert::HandshakeFailure
            | Alert::IllegalParameter
            | Alert::DecodeError
            | Alert::ProtocolVersion
            | Alert::InternalError
            | Alert::MissingExtension
            | Alert::UnsupportedExtension
            | Alert::UnrecognisedName
            | Alert::NoApplicationProtocol
    )
}

/// The meaning of a peer's alert.
fn alert_text(alert: rustls::AlertDescription) -> String {
    use rustls::AlertDescription as Alert;
    match alert {
        Alert::UnknownCA | Alert::DecryptError => "its job is another one".to_owned(),
        Alert::CertificateExpired => "this side's certificate has expired, or the clocks differ".to_owned(),
        Alert::CertificateRevoked => "this side's certificate was revoked".to_owned(),
        Alert::CertificateRequired => "it wants a certificate".to_owned(),
        Alert::BadCertificate | Alert::CertificateUnknown => "it does not accept this side's certificate".to_owned(),
        Alert::AccessDenied => "this side has the wrong role".to_owned(),
        Alert::ProtocolVersion | Alert::HandshakeFailure => "it knows no protocol in common".to_owned(),
        other => format!("alert {other:?}"),
    }
}

/// An encrypted connection could not be made, or ended.
#[derive(Debug, Error)]
pub enum TlsError {
    /// One side refused the other.
    #[error("{0}")]
    Refused(#[from] Reason),
    /// The system reported an error.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl TlsError {
    /// The error as a reason.
    #[must_use]
    pub fn into_reason(self) -> Reason {
        match self {
            Self::Refused(reason) => reason,
            Self::Io(error) => Reason::Broke(error.to_string()),
        }
    }
}
