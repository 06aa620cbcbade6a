//! Finds this machine's ports, as the kernel lists them, and decides which of them two ends use together.
//!
//! RAI-1: a process's rails have a fixed order: the fastest first, then by name and port. Handles and handshakes refer
//! to rails by their position in it.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// Where the kernel lists devices.
pub(super) const DEVICES: &str = "/sys/class/infiniband";
/// Where it lists the distances between NUMA nodes.
const NODES: &str = "/sys/devices/system/node";
/// The most rails that a process uses.
pub(super) const RAILS: usize = 4;

pub(super) type Gid = [u8; 16];

/// The link type of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    InfiniBand,
    Ethernet,
}

/// An active port that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) number: u8,
    pub(super) link: Link,
    pub(super) gid: Gid,
    pub(super) gid_index: u8,
    pub(super) lid: u16,
    /// In Mb/s.
    pub(super) rate: u32,
    /// The NUMA node nearest to the device.
    pub(super) node: Option<u32>,
}

/// Whether there is any device at all, usable or not.
pub(super) fn has_devices(root: &Path) -> bool {
    std::fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_some())
}

/// The ports to use, in order (RAI-1), and why others are not used.
pub(super) fn ports(root: &Path) -> (Vec<Port>, Vec<String>) {
    let (mut found, mut passed) = (Vec::new(), Vec::new());
    for device in names(root) {
        let at = root.join(&device);
        if !text(&at.join("node_type")).is_some_and(|kind| kind.starts_with('1')) {
            passed.push(format!("{device} is not an InfiniBand or RoCE adapter"));
            continue;
        }
        let node = text(&at.join("device/numa_node")).and_then(|node| node.parse().ok());
        for number in names(&at.join("ports")).iter().filter_map(|name| name.parse().ok()) {
            match port(&at.join(format!("ports/{number}")), &device, number, node) {
                Ok(port) => found.push(port),
                Err(why) => passed.push(format!("{device}, port {number}: {why}")),
            }
        }
    }
    found.sort_by(|a, b| (b.rate, &a.device, a.number).cmp(&(a.rate, &b.device, b.number)));
    found.truncate(RAILS);
    (found, passed)
}

fn port(at: &Path, device: &str, number: u8, node: Option<u32>) -> Result<Port, &'static str> {
    if !text(&at.join("state")).is_some_and(|state| state.starts_with('4')) {
        return Err("not active");
    }
    let link = match text(&at.join("link_layer")).as_deref() {
        Some("InfiniBand") => Link::InfiniBand,
        Some("Ethernet") => Link::Ethernet,
        _ => return Err("an unknown kind of link"),
    };
    let number_of = |name: &str| -> Option<u32> {
        let text = text(&at.join(name))?;
        u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let lid = number_of("lid").and_then(|lid| u16::try_from(lid).ok()).unwrap_or(0);
    let (gid_index, gid) = match link {
        Link::InfiniBand => gid(at, 0).map(|gid| (0, gid)),
        Link::Ethernet => routable(at),
    }
    .ok_or("no address of RoCE version 2: give its network interface an IP address")?;
    let rate = text(&at.join("rate")).and_then(|rate| megabits(&rate)).unwrap_or(0);
    Ok(Port { device: device.to_owned(), number, link, gid, gid_index, lid, rate, node })
}

/// The farthest-reaching address of RoCE version 2: IPv4, else global IPv6, else link-local.
fn routable(at: &Path) -> Option<(u8, Gid)> {
    let indices = names(&at.join("gids")).into_iter().filter_map(|name| name.parse::<u8>().ok());
    let of_version_2 = |index: &u8| {
        text(&at.join(format!("gid_attrs/types/{index}"))).is_some_and(|kind| kind.eq_ignore_ascii_case("roce v2"))
    };
    let mut found: Vec<_> = indices.filter(of_version_2).filter_map(|index| Some((index, gid(at, index)?))).collect();
    found.sort_by_key(|(index, gid)| (reach(gid), *index));
    found.first().copied()
}

fn reach(gid: &Gid) -> u8 {
    match address(gid) {
        Some(IpAddr::V4(_)) => 0,
        Some(IpAddr::V6(_)) => 1,
        None => 2,
    }
}

/// The network address that a RoCE GID stands for; none for a link-local one.
pub(super) fn address(gid: &Gid) -> Option<IpAddr> {
    let address = Ipv6Addr::from(*gid);
    if address.is_unicast_link_local() || address.is_unspecified() {
        return None;
    }
    Some(address.to_canonical())
}

fn gid(at: &Path, index: u8) -> Option<Gid> {
    let text = text(&at.join(format!("gids/{index}")))?;
    let gid = text.parse::<Ipv6Addr>().ok()?;
    (!gid.is_unspecified()).then(|| gid.octets())
}

/// Parses a rate such as "100 Gb/sec (4X EDR)".
fn megabits(rate: &str) -> Option<u32> {
    let number: f64 = rate.split(' ').next()?.parse().ok()?;
    Some((number * 1000.0) as u32)
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The entries of a folder, numbers in numeric order.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

/// Pairs the owner's rails with this process's, as (theirs, ours): of the same link type, the longest common address
/// prefix first, each used once.
pub(super) fn pair(theirs: &[(Link, Gid)], ours: &[(Link, Gid)]) -> Vec<(usize, usize)> {
    let mut all: Vec<(u32, usize, usize)> = Vec::new();
    for (at, (link, gid)) in theirs.iter().enumerate() {
        for (here, (our_link, our_gid)) in ours.iter().enumerate() {
            let common = (u128::from_be_bytes(*gid) ^ u128::from_be_bytes(*our_gid)).leading_zeros();
            // Two InfiniBand subnets would need a router, and we know of none.
            if link == our_link && (*link == Link::Ethernet || common >= 64) {
                all.push((128 - common, at, here));
            }
        }
    }
    all.sort_unstable();
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for (_, at, here) in all {
        if !pairs.iter().any(|(theirs, ours)| *theirs == at || *ours == here) {
            pairs.push((at, here));
        }
    }
    pairs.sort_unstable();
    pairs
}

/// Which of the fastest rails is nearest to a NUMA node.
pub(super) fn nearest(rails: &[(u32, Option<u32>)], node: Option<u32>) -> usize {
    let Some(node) = node else { return 0 };
    let fastest = rails.iter().map(|(rate, _)| *rate).max().unwrap_or(0);
    let distances = distances(node);
    let far = |rail: &(usize, &(u32, Option<u32>))| {
        rail.1.1.and_then(|its| distances.get(its as usize).copied()).unwrap_or(u32::MAX)
    };
    rails.iter().enumerate().filter(|(_, (rate, _))| *rate == fastest).min_by_key(far).map_or(0, |(at, _)| at)
}

/// The distances from a node to all nodes.
fn distances(node: u32) -> Vec<u32> {
    let text = text(&Path::new(NODES).join(format!("node{node}/distance"))).unwrap_or_default();
    text.split_ascii_whitespace().map(|number| number.parse().unwrap_or(u32::MAX)).collect()
}

/// The NUMA node of a page of this process; none if unknown, or if there is only one node.
pub(super) fn node_of(address: u64) -> Option<u32> {
    if !Path::new(NODES).join("node1").exists() {
        return None;
    }
    let page = address as *mut libc::c_void;
    let mut node: libc::c_int = -1;
    // SAFETY: without a list of nodes it moves nothing and only writes the page's location to `node`.
    let done = unsafe { libc::syscall(libc::SYS_move_pages, 0, 1, &raw const page, 0, &raw mut node, 0) };
    u32::try_from(node).ok().filter(|_| done == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A folder like the kernel's, removed when dropped.
    struct Tree(PathBuf);

    impl Tree {
        fn new() -> Self {
            let unique = crate::realm::random().unwrap();
            let path = std::env::temp_dir().join(format!("mesh-scan-{:x}", u128::from_le_bytes(unique)));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        }

        fn port(&self, device: &str, number: u8, link: &str, rate: &str, gids: &[(&str, &str)]) {
            self.write(&format!("{device}/node_type"), "1: CA");
            let at = format!("{device}/ports/{number}");
            self.write(&format!("{at}/state"), "4: ACTIVE");
            self.write(&format!("{at}/link_layer"), link);
            self.write(&format!("{at}/rate"), rate);
            self.write(&format!("{at}/lid"), "0x1f");
            for (index, (gid, kind)) in gids.iter().enumerate() {
                self.write(&format!("{at}/gids/{index}"), gid);
                self.write(&format!("{at}/gid_attrs/types/{index}"), kind);
            }
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const LOCAL: &str = "fe80:0000:0000:0000:0200:00ff:fe00:0001";
    const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a4d:0001";
    const GLOBAL: &str = "2001:0db8:0000:0000:0000:0000:0000:0001";
    const NONE: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

    #[test]
    fn no_folder_is_no_device() {
        let tree = Tree::new();
        assert!(!has_devices(&tree.0.join("missing")));
        assert!(!has_devices(&tree.0));
        assert_eq!(ports(&tree.0.join("missing")), (Vec::new(), Vec::new()));
        tree.port("rxe0", 1, "Ethernet", "100 Gb/sec (4X EDR)", &[]);
        assert!(has_devices(&tree.0));
    }

    #[test]
    fn of_a_port_of_ethernet_the_address_that_reaches_farthest_is_taken() {
        let tree = Tree::new();
        let v2 = "RoCE v2";
        tree.port("a", 1, "Ethernet", "1 Gb/sec", &[(LOCAL, v2), (GLOBAL, v2), (IPV4, "IB/RoCE v1"), (IPV4, v2)]);
        tree.port("b", 1, "Ethernet", "1 Gb/sec", &[(LOCAL, v2), (NONE, v2), (GLOBAL, v2)]);
        tree.port("c", 1, "Ethernet", "1 Gb/sec", &[(LOCAL, v2)]);
        tree.port("d", 1, "Ethernet", "1 Gb/sec", &[(IPV4, "IB/RoCE v1")]);
        let (found, passed) = ports(&tree.0);
        assert_eq!(found.iter().map(|port| port.gid_index).collect::<Vec<_>>(), [3, 2, 0]);
        assert_eq!(address(&found[0].gid).unwrap().to_string(), "10.77.0.1");
        assert_eq!(address(&found[1].gid).unwrap().to_string(), "2001:db8::1");
        assert_eq!(address(&found[2].gid), None);
        assert_eq!(passed.len(), 1);
        assert!(passed[0].starts_with("d, port 1: no address"), "{passed:?}");
    }

    /// RAI-1
    #[test]
    fn the_fastest_ports_come_first_and_at_most_four() {
        let tree = Tree::new();
        for (name, rate) in [("a", "10 Gb/sec"), ("b", "400 Gb/sec (4X NDR)"), ("c", "2.5 Gb/sec"), ("d", "400 Gb/sec")]
        {
            tree.port(name, 1, "InfiniBand", rate, &[(LOCAL, "IB/RoCE v1")]);
        }
        tree.port("d", 2, "InfiniBand", "400 Gb/sec", &[(LOCAL, "IB/RoCE v1")]);
        tree.write("d/device/numa_node", "1");
        tree.write("a/device/numa_node", "-1");
        let (found, _) = ports(&tree.0);
        let said: Vec<_> = found.iter().map(|port| (port.device.as_str(), port.number, port.rate, port.node)).collect();
        let fast = 400_000;
        assert_eq!(
            said,
            [("b", 1, fast, None), ("d", 1, fast, Some(1)), ("d", 2, fast, Some(1)), ("a", 1, 10_000, None)]
        );
        assert_eq!((found[0].lid, found[0].link), (0x1f, Link::InfiniBand));
    }

    #[test]
    fn a_port_that_is_down_and_a_device_of_another_kind_are_passed_over() {
        let tree = Tree::new();
        tree.port("a", 1, "Ethernet", "10 Gb/sec", &[(IPV4, "RoCE v2")]);
        tree.write("a/ports/1/state", "1: DOWN");
        tree.port("b", 1, "Ethernet", "10 Gb/sec", &[(IPV4, "RoCE v2")]);
        tree.write("b/node_type", "4: RNIC");
        let (found, passed) = ports(&tree.0);
        assert_eq!(found, []);
        assert_eq!(passed, ["a, port 1: not active", "b is not an InfiniBand or RoCE adapter"]);
    }

    fn v4(last: [u8; 4]) -> (Link, Gid) {
        (Link::Ethernet, std::net::Ipv4Addr::from(last).to_ipv6_mapped().octets())
    }

    #[test]
    fn rails_of_one_network_are_paired() {
        let theirs = [v4([10, 1, 0, 1]), v4([10, 2, 0, 1])];
        assert_eq!(pair(&theirs, &[v4([10, 2, 0, 9]), v4([10, 1, 0, 9])]), [(0, 1), (1, 0)]);
        assert_eq!(pair(&theirs, &theirs), [(0, 0), (1, 1)]);
        assert_eq!(pair(&theirs, &[v4([10, 2, 0, 9])]), [(1, 0)]);
        assert_eq!(pair(&theirs, &[]), []);
        let of = |subnet: u8, last: u8| {
            let mut gid = [0; 16];
            (gid[0], gid[7], gid[15]) = (0xfe, subnet, last);
            (Link::InfiniBand, gid)
        };
        assert_eq!(pair(&[of(1, 1)], &[of(2, 1)]), []);
        assert_eq!(pair(&[of(1, 1)], &[v4([10, 2, 0, 9]), of(1, 2)]), [(0, 1)]);
    }

    #[test]
    fn the_nearest_of_the_fastest_rails_is_preferred_where_it_can_be_told() {
        assert_eq!(nearest(&[(100, None), (100, Some(0))], None), 0);
        assert_eq!(nearest(&[(50, None), (100, None)], Some(9999)), 1);
        assert_eq!(nearest(&[], Some(0)), 0);
        if !distances(0).is_empty() {
            assert_eq!(nearest(&[(100, None), (100, Some(0)), (50, Some(0))], Some(0)), 1);
        }
    }
}
