//! Which host each rank of a mesh is on.

use crate::hosts::HostSet;
use crate::{FrameError, HostNo, ProcAddr};
use mesh_topology::{Region, Wire};
use std::sync::Arc;

const ON_ONE: u8 = 0;
const AGENTS: u8 = 1;
const SPREAD: u8 = 2;

/// Where the procs of a mesh are. It travels with every reference to the mesh, so that nobody needs to ask.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// All on one host.
    On(HostNo),
    /// The mesh of host agents: each rank is its host's number.
    Agents,
    /// The same number of ranks on each host of a region, one host after the other.
    Spread(Arc<Spread>),
}

/// See [`Placement::Spread`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Spread {
    /// Host numbers, in the order of the ranks.
    pub hosts: Region,
    /// Ranks on each host.
    pub per_host: u32,
}

impl Placement {
    /// `per_host` ranks on each host of a region.
    #[must_use]
    pub fn spread(hosts: Region, per_host: u32) -> Self {
        match (hosts.len(), hosts.rank_at(0)) {
            (1, Ok(only)) => Self::On(number(only)),
            _ => Self::Spread(Arc::new(Spread { hosts, per_host })),
        }
    }

    /// The host of a rank.
    #[must_use]
    pub fn host_of(&self, rank: u32) -> HostNo {
        match self {
            Self::On(host) => *host,
            Self::Agents => rank,
            // A rank that the mesh does not have is on a host that does not exist.
            Self::Spread(spread) => spread.host_of(rank).unwrap_or(HostNo::MAX),
        }
    }

    /// A rank's address.
    #[must_use]
    pub fn addr(&self, mesh: u64, rank: usize) -> ProcAddr {
        let rank = number(rank);
        ProcAddr { mesh, rank, host: self.host_of(rank) }
    }

    /// The ranks on `host`, in a mesh of `len` ranks.
    #[must_use]
    pub fn ranks_on(&self, host: HostNo, len: usize) -> std::ops::Range<usize> {
        match self {
            Self::On(only) if *only == host => 0..len,
            Self::On(_) => 0..0,
            Self::Agents => host as usize..(host as usize + 1),
            Self::Spread(spread) => {
                let per_host = spread.per_host as usize;
                match spread.hosts.position(host as usize) {
                    Some(place) => place * per_host..(place + 1) * per_host,
                    None => 0..0,
                }
            }
        }
    }

    /// The hosts of the ranks of a region.
    #[must_use]
    pub fn hosts_of(&self, region: &Region) -> HostSet {
        match self {
            Self::On(_) if region.is_empty() => HostSet::default(),
            Self::On(host) => HostSet::one(*host),
            Self::Agents => region.iter().map(number).collect(),
            Self::Spread(spread) => {
                let mut last = None;
                let mut hosts = Vec::new();
                for rank in region {
                    let place = rank / spread.per_host.max(1) as usize;
                    if last != Some(place) {
                        last = Some(place);
                        hosts.extend(spread.hosts.rank_at(place).ok().map(number));
                    }
                }
                hosts.into_iter().collect()
            }
        }
    }

    /// How many ranks of a mesh of `len` ranks are on each host.
    #[must_use]
    pub fn per_host(&self, len: usize) -> u32 {
        match self {
            Self::On(_) => number(len),
            Self::Agents => 1,
            Self::Spread(spread) => spread.per_host,
        }
    }

    /// The host, if all ranks are on one.
    #[must_use]
    pub fn only(&self) -> Option<HostNo> {
        match self {
            Self::On(host) => Some(*host),
            Self::Agents | Self::Spread(_) => None,
        }
    }
}

impl Spread {
    fn host_of(&self, rank: u32) -> Option<HostNo> {
        let place = rank.checked_div(self.per_host)?;
        self.hosts.rank_at(place as usize).ok().map(number)
    }
}

fn number(rank: usize) -> u32 {
    u32::try_from(rank).unwrap_or(u32::MAX)
}

impl Placement {
    /// Encodes this as bytes, in the shortest form.
    #[must_use]
    pub fn to_wire(&self) -> Vec<u8> {
        match self {
            Self::On(host) => {
                let mut out = vec![ON_ONE];
                out.extend_from_slice(&host.to_le_bytes());
                out
            }
            Self::Agents => vec![AGENTS],
            Self::Spread(spread) => {
                let mut out = vec![SPREAD];
                out.extend_from_slice(&spread.per_host.to_le_bytes());
                out.extend_from_slice(&spread.hosts.to_wire());
                out
            }
        }
    }

    /// Reads what [`Placement::to_wire`] made.
    ///
    /// # Errors
    /// If the bytes are something else.
    pub fn from_wire(raw: &[u8]) -> Result<Self, FrameError> {
        let malformed = || FrameError::Region("no placement of a mesh".to_owned());
        let (tag, rest) = raw.split_first().ok_or_else(malformed)?;
        match *tag {
            ON_ONE => Ok(Self::On(HostNo::from_le_bytes(rest.try_into().map_err(|_| malformed())?))),
            AGENTS if rest.is_empty() => Ok(Self::Agents),
            SPREAD => {
                let (per_host, hosts) = rest.split_first_chunk::<4>().ok_or_else(malformed)?;
                let hosts = Region::from_wire(hosts).map_err(|error| FrameError::Region(error.to_string()))?;
                let per_host = u32::from_le_bytes(*per_host);
                if per_host == 0 {
                    return Err(malformed());
                }
                Ok(Self::Spread(Arc::new(Spread { hosts, per_host })))
            }
            _ => Err(malformed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh_topology::{Extent, Slice};

    #[test]
    fn ranks_and_hosts_agree() {
        let hosts = Region::new(&["hosts"], Slice::new(3, &[4], &[2]).unwrap()).unwrap();
        let placement = Placement::spread(hosts, 2);
        assert_eq!(Placement::from_wire(&placement.to_wire()).unwrap(), placement);
        let whole = Region::whole(&Extent::new([("hosts", 4), ("gpus", 2)]).unwrap());
        assert_eq!(placement.hosts_of(&whole).iter().collect::<Vec<_>>(), [3, 5, 7, 9]);
        for host in 0..12 {
            let on: Vec<usize> = whole.iter().filter(|rank| placement.host_of(*rank as u32) == host).collect();
            assert_eq!(placement.ranks_on(host, 8).collect::<Vec<_>>(), on);
        }
    }

    #[test]
    fn one_host_is_one_host_however_it_is_said() {
        let hosts = Region::new::<&str>(&[], Slice::new(5, &[], &[]).unwrap()).unwrap();
        assert_eq!(Placement::spread(hosts, 8), Placement::On(5));
        for placement in [Placement::On(5), Placement::Agents] {
            assert_eq!(Placement::from_wire(&placement.to_wire()).unwrap(), placement);
        }
        for raw in [&[][..], &[9], &[0, 1], &[2, 0, 0, 0, 0], &[1, 1]] {
            assert!(Placement::from_wire(raw).is_err(), "{raw:?}");
        }
    }
}
