//! Who is admitted: members of this job, with a certificate of its authority that is valid now and not revoked (TLS-1).

use super::error::{CredentialError, Reason};
use super::facts::Certificate;
use super::role::Role;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
};
use std::sync::Arc;

/// Checks the certificates of both sides.
#[derive(Debug)]
pub(crate) struct Members {
    job: String,
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
}

/// The name by which a client tells the verifier what it expects. It is never sent, as SNI is off.
pub(crate) fn expectation(role: Option<Role>, job: &str) -> String {
    role.map_or_else(|| format!("member.{job}.mesh"), |role| role.san(job))
}

fn refused(reason: Reason) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(reason))))
}

impl Members {
    pub(crate) fn new(
        job: &str,
        ca: &CertificateDer<'static>,
        crl: Option<CertificateRevocationListDer<'static>>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, CredentialError> {
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone()).map_err(CredentialError::crypto("trust the job's authority"))?;
        let roots = Arc::new(roots);
        let crls: Vec<_> = crl.into_iter().collect();
        let what = "check certificates";
        let servers = WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
            .with_crls(crls.clone())
            .build()
            .map_err(CredentialError::crypto(what))?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider))
            .with_crls(crls)
            // Strangers need not know whom this side trusts.
            .clear_root_hint_subjects()
            .build()
            .map_err(CredentialError::crypto(what))?;
        Ok(Self { job: job.to_owned(), servers, clients })
    }

    fn role(&self, cert: &CertificateDer<'_>) -> Result<Role, Error> {
        let read = Certificate::read(cert).map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
        match read.member() {
            Some((role, job)) if job == self.job => Ok(role),
            _ => Err(refused(Reason::OtherJob)),
        }
    }

    /// Whether a certificate would be admitted now.
    pub(crate) fn check(&self, cert: &CertificateDer<'_>, now: UnixTime) -> Result<Role, Error> {
        self.verify_client_cert(cert, &[], now)?;
        self.role(cert)
    }
}

/// Delegates signature checks to one of the two verifiers.
macro_rules! signatures_by {
    ($verifier:ident) => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.$verifier.verify_tls12_signature(message, cert, dss)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.$verifier.verify_tls13_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.$verifier.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for Members {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let found = self.role(end_entity)?;
        let name = ServerName::try_from(found.san(&self.job)).map_err(|_| refused(Reason::OtherJob))?;
        // The authority signs members directly: intermediate certificates are ignored.
        let verified = self.servers.verify_server_cert(end_entity, &[], &name, ocsp_response, now)?;
        let wanted = server_name.to_str();
        match Role::ALL.into_iter().find(|role| role.san(&self.job) == wanted) {
            Some(expected) if expected != found => Err(refused(Reason::WrongRole { found, expected })),
            _ => Ok(verified),
        }
    }

    signatures_by!(servers);
}

impl ClientCertVerifier for Members {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.clients.verify_client_cert(end_entity, &[], now);
        // A stranger fails the signature check first, but its name makes a better reason.
        self.role(end_entity)?;
        verified
    }

    signatures_by!(clients);
}
