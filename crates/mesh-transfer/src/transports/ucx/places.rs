//! What a handle says of the way to its owner.

use crate::error::TransferError;
use crate::handle::Token;
use crate::realm::namespace;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Addresses that a handle has room for.
const ADDRESSES: usize = 4;
const HEAD: usize = 2 + 8 + 8 + 4 + 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// Where the owner listens for readers.
    pub(super) port: u16,
    /// In which network it does so.
    pub(super) network: u64,
    /// In which processes have the numbers that they have there.
    pub(super) numbers: u64,
    /// The number of the owner's descriptor of its control page.
    pub(super) page: u32,
    pub(super) door: Token,
    /// How other hosts reach it.
    pub(super) addresses: Vec<IpAddr>,
}

impl Places {
    /// Of this process.
    pub(super) fn here(port: u16, door: Token, page: u32) -> Self {
        let (network, numbers) = (namespace("net"), namespace("pid"));
        Self { port, network, numbers, page, door, addresses: addresses() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + ADDRESSES * 17);
        out.extend_from_slice(&self.port.to_le_bytes());
        out.extend_from_slice(&self.network.to_le_bytes());
        out.extend_from_slice(&self.numbers.to_le_bytes());
        out.extend_from_slice(&self.page.to_le_bytes());
        out.extend_from_slice(&self.door);
        for address in &self.addresses {
            match address {
                IpAddr::V4(address) => {
                    out.push(4);
                    out.extend_from_slice(&address.octets());
                }
                IpAddr::V6(address) => {
                    out.push(6);
                    out.extend_from_slice(&address.octets());
                }
            }
        }
        out
    }

    /// Of bytes that anybody may have written.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let damaged = || TransferError::invalid("the handle's part for the transport ucx is damaged");
        let (head, mut rest) = bytes.split_at_checked(HEAD).ok_or_else(damaged)?;
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let mut addresses = Vec::new();
        while let Some((kind, after)) = rest.split_first() {
            let len = match kind {
                4 => 4,
                6 => 16,
                _ => return Err(damaged()),
            };
            let (address, after) = after.split_at_checked(len).ok_or_else(damaged)?;
            addresses.push(match <[u8; 4]>::try_from(address) {
                Ok(four) => IpAddr::V4(Ipv4Addr::from(four)),
                Err(_) => IpAddr::V6(Ipv6Addr::from(std::array::from_fn(|i| address[i]))),
            });
            rest = after;
        }
        if addresses.len() > ADDRESSES {
            return Err(damaged());
        }
        Ok(Self {
            port: u16::from_le_bytes([head[0], head[1]]),
            network: long(2),
            numbers: long(10),
            page: u32::from_le_bytes(std::array::from_fn(|i| head[18 + i])),
            door: std::array::from_fn(|i| head[22 + i]),
            addresses,
        })
    }

    /// Where to try, one after the other. `is_here`: the owner is a process of this host.
    pub(super) fn routes(&self, is_here: bool) -> Vec<SocketAddr> {
        if is_here && self.network == namespace("net") {
            return vec![SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), self.port)];
        }
        self.addresses.iter().map(|address| SocketAddr::new(*address, self.port)).collect()
    }
}

/// This host's addresses that others may reach, those of the older kind first.
fn addresses() -> Vec<IpAddr> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the list is written to a variable of this frame.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let (mut found, mut at) = (Vec::new(), first);
    while !at.is_null() {
        // SAFETY: an element of the list, which lives until it is freed below.
        let each = unsafe { &*at };
        at = each.ifa_next;
        if each.ifa_addr.is_null() || each.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: an address, of the kind that its first field says.
        let address = unsafe {
            match i32::from((*each.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let four = &*each.ifa_addr.cast::<libc::sockaddr_in>();
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(four.sin_addr.s_addr)))
                }
                libc::AF_INET6 => {
                    let six = &*each.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::V6(Ipv6Addr::from(six.sin6_addr.s6_addr))
                }
                _ => continue,
            }
        };
        let is_local = match address {
            IpAddr::V4(four) => four.is_loopback() || four.is_link_local(),
            IpAddr::V6(six) => six.is_loopback() || six.is_unicast_link_local(),
        };
        if !is_local {
            found.push(address);
        }
    }
    // SAFETY: the list that was made above, freed once.
    unsafe { libc::freeifaddrs(first) };
    found.sort_by_key(IpAddr::is_ipv6);
    found.truncate(ADDRESSES);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

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
