//! A job's certificate authority, which issues the certificates by which members of the job recognise each other.
//!
//! The job's name is random and part of every certificate. Beside it a certificate contains only its owner's role: a
//! listening host shows its certificate to anyone who connects, before they have proved anything.

use super::error::CredentialError;
use super::facts::{Certificate, PeerFacts, hex, key_name, unix};
use super::provider;
use super::role::Role;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use std::time::{Duration, SystemTime};

/// How far the clocks of two hosts may differ.
pub const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

/// The authority of one job. Its holder can admit anybody.
pub struct Authority {
    job: String,
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A newly issued certificate.
pub struct Issued {
    /// The certificate, in PEM.
    pub certificate: String,
    /// Its key, in PEM. Secret.
    pub key: String,
    /// Its contents.
    pub facts: PeerFacts,
}

/// A serial number, and when its certificate was revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The serial number, in hexadecimal.
    pub serial: String,
    /// When.
    pub at: SystemTime,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("job", &self.job).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Issued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Issued").field("facts", &self.facts).finish_non_exhaustive()
    }
}

fn random<const N: usize>() -> Result<[u8; N], CredentialError> {
    provider::random()
        .ok_or_else(|| CredentialError::Crypto { what: "make random numbers", why: "the system has none".to_owned() })
}

fn serial() -> Result<SerialNumber, CredentialError> {
    let mut bytes = random::<16>()?;
    // Positive, and always of the same length.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn params(name: &str, from: SystemTime, until: SystemTime) -> Result<CertificateParams, CredentialError> {
    let mut params =
        CertificateParams::new(vec![name.to_owned()]).map_err(CredentialError::crypto("name a certificate"))?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(unix(from));
    params.not_after = epoch + Duration::from_secs(unix(until));
    params.serial_number = Some(serial()?);
    Ok(params)
}

fn new_key() -> Result<KeyPair, CredentialError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(CredentialError::crypto("make a key"))
}

/// The name of a key, made from its public half.
pub(super) fn name_of_key(pem: &str) -> Result<String, CredentialError> {
    let key = KeyPair::from_pem(pem).map_err(CredentialError::crypto("read the key"))?;
    Ok(key_name(key.public_key_raw()))
}

impl Authority {
    /// Creates the authority of a new job.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn create(now: SystemTime) -> Result<Self, CredentialError> {
        let job = hex(&random::<8>()?);
        let key = new_key()?;
        let params = Self::params(&job, now)?;
        let certificate =
            params.self_signed(&key).map_err(CredentialError::crypto("sign the authority's certificate"))?.pem();
        Ok(Self { job, certificate, issuer: Issuer::new(params, key) })
    }

    fn params(job: &str, now: SystemTime) -> Result<CertificateParams, CredentialError> {
        let mut params = params(&format!("authority.{job}.mesh"), now - CLOCK_SKEW, now + AUTHORITY_LIFETIME)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(params)
    }

    /// Restores an authority from its certificate and key.
    ///
    /// # Errors
    /// If they are not a certificate of an authority and its key.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, CredentialError> {
        let der = super::files::one_certificate(certificate)?;
        let read = Certificate::read(&der).map_err(|_| CredentialError::NotOurs)?;
        let job = read.authority().ok_or(CredentialError::NotOurs)?.to_owned();
        let key = KeyPair::from_pem(key).map_err(CredentialError::crypto("read the authority's key"))?;
        if key.public_key_raw() != read.public_key {
            return Err(CredentialError::Crypto {
                what: "use the authority's key",
                why: "it is not the key of its certificate".to_owned(),
            });
        }
        // Only names and the key go into what is signed.
        let params = Self::params(&job, SystemTime::now())?;
        Ok(Self { job, certificate: certificate.to_owned(), issuer: Issuer::new(params, key) })
    }

    /// The job's name.
    #[must_use]
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Its certificate, in PEM, which every member needs.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Its key, in PEM. Secret.
    #[must_use]
    pub fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Issues a certificate that is valid for `lifetime` from now, and from a little earlier because clocks differ. To
    /// renew a certificate, pass its key as `key`; otherwise a new key is made.
    ///
    /// # Errors
    /// If the key is malformed, or cryptography fails.
    pub fn issue(
        &self,
        role: Role,
        lifetime: Duration,
        now: SystemTime,
        key: Option<&str>,
    ) -> Result<Issued, CredentialError> {
        let key = match key {
            Some(pem) => KeyPair::from_pem(pem).map_err(CredentialError::crypto("read the key"))?,
            None => new_key()?,
        };
        let until = now.checked_add(lifetime.min(AUTHORITY_LIFETIME)).unwrap_or(now);
        let mut params = params(&role.san(&self.job), now - CLOCK_SKEW, until)?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match role {
            // Nobody has a reason to dial an observer.
            Role::Observer => vec![ExtendedKeyUsagePurpose::ClientAuth],
            // Either may dial the other.
            Role::Controller | Role::Host => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
        };
        let certificate =
            params.signed_by(&key, &self.issuer).map_err(CredentialError::crypto("sign a certificate"))?;
        let facts = PeerFacts::of(certificate.der())?;
        Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem(), facts })
    }

    /// Signs the revocation list, in PEM. `number` counts the lists: members never go back to an older one.
    ///
    /// # Errors
    /// If a serial number is malformed, or cryptography fails.
    pub fn sign_revocations(
        &self,
        revoked: &[Revocation],
        number: u64,
        now: SystemTime,
    ) -> Result<String, CredentialError> {
        let time = |at: SystemTime| date_time_ymd(1970, 1, 1) + Duration::from_secs(unix(at));
        let revoked_certs = revoked
            .iter()
            .map(|one| {
                Ok(RevokedCertParams {
                    serial_number: SerialNumber::from_slice(&unhex(&one.serial)?),
                    revocation_time: time(one.at),
                    reason_code: None,
                    invalidity_date: None,
                })
            })
            .collect::<Result<Vec<_>, CredentialError>>()?;
        let list = CertificateRevocationListParams {
            this_update: time(now - CLOCK_SKEW),
            // A list is valid until there is a newer one: nobody has to send lists regularly.
            next_update: time(now + AUTHORITY_LIFETIME),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let what = "sign the list of what is revoked";
        list.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(CredentialError::crypto(what))
    }
}

fn unhex(text: &str) -> Result<Vec<u8>, CredentialError> {
    let digit = |byte: u8| (byte as char).to_digit(16);
    text.as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            &[high, low] => Some((digit(high)? << 4 | digit(low)?) as u8),
            _ => None,
        })
        .collect::<Option<Vec<u8>>>()
        .ok_or_else(|| CredentialError::Unknown(text.to_owned()))
}
