//! Which hosts there are, for people, and hosts that are released.
//!
//! REL-2: once the release of a host has begun, its end, or that of its processes, never counts as a failure, however
//! it comes.

use super::{Gateway, Peer, Wire};
use crate::control::Introduction;
use crate::hosts::{Fate, HostSet, Standing};
use crate::{CallId, HostEnd, HostNo};
use std::sync::Arc;

/// The state of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostState {
    /// It is being attached.
    Attaching,
    /// It is part of the job.
    Running,
    /// It is silent.
    Suspect,
    /// The connection was lost, and is being restored.
    Unreachable,
    /// It was released.
    Stopped,
    /// It is dead.
    Dead,
}

impl HostState {
    /// One word, as in snapshots of a job.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Attaching => "attaching",
            Self::Running => "running",
            Self::Suspect => "suspect",
            Self::Unreachable => "unreachable",
            Self::Stopped => "stopped",
            Self::Dead => "dead",
        }
    }
}

/// A host, as the controller knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostView {
    /// Its number.
    pub host: HostNo,
    /// What it calls itself, else its address; empty if neither is known.
    pub name: String,
    /// Where it was attached; empty if it has dialed.
    pub address: String,
    /// Its agent's process; 0 if unknown.
    pub pid: u64,
    /// How it is.
    pub state: HostState,
    /// Why it is dead, if it is.
    pub fate: Option<Fate>,
    /// Why, if it is not running.
    pub why: String,
}

/// The end to report for a host that ended while it was being released (REL-2): `released` says why, if it was.
pub(super) fn end_of(released: Option<&'static str>, fate: Fate, why: String) -> (Fate, String) {
    match released {
        Some(asked) if fate != Fate::Released => {
            (Fate::Released, format!("{asked}; it was gone before it had ended what ran there: {why}"))
        }
        _ => (fate, why),
    }
}

impl<W: Wire> Gateway<W> {
    /// The hosts that are attached and not dead.
    #[must_use]
    pub fn live_hosts(&self) -> Vec<HostNo> {
        self.topology.hosts().iter().filter(|host| *host != self.me).collect()
    }

    /// Whether such a host exists or existed.
    #[must_use]
    pub fn knows(&self, host: HostNo) -> bool {
        self.topology.knows(host)
    }

    /// Whether the controller declared a host dead.
    #[must_use]
    pub fn is_dead(&self, host: HostNo) -> bool {
        self.standing(host) == Standing::Dead
    }

    /// Whether there ever was a connection to a host.
    #[must_use]
    pub fn was_connected(&self, host: HostNo) -> bool {
        self.peers.get(&host).is_some_and(|peer| peer.incarnation != 0)
    }

    /// A host's standing.
    #[must_use]
    pub fn stands(&self, host: HostNo) -> Standing {
        self.standing(host)
    }

    /// The connections to all other hosts, for observers: number, whether it is up, bytes under way.
    #[must_use]
    pub fn peers(&self) -> Vec<(HostNo, bool, u64)> {
        let view = |(host, peer): (&HostNo, &Peer<W::Connection>)| {
            (*host, peer.connection.is_some(), self.peer_streams.outstanding(*host))
        };
        self.peers.iter().map(view).collect()
    }

    /// The hosts that were attached here, including dead ones.
    #[must_use]
    pub fn roll(&self) -> Vec<HostView> {
        let children = self.topology.children(self.me);
        let view = |host: HostNo| {
            let peer = self.peers.get(&host);
            let said = peer.and_then(|peer| peer.introduction.as_ref());
            let address = peer.and_then(|peer| peer.address.clone()).unwrap_or_default();
            let state = match (self.standing(host), said) {
                (Standing::Dead, _) if peer.is_some_and(Peer::is_released) => HostState::Stopped,
                (Standing::Dead, _) => HostState::Dead,
                (_, None) => HostState::Attaching,
                (Standing::Suspect, _) => HostState::Suspect,
                _ if children.contains(host) && peer.is_none_or(|peer| peer.connection.is_none()) => {
                    HostState::Unreachable
                }
                _ => HostState::Running,
            };
            let why = |peer: &Peer<W::Connection>| {
                peer.verdict.as_ref().map_or_else(|| peer.why.clone(), |verdict| verdict.why.clone())
            };
            HostView {
                host,
                name: said.map_or_else(|| address.clone(), |said| said.name.clone()),
                address,
                pid: said.map_or(0, |said| said.pid),
                state,
                fate: peer.and_then(|peer| peer.verdict.as_ref()).map(|verdict| verdict.fate),
                why: peer.filter(|_| state != HostState::Running).map(why).unwrap_or_default(),
            }
        };
        let known = (1..self.next_host).filter(|host| *host != self.me && self.topology.knows(*host));
        known.map(view).collect()
    }

    /// What a host said of itself, if anything.
    #[must_use]
    pub fn introduction(&self, host: HostNo) -> Option<&Introduction> {
        self.peers.get(&host)?.introduction.as_ref()
    }

    /// Notes what a host says of itself in its answer to this call. Returns whether that was expected, and new.
    pub fn introduce(&mut self, host: HostNo, call: CallId, said: impl FnOnce() -> Option<Introduction>) -> bool {
        let Some(peer) = self.peers.get_mut(&host) else { return false };
        let expected = peer.attachment.as_ref().is_some_and(|told| told.call == call);
        if !expected || peer.introduction.is_some() {
            return false;
        }
        peer.introduction = said();
        peer.introduction.is_some()
    }

    /// A host's name for people, as far as it is known here.
    #[must_use]
    pub fn name_of(&self, host: HostNo) -> Option<String> {
        let peer = self.peers.get(&host)?;
        let said = peer.introduction.as_ref().map(|said| said.name.clone());
        said.or_else(|| peer.address.clone()).filter(|name| !name.is_empty())
    }

    /// A host's name and address, as reported with its death.
    pub(super) fn label_of(&self, host: HostNo) -> String {
        let address = self.peers.get(&host).and_then(|peer| peer.address.clone());
        let name = self.name_of(host).filter(|name| Some(name) != address.as_ref());
        let parts = [name.unwrap_or(host.to_string()), address.unwrap_or_default()];
        parts.iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Why nothing goes to a host.
    #[must_use]
    pub fn verdict_on(&self, host: HostNo) -> Arc<HostEnd> {
        if let Some(verdict) = self.peers.get(&host).and_then(|peer| peer.verdict.clone()) {
            return verdict;
        }
        Arc::new(HostEnd::absent(if host < self.next_host && !self.topology.knows(host) {
            format!("host {host} has not dialed this script yet; wait for the `initialized` of its mesh of hosts first")
        } else {
            format!("host {host} is not, or not any more, part of this job")
        }))
    }

    /// At the controller: releases these hosts (REL-2). Returns those that are not attached yet: nothing runs there,
    /// and there may be nobody to answer.
    pub fn release(&mut self, hosts: &HostSet, why: &'static str) -> Vec<HostNo> {
        let mut absent = Vec::new();
        for host in hosts.iter() {
            let peer = self.peer(host);
            peer.released = Some(why);
            if peer.introduction.is_none() {
                absent.push(host);
            }
        }
        absent
    }
}
