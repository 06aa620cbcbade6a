//! What a certificate says: whose it is, of which job, and for how long.

use super::der::{self, BIT_STRING, Der, INTEGER, Malformed, OCTET_STRING, OID};
use super::error::CredentialError;
use super::provider;
use super::role::Role;
use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The contents of a certificate. A peer's are handed out only after verification.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerFacts {
    /// Its owner's role.
    pub role: Role,
    /// The job's name: random, and the same in all certificates of one authority.
    pub job: String,
    /// The serial number, in hexadecimal.
    pub serial: String,
    /// SHA-256 of the certificate, in hexadecimal.
    pub fingerprint: String,
    /// SHA-256 of its public key, in hexadecimal; unchanged when the certificate is renewed.
    pub key: String,
    /// When it becomes valid.
    pub not_before: SystemTime,
    /// When it expires.
    pub not_after: SystemTime,
}

impl PeerFacts {
    /// Reads a member's certificate.
    pub(crate) fn of(cert: &[u8]) -> Result<Self, CredentialError> {
        let read = Certificate::read(cert).map_err(|Malformed| CredentialError::NotOurs)?;
        let (role, job) = read.member().ok_or(CredentialError::NotOurs)?;
        Ok(Self {
            role,
            job: job.to_owned(),
            serial: hex(read.serial),
            fingerprint: hex(&provider::sha256(cert)),
            key: key_name(read.public_key),
            not_before: at(read.not_before),
            not_after: at(read.not_after),
        })
    }

    /// The first part of the fingerprint: enough for a message.
    #[must_use]
    pub fn short(&self) -> &str {
        &self.fingerprint[..16]
    }
}

impl fmt::Display for PeerFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of job {}", self.role, self.short(), self.job)
    }
}

/// The name of a public key here.
pub(crate) fn key_name(public_key: &[u8]) -> String {
    hex(&provider::sha256(public_key))
}

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

/// Seconds since 1970; 0 for an earlier time.
pub(crate) fn unix(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The parts of a certificate that matter here.
#[derive(Debug)]
pub(crate) struct Certificate<'a> {
    pub(crate) serial: &'a [u8],
    pub(crate) not_before: u64,
    pub(crate) not_after: u64,
    /// The key's bits, without the algorithm's identifier.
    pub(crate) public_key: &'a [u8],
    names: Vec<&'a str>,
}

const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
const CRL_NUMBER: &[u8] = &[0x55, 0x1d, 0x14];
const DNS_NAME: u8 = 0x82;

/// Calls `take` with each extension's identifier and value.
fn extensions<'a>(
    tagged: &'a [u8],
    mut take: impl FnMut(&'a [u8], Der<'a>) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    let mut all = Der(tagged).sequence()?;
    while all.peek().is_some() {
        let mut one = all.sequence()?;
        let id = one.expect(OID)?;
        one.skip_if(0x01)?;
        take(id, Der(one.expect(OCTET_STRING)?))?;
    }
    Ok(())
}

impl<'a> Certificate<'a> {
    pub(crate) fn read(cert: &'a [u8]) -> Result<Self, Malformed> {
        let mut tbs = Der(cert).sequence()?.sequence()?;
        tbs.skip_if(0xa0)?;
        let serial = der::unsigned(tbs.expect(INTEGER)?);
        tbs.sequence()?;
        tbs.sequence()?;
        let mut validity = tbs.sequence()?;
        let (not_before, not_after) = (validity.time()?, validity.time()?);
        tbs.sequence()?;
        let mut key = tbs.sequence()?;
        key.sequence()?;
        // The first byte counts unused bits; there are none.
        let public_key = key.expect(BIT_STRING)?.strip_prefix(&[0]).ok_or(Malformed)?;
        let mut names = Vec::new();
        extensions(tbs.expect(0xa3)?, |id, mut value| {
            if id == SUBJECT_ALT_NAME {
                let mut list = value.sequence()?;
                while list.peek().is_some() {
                    let name = list.any()?;
                    if name.tag == DNS_NAME {
                        names.push(str::from_utf8(name.body).map_err(|_| Malformed)?);
                    }
                }
            }
            Ok(())
        })?;
        Ok(Self { serial, not_before, not_after, public_key, names })
    }

    /// The role and job in its only name.
    pub(crate) fn member(&self) -> Option<(Role, &'a str)> {
        let [name] = self.names[..] else { return None };
        let (role, job) = name.strip_suffix(".mesh")?.split_once('.')?;
        let role = Role::ALL.into_iter().find(|known| known.name() == role)?;
        Some((role, job))
    }

    /// The job whose authority it is.
    pub(crate) fn authority(&self) -> Option<&'a str> {
        let [name] = self.names[..] else { return None };
        name.strip_suffix(".mesh")?.strip_prefix("authority.")
    }
}

/// The parts of a revocation list that matter here.
#[derive(Debug)]
pub(crate) struct RevocationList<'a> {
    /// The list's number, so that an older list does not replace a newer one.
    pub(crate) number: u64,
    /// Serial numbers, and when each was revoked.
    pub(crate) revoked: Vec<(&'a [u8], u64)>,
    /// The signed bytes.
    pub(crate) signed: &'a [u8],
    pub(crate) signature: &'a [u8],
}

impl<'a> RevocationList<'a> {
    pub(crate) fn read(list: &'a [u8]) -> Result<Self, Malformed> {
        let mut outer = Der(list).sequence()?;
        let body = outer.any()?;
        outer.sequence()?;
        let signature = outer.expect(BIT_STRING)?.strip_prefix(&[0]).ok_or(Malformed)?;
        let mut tbs = Der(body.whole).sequence()?;
        tbs.skip_if(INTEGER)?;
        tbs.sequence()?;
        tbs.sequence()?;
        tbs.time()?;
        tbs.time()?;
        let mut revoked = Vec::new();
        if tbs.peek() == Some(der::SEQUENCE) {
            let mut all = tbs.sequence()?;
            while all.peek().is_some() {
                let mut one = all.sequence()?;
                revoked.push((der::unsigned(one.expect(INTEGER)?), one.time()?));
            }
        }
        let mut number = None;
        extensions(tbs.expect(0xa0)?, |id, mut value| {
            if id == CRL_NUMBER {
                let digits = der::unsigned(value.expect(INTEGER)?);
                if digits.len() > 8 {
                    return Err(Malformed);
                }
                number = Some(digits.iter().fold(0, |n, &byte| n << 8 | u64::from(byte)));
            }
            Ok(())
        })?;
        Ok(Self { number: number.ok_or(Malformed)?, revoked, signed: body.whole, signature })
    }
}
