//! Records of a connection after its handshake: sealing and opening them, in one direction each.
//!
//! rustls performs the handshake, holds the secrets of both directions (for key updates) and does the cryptography of
//! each record. Framing and counting are done here: rustls's own connections have both directions under one lock and
//! copy every byte twice more.
//!
//! A record number is never used twice with one key (TLS-2): it is incremented first, whether or not the record is
//! sent.

use super::error::Alerted;
use rustls::client::ClientConnectionData;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, ExtractedSecrets, ProtocolVersion, SupportedCipherSuite,
    Tls13CipherSuite,
};
use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The most plaintext that a record holds.
pub(crate) const MOST_PLAIN: usize = 16 * 1024;
pub(crate) const HEAD: usize = 5;
/// The most ciphertext that a record holds.
const MOST_CIPHER: usize = MOST_PLAIN + 256;
/// The longest record.
pub(crate) const MOST_RECORD: usize = HEAD + MOST_CIPHER;

const KEY_UPDATE: u8 = 24;
const NEW_SESSION_TICKET: u8 = 4;
/// How many records without data in a row count as an attack on this side's time.
const MOST_IDLE: u32 = 32;

/// A connection ended without a farewell.
#[derive(Debug, thiserror::Error)]
#[error("the connection ended without a farewell: the peer has crashed, or somebody has cut it off")]
pub struct Truncated;

fn bad(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// The secrets that rustls keeps of a connection, for making the next keys.
pub(crate) enum Kernel {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Kernel {
    fn suite(&self) -> io::Result<&'static Tls13CipherSuite> {
        let SupportedCipherSuite::Tls13(suite) = match self {
            Self::Client(kernel) => kernel.negotiated_cipher_suite(),
            Self::Server(kernel) => kernel.negotiated_cipher_suite(),
        };
        Ok(suite)
    }

    fn next_tx(&mut self) -> io::Result<(u64, ConnectionTrafficSecrets)> {
        match self {
            Self::Client(kernel) => kernel.update_tx_secret(),
            Self::Server(kernel) => kernel.update_tx_secret(),
        }
        .map_err(|error| bad(error.to_string()))
    }

    fn next_rx(&mut self) -> io::Result<(u64, ConnectionTrafficSecrets)> {
        match self {
            Self::Client(kernel) => kernel.update_rx_secret(),
            Self::Server(kernel) => kernel.update_rx_secret(),
        }
        .map_err(|error| bad(error.to_string()))
    }
}

fn key_and_iv(
    secrets: ConnectionTrafficSecrets,
) -> io::Result<(rustls::crypto::cipher::AeadKey, rustls::crypto::cipher::Iv)> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(bad("a cipher that is not known here")),
    }
}

/// Both directions of a new connection.
pub(crate) fn open(kernel: &Kernel, secrets: ExtractedSecrets) -> io::Result<(Sealer, Opener)> {
    let suite = kernel.suite()?;
    let ((tx_seq, tx), (rx_seq, rx)) = (secrets.tx, secrets.rx);
    let ((tx_key, tx_iv), (rx_key, rx_iv)) = (key_and_iv(tx)?, key_and_iv(rx)?);
    // Long before a key has sealed so much that its ciphertext could be told from noise.
    let most = suite.common.confidentiality_limit.min(u64::MAX >> 1).saturating_sub(64);
    let sealer = Sealer { cipher: suite.aead_alg.encrypter(tx_key, tx_iv), seq: tx_seq, most };
    let opener = Opener {
        cipher: suite.aead_alg.decrypter(rx_key, rx_iv),
        seq: rx_seq,
        handshake: Vec::new(),
        idle: 0,
        closed: false,
    };
    Ok((sealer, opener))
}

/// Seals outgoing records.
pub(crate) struct Sealer {
    cipher: Box<dyn MessageEncrypter>,
    seq: u64,
    /// How many records one key seals.
    most: u64,
}

impl Sealer {
    /// One record, with its header, of at most [`MOST_PLAIN`] bytes of plaintext.
    fn seal(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> io::Result<Vec<u8>> {
        let seq = self.seq;
        self.seq += 1;
        let plain = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        self.cipher.encrypt(plain, seq).map(|sealed| sealed.encode()).map_err(|error| bad(error.to_string()))
    }

    pub(crate) fn data(&mut self, chunks: OutboundChunks<'_>) -> io::Result<Vec<u8>> {
        self.seal(ContentType::ApplicationData, chunks)
    }

    pub(crate) fn close_notify(&mut self) -> io::Result<Vec<u8>> {
        self.seal(ContentType::Alert, OutboundChunks::Single(&[1, 0]))
    }

    /// Whether the key should be replaced before the next record.
    pub(crate) fn worn(&self) -> bool {
        self.seq >= self.most
    }

    /// The record that announces the next key, which is used from then on. `ask` asks the peer to change its key too.
    pub(crate) fn update(&mut self, kernel: &mut Kernel, ask: bool) -> io::Result<Vec<u8>> {
        let message = [KEY_UPDATE, 0, 0, 1, u8::from(ask)];
        let record = self.seal(ContentType::Handshake, OutboundChunks::Single(&message))?;
        let (seq, secrets) = kernel.next_tx()?;
        let (key, iv) = key_and_iv(secrets)?;
        (self.cipher, self.seq) = (kernel.suite()?.aead_alg.encrypter(key, iv), seq);
        Ok(record)
    }

    #[cfg(test)]
    pub(crate) fn wear_out_after(&mut self, records: u64) {
        self.most = records;
    }

    #[cfg(test)]
    pub(crate) fn number(&self) -> u64 {
        self.seq
    }

    #[cfg(test)]
    pub(crate) fn any(&mut self, typ: ContentType, payload: &[u8]) -> io::Result<Vec<u8>> {
        self.seal(typ, OutboundChunks::Single(payload))
    }
}

/// Opens incoming records.
pub(crate) struct Opener {
    cipher: Box<dyn MessageDecrypter>,
    seq: u64,
    /// The beginning of a handshake message.
    handshake: Vec<u8>,
    idle: u32,
    closed: bool,
}

/// The contents of a record.
pub(crate) enum Opened {
    /// Plaintext, at this place.
    Data(Range<usize>),
    /// Nothing for the reader.
    Nothing,
    /// The peer has changed its key, and asks this side to do so too.
    UpdateWanted,
    /// The peer says that nothing follows.
    Farewell,
}

/// The length of the record at the beginning of `bytes`, if its header is there.
pub(crate) fn record_len(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(head) = bytes.first_chunk::<HEAD>() else { return Ok(None) };
    let len = usize::from(u16::from_be_bytes([head[3], head[4]]));
    if head[0] != 23 || head[1] != 3 || len > MOST_CIPHER {
        return Err(bad("what arrived is not a record of TLS 1.3: the connection was tampered with"));
    }
    Ok(Some(HEAD + len))
}

impl Opener {
    /// Decrypts one whole record in place.
    pub(crate) fn open(&mut self, record: &mut [u8], kernel: &Mutex<Kernel>) -> io::Result<Opened> {
        let seq = self.seq;
        self.seq += 1;
        let (start, whole) = (record.as_ptr().addr(), record.len());
        let message =
            InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, &mut record[HEAD..]);
        let plain = self
            .cipher
            .decrypt(message, seq)
            .map_err(|_| bad("a record that cannot be opened arrived: the connection was tampered with"))?;
        // The plaintext was decrypted in place; only its address tells where.
        let len = plain.payload.len();
        let at = plain.payload.as_ptr().addr().checked_sub(start).filter(|at| at + len <= whole);
        let range = at.map_or(0..0, |at| at..at + len);
        if range.len() != len {
            return Err(bad("a record was not opened where it lies"));
        }
        if range.is_empty() || plain.typ != ContentType::ApplicationData {
            self.idle += 1;
            if self.idle > MOST_IDLE {
                return Err(bad(format!("the peer sent {MOST_IDLE} empty records in a row")));
            }
        }
        match plain.typ {
            // A handshake message split over several records may not be interrupted by others.
            _ if !self.handshake.is_empty() && plain.typ != ContentType::Handshake => {
                Err(bad("the peer sent an incomplete handshake message"))
            }
            ContentType::ApplicationData if range.is_empty() => Ok(Opened::Nothing),
            ContentType::ApplicationData => {
                self.idle = 0;
                Ok(Opened::Data(range))
            }
            ContentType::Alert => match *plain.payload {
                [_, 0] => {
                    self.closed = true;
                    Ok(Opened::Farewell)
                }
                [_, code] => {
                    Err(io::Error::new(io::ErrorKind::ConnectionAborted, Alerted(AlertDescription::from(code))))
                }
                _ => Err(bad("the peer sent a malformed alert")),
            },
            ContentType::Handshake => {
                self.handshake.extend_from_slice(plain.payload);
                self.handle_handshake(kernel)
            }
            _ => Err(bad("the peer sent a record of an unknown kind")),
        }
    }

    pub(crate) fn closed(&self) -> bool {
        self.closed
    }

    fn handle_handshake(&mut self, kernel: &Mutex<Kernel>) -> io::Result<Opened> {
        let Some(&[kind, a, b, c]) = self.handshake.first_chunk::<4>() else { return Ok(Opened::Nothing) };
        let len = 4 + (usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c));
        match kind {
            KEY_UPDATE if len == 5 && self.handshake.len() <= 5 => {
                let Some(&asked) = self.handshake.get(4) else { return Ok(Opened::Nothing) };
                self.handshake.clear();
                if asked > 1 {
                    return Err(bad("the peer sent a malformed key update"));
                }
                let mut kernel = kernel.lock().unwrap_or_else(PoisonError::into_inner);
                let (seq, secrets) = kernel.next_rx()?;
                let (key, iv) = key_and_iv(secrets)?;
                (self.cipher, self.seq) = (kernel.suite()?.aead_alg.decrypter(key, iv), seq);
                Ok(if asked == 1 { Opened::UpdateWanted } else { Opened::Nothing })
            }
            // This side has not asked for tickets, and uses none.
            NEW_SESSION_TICKET if len <= MOST_PLAIN && self.handshake.len() <= len => {
                if self.handshake.len() == len {
                    self.handshake.clear();
                }
                Ok(Opened::Nothing)
            }
            _ => Err(bad("the peer sent an unexpected handshake message")),
        }
    }
}
