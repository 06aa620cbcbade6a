//! Memory reached by asking its owner over TCP: a native thread there reads and writes it, without the interpreter.
//!
//! TCP-1: before anything else, both ends prove that they know the owner's door key, which only its handles carry;
//! neither reveals it. Clients that have not proved it are limited in number, bytes and time.
//! TCP-2: every request carries the token of its export and is checked against the owner's table.
//! TCP-3: everything that leaves the loopback interface is encrypted: TLS 1.3, with certificates of one job at both
//! ends. An owner without certificates listens on the loopback interface only.
//! TCP-4 is in `member.rs`, TCP-5 in `sockets.rs`.

mod client;
mod member;
mod remote;
mod section;
mod server;
mod sockets;
mod stream;
#[cfg(test)]
mod tests;
mod wire;

use super::{Capabilities, Peer, Transport};
use crate::error::{ErrorKind, TransferError};
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::lock;
use crate::membership::Membership;
use crate::realm::{Realm, namespace, random};
use crate::watch::Watch;
use client::{TcpPeer, Way};
use member::Member;
use remote::Remote;
use section::{Place, Why};
use sockets::Sockets;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub(crate) const NAME: &str = "tcp";
/// How long to wait before trying again to listen for other hosts.
const AGAIN: Duration = Duration::from_secs(1);

/// The transport in this process.
#[derive(Debug)]
pub(crate) struct Tcp {
    realm: Realm,
    network: u64,
    /// The pid namespace.
    numbers: u64,
    served: Mutex<Served>,
    member: Mutex<Option<Arc<Member>>>,
    sockets: Sockets,
}

/// The servers in this process.
#[derive(Debug, Default)]
struct Served {
    here: Option<server::Server>,
    /// The server for other hosts: for which member, and since when.
    remote: Option<(Arc<Member>, Result<server::Remote, Why>, Instant)>,
    /// Earlier such servers, kept because handles name them: this host had other addresses.
    before: Vec<server::Remote>,
}

impl Tcp {
    pub(crate) fn new(realm: &Realm) -> Self {
        let (network, numbers) = (namespace("net"), namespace("pid"));
        let (served, member, sockets) = (Mutex::default(), Mutex::default(), Sockets::default());
        Self { realm: realm.clone(), network, numbers, served, member, sockets }
    }

    fn member(&self) -> MutexGuard<'_, Option<Arc<Member>>> {
        lock(&self.member)
    }

    /// The addresses at which other hosts reach this process; starts to listen there.
    fn listens(&self, served: &mut Served, exports: &Arc<Exports>) -> Result<Vec<SocketAddr>, Why> {
        let Some(member) = self.member().clone() else { return Err(Why::NoJob) };
        let door = served.here.as_ref().map_or([0; 16], |server| server.door);
        let stands = match &served.remote {
            Some((of, open, since)) => Arc::ptr_eq(of, &member) && (open.is_ok() || since.elapsed() < AGAIN),
            None => false,
        };
        if !stands {
            match served.remote.take() {
                Some((of, Ok(open), _)) if of.said.credentials == member.said.credentials => served.before.push(open),
                // It was for another job, whose members are no longer let in.
                Some((_, Ok(_), _)) => served.before.clear(),
                _ => {}
            }
            let open = if member.said.addresses.iter().all(IpAddr::is_loopback) {
                Err(Why::Alone)
            } else {
                server::Remote::open(exports, door, &member, &self.sockets)
            };
            served.remote = Some((member, open, Instant::now()));
        }
        match &served.remote {
            Some((_, Ok(open), _)) => Ok(open.addrs.clone()),
            Some((_, Err(why), _)) => Err(*why),
            None => Err(Why::NoJob),
        }
    }

    /// Whether the owner's loopback interface is this process's.
    fn is_here(&self, handle: &Handle, place: &Place) -> bool {
        handle.boot == self.realm.boot && place.network == self.network
    }

    /// The way to an owner that is not here.
    fn remote_way(&self, place: &Place) -> Result<Way, TransferError> {
        let elsewhere = "its owner is on another host or in another network namespace";
        let addrs = place.remote.as_ref().map_err(|why| {
            TransferError::transport(format!(
                "{elsewhere}, and listens on its loopback interface only: it {}",
                why.words()
            ))
        })?;
        let Some(member) = self.member().clone() else {
            return Err(TransferError::transport(format!(
                "{elsewhere}, and this process belongs to no job of several hosts, so that nobody there lets it in"
            )));
        };
        member.identity()?;
        Ok(Way::Remote(Remote::new(addrs.clone(), member)))
    }
}

impl Transport for Tcp {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: true, remote: self.member().is_some(), one_sided: false }
    }

    fn takes_cuda(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), TransferError> {
        std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map(drop)
            .map_err(|error| TransferError::transport(format!("cannot listen on 127.0.0.1: {error}")))
    }

    fn join(&self, membership: &Membership) {
        let mut member = self.member();
        if member.as_ref().is_none_or(|member| member.said != *membership) {
            *member = Some(Arc::new(Member::new(membership.clone())));
        }
    }

    fn offer(&self, exports: &Arc<Exports>, _export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        let mut served = lock(&self.served);
        let (port, door) = match &mut served.here {
            Some(server) => (server.port, server.door),
            empty => {
                let server = empty.insert(server::Server::start(exports, random()?, &self.sockets)?);
                (server.port, server.door)
            }
        };
        let remote = self.listens(&mut served, exports);
        Ok(Place { port, network: self.network, numbers: self.numbers, door, remote }.encode())
    }

    fn forked(&self) {
        self.sockets.let_go();
    }

    fn why_not(&self, handle: &Handle, section: &[u8]) -> Option<String> {
        let place = Place::decode(section).ok()?;
        if self.is_here(handle, &place) { None } else { self.remote_way(&place).err().map(|error| error.message) }
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let place = Place::decode(section)?;
        let reach = |way, is_here| {
            let peer = TcpPeer::new(way, (handle.realm, place.door), handle.pid, is_here, &self.sockets);
            peer.greet(watch)?;
            Ok::<Arc<dyn Peer>, TransferError>(Arc::new(peer))
        };
        if !self.is_here(handle, &place) {
            return reach(self.remote_way(&place)?, false);
        }
        let addr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), place.port);
        match (reach(Way::Here(addr), place.numbers == self.numbers), self.remote_way(&place)) {
            // Machines cloned while running look like one: the owner may be on the other one.
            (Err(error), Ok(way)) if error.kind == ErrorKind::Gone => reach(way, false).map_err(|_| error),
            (reached, _) => reached,
        }
    }
}
