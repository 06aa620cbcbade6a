//! This host's addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses of the interfaces that are up, in the system's order; none that lead nowhere but to this host, or that mean
/// something on one link only.
///
/// # Errors
/// What the system said.
pub fn interfaces() -> std::io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: it fills the pointer, or fails.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: entries of the list that the system has made, until it is given back below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 || entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null, and as long as its family says.
        let addr = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: an address of this family.
                let at = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::V4(Ipv4Addr::from(u32::from_be(at.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let at = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                IpAddr::V6(Ipv6Addr::from(at.sin6_addr.s6_addr))
            }
            _ => continue,
        };
        if is_reached_from_elsewhere(&addr) && !found.contains(&addr) {
            found.push(addr);
        }
    }
    // SAFETY: made by `getifaddrs`, and not used after this.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

fn is_reached_from_elsewhere(addr: &IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => !addr.is_loopback() && !addr.is_link_local() && !addr.is_unspecified(),
        IpAddr::V6(addr) => !addr.is_loopback() && !addr.is_unicast_link_local() && !addr.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_that_others_can_use() {
        for addr in interfaces().unwrap() {
            assert!(std::net::TcpListener::bind((addr, 0)).is_ok(), "{addr}");
        }
        for (text, counts) in [
            ("10.0.0.1", true),
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("0.0.0.0", false),
            ("fd77::1", true),
            ("::1", false),
            ("fe80::1", false),
            ("::", false),
        ] {
            assert_eq!(is_reached_from_elsewhere(&text.parse().unwrap()), counts, "{text}");
        }
    }
}
