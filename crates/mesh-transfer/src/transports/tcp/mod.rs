//! Memory reached by asking its owner, over TCP: a native thread there reads and writes it, without the interpreter.
//!
//! TCP-1: both ends prove that they know the owner's door key, which only its handles carry, before anything else is said;
//! neither tells it. Who has not proved it has a bounded place, bounded bytes and bounded time.
//! TCP-2: every request shows the token of its export and is checked against the owner's table.
//! TCP-3: the bytes are not encrypted, so that the owner listens on the loopback interface only.

mod client;
mod server;
mod stream;
mod wire;

use super::{Capabilities, Peer, Transport};
use crate::error::TransferError;
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::realm::{Realm, namespace, random};
use crate::watch::Watch;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) const NAME: &str = "tcp";

/// The transport, in this process.
#[derive(Debug)]
pub(crate) struct Tcp {
    realm: Realm,
    namespace: u64,
    /// In which process numbers mean what they mean here.
    numbers: u64,
    server: Mutex<Option<server::Server>>,
}

impl Tcp {
    pub(crate) fn new(realm: &Realm) -> Self {
        Self { realm: realm.clone(), namespace: namespace("net"), numbers: namespace("pid"), server: Mutex::default() }
    }
}

impl Transport for Tcp {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: true, remote: false, one_sided: false }
    }

    fn probe(&self) -> Result<(), TransferError> {
        std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map(drop)
            .map_err(|error| TransferError::transport(format!("cannot listen on 127.0.0.1: {error}")))
    }

    fn offer(&self, exports: &Arc<Exports>, _export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        let mut server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let server = match &mut *server {
            Some(server) => server,
            empty => empty.insert(server::Server::start(exports, random()?)?),
        };
        let mut section = server.port.to_le_bytes().to_vec();
        section.extend_from_slice(&self.namespace.to_le_bytes());
        section.extend_from_slice(&self.numbers.to_le_bytes());
        section.extend_from_slice(&server.door);
        Ok(section)
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let damaged = || TransferError::invalid("the handle's part for the transport tcp is damaged");
        let bytes: &[u8; 34] = section.try_into().map_err(|_| damaged())?;
        let port = u16::from_le_bytes([bytes[0], bytes[1]]);
        let there = u64::from_le_bytes(std::array::from_fn(|i| bytes[2 + i]));
        let numbers = u64::from_le_bytes(std::array::from_fn(|i| bytes[10 + i]));
        let door = std::array::from_fn(|i| bytes[18 + i]);
        if handle.boot != self.realm.boot || there != self.namespace {
            return Err(TransferError::transport(
                "its owner is on another host or in another network namespace, and listens on its loopback interface \
                 only: transfers over tcp are not encrypted",
            ));
        }
        let addr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let peer = client::TcpPeer::new(addr, handle.realm, door, handle.pid, numbers == self.numbers);
        peer.greet(watch)?;
        Ok(Arc::new(peer))
    }
}
