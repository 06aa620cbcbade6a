//! This host's addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses by which other hosts may reach this one, IPv4 first.
pub(crate) fn host_addresses() -> Vec<IpAddr> {
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
    // SAFETY: the list made above, freed once.
    unsafe { libc::freeifaddrs(first) };
    found.sort_by_key(IpAddr::is_ipv6);
    found
}
