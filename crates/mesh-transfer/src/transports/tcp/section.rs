//! The TCP transport's part of a handle: where its owner listens.
//!
//! The address in a forged handle may lead to anyone, but only the owner can prove that it knows the door key (TCP-1):
//! nothing is read from anybody else.

use crate::bytes::{Reader, put_ip};
use crate::error::TransferError;
use crate::handle::Token;
use std::net::SocketAddr;

/// The most addresses of one host; further ones are left out.
pub(super) const MOST: usize = 8;

/// Where an owner can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The port on the loopback interface.
    pub(super) port: u16,
    /// The network namespace of its loopback interface.
    pub(super) network: u64,
    /// Its pid namespace.
    pub(super) numbers: u64,
    pub(super) door: Token,
    /// Its addresses for other hosts, or why there are none.
    pub(super) remote: Result<Vec<SocketAddr>, Why>,
}

/// Why other hosts cannot reach an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// It has no credentials.
    NoJob,
    /// Its host has no other address.
    Alone,
    /// It could not get a port.
    NoPort,
    /// It cannot use its credentials.
    Credentials,
}

impl Why {
    const ALL: [Self; 4] = [Self::NoJob, Self::Alone, Self::NoPort, Self::Credentials];

    /// The reason in words, said of the owner.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NoJob => {
                "belongs to no job of several hosts, or did not when it made the buffer, and so has no \
                 credentials to encrypt with. Attach hosts first"
            }
            Self::Alone => "has only loopback addresses",
            Self::NoPort => "could not listen on an address of its host",
            Self::Credentials => "could not use its job's credentials. `mesh credentials show` there says why",
        }
    }
}

fn damaged() -> TransferError {
    TransferError::invalid("the handle's part for the transport tcp is damaged")
}

impl Place {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = self.port.to_le_bytes().to_vec();
        out.extend_from_slice(&self.network.to_le_bytes());
        out.extend_from_slice(&self.numbers.to_le_bytes());
        out.extend_from_slice(&self.door);
        match &self.remote {
            Err(why) => out.extend_from_slice(&[0, *why as u8]),
            Ok(addrs) => {
                out.push(addrs.len().min(MOST) as u8);
                for addr in addrs.iter().take(MOST) {
                    put_ip(&mut out, addr.ip());
                    out.extend_from_slice(&addr.port().to_le_bytes());
                }
            }
        }
        out
    }

    /// Decodes bytes that anybody may have written.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let mut rest = Reader::new(bytes, damaged);
        let (port, network, numbers) = (rest.u16()?, rest.u64()?, rest.u64()?);
        let (door, count) = (rest.array()?, rest.u8()?);
        let remote = if count == 0 {
            Err(*Why::ALL.get(usize::from(rest.u8()?)).ok_or_else(damaged)?)
        } else if usize::from(count) <= MOST {
            let mut address = || Ok::<_, TransferError>(SocketAddr::new(rest.ip()?, rest.u16()?));
            Ok((0..count).map(|_| address()).collect::<Result<_, _>>()?)
        } else {
            return Err(damaged());
        };
        rest.end()?;
        Ok(Self { port, network, numbers, door, remote })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place(remote: Result<Vec<SocketAddr>, Why>) -> Place {
        Place { port: 4711, network: 1 << 40, numbers: 7, door: [9; 16], remote }
    }

    #[test]
    fn what_is_said_is_read() {
        let both: Vec<SocketAddr> = vec!["10.77.0.2:40001".parse().unwrap(), "[fd77::2]:9".parse().unwrap()];
        for remote in Why::ALL.into_iter().map(Err).chain([Ok(both.clone())]) {
            let said = place(remote);
            let bytes = said.encode();
            assert_eq!(Place::decode(&bytes).unwrap(), said);
            for cut in 0..bytes.len() {
                assert!(Place::decode(&bytes[..cut]).is_err(), "{cut} of {} bytes", bytes.len());
            }
            assert!(Place::decode(&[bytes, vec![0]].concat()).is_err());
        }
        let many = vec![both[0]; 20];
        assert_eq!(Place::decode(&place(Ok(many)).encode()).unwrap().remote.unwrap().len(), MOST);
    }

    proptest! {
        /// HDL-1
        #[test]
        fn what_nobody_would_say_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(read) = Place::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
