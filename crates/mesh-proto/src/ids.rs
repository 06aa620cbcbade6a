//! Names of things. Whoever needs an id makes it at once, without asking anybody.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A mesh of procs. `0` is the controller's own mesh of one.
pub type MeshId = u64;
/// An actor; the same id on every rank of its mesh.
pub type ActorId = u64;
/// A host of a job: 0 is the controller's, the others are numbered in the order in which they were attached.
pub type HostNo = u32;
/// A call that waits for replies; unique within the process that made it.
pub type CallId = u64;

/// Each host's extensions run in a proc, whose mesh has this number plus the host's. Meshes that programs spawn have
/// random 64-bit numbers.
pub const HOST_MESHES: MeshId = 1 << 40;

/// Whether this is the mesh of the proc that runs a host's extensions.
#[must_use]
pub const fn is_host_mesh(mesh: MeshId) -> bool {
    mesh >> HostNo::BITS == HOST_MESHES >> HostNo::BITS
}

/// The scripts that have joined a job whose controller outlives them have one mesh each, numbered from here in the
/// order of their arrival.
pub const GUEST_MESHES: MeshId = 1 << 41;

/// Whether this is the mesh of a script that has joined the job.
#[must_use]
pub const fn is_guest_mesh(mesh: MeshId) -> bool {
    mesh >> HostNo::BITS == GUEST_MESHES >> HostNo::BITS
}

/// Where a proc is: its mesh, its rank there, and its host. Routing needs nothing else.
///
/// Mesh 0 is that of the host agents, whose ranks are their hosts' numbers; the controller is the agent of host 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcAddr {
    /// The mesh that the proc belongs to.
    pub mesh: MeshId,
    /// Its rank in that mesh.
    pub rank: u32,
    /// The host that it is on.
    pub host: HostNo,
}

impl ProcAddr {
    /// The process that runs the user's script.
    pub const CONTROLLER: Self = Self::agent(0);

    /// The agent of a host.
    #[must_use]
    pub const fn agent(host: HostNo) -> Self {
        Self { mesh: 0, rank: host, host }
    }

    /// Whether this is a host's agent; the controller is one.
    #[must_use]
    pub const fn is_agent(&self) -> bool {
        self.mesh == 0
    }

    /// Whether this is a script that has joined a job that outlives it: what it owns remains when it ends.
    #[must_use]
    pub const fn is_guest(&self) -> bool {
        is_guest_mesh(self.mesh)
    }

    /// Whether this is a process that runs a user's script: the controller, or one that has joined its job.
    #[must_use]
    pub const fn is_script(&self) -> bool {
        (self.mesh == 0 && self.host == 0) || self.is_guest()
    }
}

impl fmt::Display for ProcAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.mesh, self.host) {
            (0, 0) => f.write_str("controller"),
            (0, host) => write!(f, "agent of host {host}"),
            (mesh, 0) => write!(f, "{mesh:x}.{}", self.rank),
            (mesh, host) => write!(f, "{mesh:x}.{} on host {host}", self.rank),
        }
    }
}

/// Makes ids that other makers are most unlikely to make: a random origin and a full-period walk over 64 bits.
#[derive(Debug)]
pub struct IdMaker {
    origin: u64,
    made: AtomicU64,
}

impl IdMaker {
    /// A maker that starts from `origin`, which should be random.
    #[must_use]
    pub fn new(origin: u64) -> Self {
        Self { origin, made: AtomicU64::new(1) }
    }

    /// The next id; never 0, which is reserved for the controller's mesh and for "no call".
    pub fn next(&self) -> u64 {
        loop {
            let n = self.made.fetch_add(1, Ordering::Relaxed);
            let id = mix(self.origin ^ mix(n));
            if id != 0 {
                return id;
            }
        }
    }
}

/// The finaliser of SplitMix64: a bijection, so one maker never repeats itself.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meshes_of_hosts_are_told_from_others() {
        for host in [0, 1, HostNo::MAX] {
            assert!(is_host_mesh(HOST_MESHES + MeshId::from(host)));
        }
        for mesh in [0, 1, HOST_MESHES - 1, HOST_MESHES + (1 << 32), HOST_MESHES << 1, MeshId::MAX] {
            assert!(!is_host_mesh(mesh));
        }
    }

    #[test]
    fn guests_are_told_from_others() {
        for number in [0, 1, u32::MAX] {
            let guest = ProcAddr { mesh: GUEST_MESHES + MeshId::from(number), rank: 0, host: 0 };
            assert!(guest.is_guest() && guest.is_script() && !guest.is_agent());
        }
        assert!(
            ProcAddr::CONTROLLER.is_script() && !ProcAddr::CONTROLLER.is_guest() && !ProcAddr::agent(1).is_script()
        );
        for mesh in [1, HOST_MESHES, GUEST_MESHES - 1, GUEST_MESHES + (1 << 32), MeshId::MAX] {
            assert!(!is_guest_mesh(mesh));
        }
    }

    #[test]
    fn one_maker_never_repeats_and_never_gives_zero() {
        let maker = IdMaker::new(42);
        let mut seen = std::collections::HashSet::new();
        assert!((0..100_000).map(|_| maker.next()).all(|id| id != 0 && seen.insert(id)));
    }
}
