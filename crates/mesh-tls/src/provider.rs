//! The cryptography: TLS 1.3, with AES-128-GCM first because it is the fastest on processors with AES instructions.

use rustls::SupportedCipherSuite;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::alg_id;
use std::sync::Arc;

/// The standard suites of TLS 1.3; nothing older.
const SUITES: [SupportedCipherSuite; 3] = [
    ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
    ring::cipher_suite::TLS13_AES_256_GCM_SHA384,
    ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider { cipher_suites: SUITES.to_vec(), ..ring::default_provider() })
}

/// SHA-256.
pub(crate) fn sha256(data: &[u8]) -> Vec<u8> {
    let SupportedCipherSuite::Tls13(suite) = ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
    suite.common.hash_provider.hash(data).as_ref().to_vec()
}

/// Whether `signature` over `message` is valid for the P-256 key `public_key`.
pub(crate) fn signed_by(public_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
    ring::default_provider()
        .signature_verification_algorithms
        .all
        .iter()
        .find(|all| all.public_key_alg_id() == alg_id::ECDSA_P256 && all.signature_alg_id() == alg_id::ECDSA_SHA256)
        .is_some_and(|algorithm| algorithm.verify_signature(public_key, message, signature).is_ok())
}

/// Random bytes; none if the system has none.
pub(crate) fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    ring::default_provider().secure_random.fill(&mut bytes).ok().map(|()| bytes)
}
