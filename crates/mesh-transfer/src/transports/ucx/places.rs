//! What a handle says about reaching its owner.

use crate::bytes::{Reader, put_ip};
use crate::error::TransferError;
use crate::handle::Token;
use crate::host_addresses::host_addresses;
use crate::realm::namespace;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The most addresses in a handle.
const ADDRESSES: usize = 4;
const HEAD: usize = 2 + 8 + 8 + 4 + 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// The port at which the owner listens for readers.
    pub(super) port: u16,
    /// The owner's network namespace.
    pub(super) network: u64,
    /// The owner's pid namespace.
    pub(super) numbers: u64,
    /// The number of the owner's descriptor of its control page.
    pub(super) page: u32,
    pub(super) door: Token,
    /// Its addresses for other hosts.
    pub(super) addresses: Vec<IpAddr>,
}

impl Places {
    /// Those of this process.
    pub(super) fn here(port: u16, door: Token, page: u32) -> Self {
        let (network, numbers) = (namespace("net"), namespace("pid"));
        let mut addresses = host_addresses();
        addresses.truncate(ADDRESSES);
        Self { port, network, numbers, page, door, addresses }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + ADDRESSES * 17);
        out.extend_from_slice(&self.port.to_le_bytes());
        out.extend_from_slice(&self.network.to_le_bytes());
        out.extend_from_slice(&self.numbers.to_le_bytes());
        out.extend_from_slice(&self.page.to_le_bytes());
        out.extend_from_slice(&self.door);
        self.addresses.iter().for_each(|address| put_ip(&mut out, *address));
        out
    }

    /// Decodes bytes that anybody may have written.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let damaged = || TransferError::invalid("the handle's part for the transport ucx is damaged");
        let mut rest = Reader::new(bytes, damaged);
        let (port, network, numbers) = (rest.u16()?, rest.u64()?, rest.u64()?);
        let (page, door) = (rest.u32()?, rest.array()?);
        let mut addresses = Vec::new();
        while !rest.rest.is_empty() {
            addresses.push(rest.ip()?);
        }
        if addresses.len() > ADDRESSES {
            return Err(damaged());
        }
        Ok(Self { port, network, numbers, page, door, addresses })
    }

    /// The addresses to try, in order. `is_here`: the owner is on this host.
    pub(super) fn routes(&self, is_here: bool) -> Vec<SocketAddr> {
        if is_here && self.network == namespace("net") {
            return vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), self.port)];
        }
        self.addresses.iter().map(|address| SocketAddr::new(*address, self.port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv6Addr;

    #[test]
    fn what_is_written_is_read_and_nothing_else() {
        let places = Places {
            port: 4711,
            network: 7,
            numbers: 8,
            page: 9,
            door: [3; 16],
            addresses: vec![IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3)), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        };
        let bytes = places.encode();
        assert_eq!(Places::decode(&bytes).unwrap(), places);
        for cut in (0..bytes.len()).filter(|cut| ![HEAD, HEAD + 5].contains(cut)) {
            assert!(Places::decode(&bytes[..cut]).is_err(), "{cut} bytes");
        }
        let many = Places { addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST); 5], ..places };
        assert!(Places::decode(&many.encode()).is_err());
    }
}
