//! Memory reached through the RDMA devices of both ends, over InfiniBand or RoCE: one-sided reads and writes that do
//! not involve the owner's processor.
//!
//! GPU memory is offered as dma-buf: the devices copy from and to the GPU directly.
//!
//! VRB-2: each export is registered separately with the owner's devices, with exactly its bytes, so its keys open
//! nothing else.
//! ATM-1 holds: unless this transport is requested by name, atomic operations go by another transport to the owner's
//! processor. A device's atomic operations are atomic with respect to each other, but not to those of processors.

mod client;
mod device;
mod link;
mod offers;
mod requests;
mod scan;
mod server;
mod sys;
mod wire;

use super::{Capabilities, Peer, Transport};
use crate::error::TransferError;
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::host_addresses::host_addresses;
use crate::lock;
use crate::realm::Realm;
use crate::segments::Segment;
use crate::watch::Watch;
use device::{Rail, Region};
use offers::Offers;
use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
pub(crate) use wire::NAME;
use wire::Section;

/// The transport in this process.
#[derive(Debug)]
pub(crate) struct Ibverbs {
    realm: Realm,
    devices: PathBuf,
    /// The path of libibverbs, if not the system's.
    library: Option<String>,
    /// Opened when first needed, and only if the kernel lists devices.
    rails: OnceLock<Result<Arc<[Rail]>, TransferError>>,
    server: Mutex<Option<server::Server>>,
    offers: Arc<Offers>,
}

impl Ibverbs {
    pub(crate) fn new(realm: &Realm, library: Option<String>) -> Self {
        Self {
            realm: realm.clone(),
            devices: PathBuf::from(scan::DEVICES),
            library,
            rails: OnceLock::new(),
            server: Mutex::default(),
            offers: Arc::default(),
        }
    }

    fn rails(&self) -> Result<&Arc<[Rail]>, TransferError> {
        self.rails.get_or_init(|| self.open()).as_ref().map_err(Clone::clone)
    }

    fn open(&self) -> Result<Arc<[Rail]>, TransferError> {
        if !scan::has_devices(&self.devices) {
            return Err(TransferError::transport(
                "the kernel has no RDMA device: either there is no adapter, or its driver is not loaded",
            ));
        }
        let (ports, passed) = scan::ports(&self.devices);
        if ports.is_empty() {
            return Err(TransferError::transport(format!(
                "no port of an RDMA device can be used: {}",
                passed.join("; ")
            )));
        }
        let library = Arc::new(sys::Library::open(self.library.as_deref())?);
        Ok(Rail::open_all(&library, ports)?.into())
    }

    fn server(&self, exports: &Arc<Exports>) -> Result<MutexGuard<'_, Option<server::Server>>, TransferError> {
        let mut server = lock(&self.server);
        if server.is_none() {
            let rails = self.rails()?;
            // Listen near the devices: only those who reach them need to know.
            let mut addresses: Vec<IpAddr> = rails.iter().filter_map(rail_address).collect();
            addresses.extend(host_addresses().first());
            *server = Some(server::Server::start(exports, Arc::clone(rails), &addresses)?);
        }
        Ok(server)
    }
}

fn rail_address(rail: &Rail) -> Option<IpAddr> {
    if rail.port.link == scan::Link::Ethernet { scan::address(&rail.port.gid) } else { None }
}

/// Registers an export, which may be GPU memory, with a device.
fn known_to(rail: &Rail, export: &Export, address: u64, length: u64) -> Result<Region, TransferError> {
    let rights = rail.device.rights(export.writable);
    let Some(on) = &export.on_device else { return rail.device.register(address, length, rights) };
    // CUDA exports whole pages; register only the export's own bytes.
    let page = rustix::param::page_size() as u64;
    let (first, end) = (address / page * page, (address + length).next_multiple_of(page));
    let buffer = on.cuda.driver()?.dma_buf(on.device, first, end - first)?;
    rail.device.register_dma_buf(buffer.as_fd(), (address, address - first, length), rights)
}

impl Transport for Ibverbs {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: false, remote: true, one_sided: true }
    }

    fn atomics_by_name(&self) -> bool {
        self.rails().is_ok_and(|rails| rails.iter().all(|rail| rail.device.limits.atomics))
    }

    /// Offers GPU memory as dma-buf, if the devices, the kernel and CUDA's driver support it.
    fn takes_cuda(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), TransferError> {
        self.rails().map(|_| ())
    }

    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        let rails = self.rails()?;
        let (address, length) = match export.segments.list() {
            [] => (0, 0),
            [one] => (one.addr, one.len),
            _ => return Err(TransferError::transport("only memory in one piece is offered")),
        };
        // VRB-2
        let mut regions: Vec<Arc<Region>> = Vec::new();
        let mut keys = Vec::new();
        for rail in rails.iter() {
            let known = regions.iter().find(|region| region.is_of(&rail.device)).cloned();
            let region = match known {
                _ if length == 0 => {
                    keys.push(0);
                    continue;
                }
                Some(region) => region,
                None => Arc::new(known_to(rail, export, address, length)?),
            };
            keys.push(region.rkey);
            regions.push(region);
        }
        let (door, key) = match &*self.server(exports)? {
            Some(server) => (server.addr, server.key),
            None => return Err(TransferError::transport("nobody listens for queue pairs")),
        };
        let places: Vec<_> = rails.iter().map(|rail| (rail.port.rate, rail.port.node)).collect();
        let section = Section {
            writable: export.writable,
            nearest: scan::nearest(&places, if export.on_device.is_some() { None } else { scan::node_of(address) }),
            door,
            key,
            address,
            length,
            slot: export.slot,
            generation: export.generation,
            rails: rails
                .iter()
                .zip(keys)
                .map(|(rail, key)| wire::Rail {
                    gid: rail.port.gid,
                    lid: rail.port.lid,
                    link: rail.port.link,
                    mtu: rail.mtu,
                    rate: rail.port.rate,
                    key,
                })
                .collect(),
        };
        let memory = Segment { addr: address, len: length };
        self.offers.insert((export.slot, export.generation), memory, export.writable, regions);
        Ok(section.encode())
    }

    fn holds_memory(&self) -> bool {
        !self.offers.is_empty()
    }

    fn withdraw(&self, export: &Export) {
        self.offers.remove((export.slot, export.generation));
    }

    fn forked(&self) {
        if let Ok(server) = self.server.try_lock()
            && let Some(server) = &*server
        {
            server.forked();
        }
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let section = Section::decode(section)?;
        let rails = self.rails()?;
        let is_here = handle.boot == self.realm.boot;
        let peer = client::VerbsPeer::new(handle, section, (rails, &self.offers), is_here)?;
        peer.greet(watch)?;
        Ok(Arc::new(peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::segments::Segments;

    fn transport(devices: PathBuf) -> (Ibverbs, Realm) {
        let realm = Realm::draw().unwrap();
        (Ibverbs { devices, ..Ibverbs::new(&realm, None) }, realm)
    }

    #[test]
    fn a_machine_without_devices_says_so_and_offers_nothing() {
        let (transport, realm) = transport(PathBuf::from("/nonexistent"));
        let why = transport.probe().unwrap_err();
        assert_eq!(why.kind, ErrorKind::Transport);
        assert!(why.message.contains("no RDMA device"), "{why}");
        assert!(!transport.atomics_by_name());
        let exports = Arc::new(Exports::new(&realm).unwrap());
        let data = [0_u8; 8];
        // SAFETY: `data` lives to the end of the test.
        let export = unsafe { exports.open(Segments::one(data.as_ptr() as u64, 8), false, Box::new(())) }.unwrap();
        assert_eq!(transport.offer(&exports, &export).unwrap_err(), why);
        assert!(!transport.holds_memory());
    }

    #[test]
    fn devices_without_a_port_to_use_are_named() {
        let unique = u128::from_le_bytes(crate::realm::random().unwrap());
        let folder = std::env::temp_dir().join(format!("mesh-verbs-{unique:x}"));
        std::fs::create_dir_all(folder.join("odd0")).unwrap();
        let why = transport(folder.clone()).0.probe().unwrap_err();
        std::fs::remove_dir_all(folder).unwrap();
        assert!(why.message.contains("odd0 is not an InfiniBand or RoCE adapter"), "{why}");
    }
}
