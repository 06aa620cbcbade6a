//! Memory reached by UCX: one-sided operations of libucp, which is opened at run time if the user has switched it on.
//!
//! UCX authenticates nobody and checks no addresses: anyone who can reach a worker can have it read and write any
//! memory of its process. This transport is therefore used only if the user asks for it. Among those who use it:
//!
//! Before anything else both ends of the control connection prove that they know the owner's door key, which only its
//! handles carry. Only then does the owner send its worker's address, so the reader knows that it reaches the owner.
//!
//! UCX-2: a reader uses an export only after the owner has described it on that connection, in return for its token.
//! The reader checks bounds and rights against that description. An owner that closes an export first has every reader
//! leave it.
//! UCX-3: the owner has a worker for each reader. If the reader ends, or does not leave an export in time, its worker
//! is destroyed before the memory is released: whatever is still on its way arrives nowhere. Copies that the kernel
//! makes for a reader on the owner's host (`cma`) are also under a lease (LSE-1).
//! UCX-5: UCX's `tcp` is never used. It is not one-sided: the peer answers each read and acknowledges each write, and
//! UCX ends a process that cannot send such an answer because its peer is gone.
//! UCX-6: UCX requests are zeroed when they are made, so that a worker can be destroyed while answers to its reader are
//! still queued.

mod driver;
mod library;
mod objects;
mod owner;
mod peer;
mod places;
mod plan;
mod signal;
mod wire;

use super::{Capabilities, Peer, Transport};
use crate::error::TransferError;
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::lock;
use crate::realm::Realm;
use crate::watch::Watch;
use std::sync::{Arc, Mutex, OnceLock};

pub(crate) const NAME: &str = "ucx";

/// The transport in this process.
#[derive(Debug)]
pub(crate) struct Ucx {
    realm: Realm,
    /// Where the library may be; none if UCX is switched off.
    libraries: Option<Vec<String>>,
    context: OnceLock<Result<Arc<objects::Context>, TransferError>>,
    service: Mutex<Option<Arc<owner::Service>>>,
    drivers: Arc<driver::Drivers>,
}

impl Ucx {
    pub(crate) fn new(realm: &Realm, libraries: Option<Vec<String>>) -> Self {
        Self {
            realm: realm.clone(),
            libraries,
            context: OnceLock::new(),
            service: Mutex::default(),
            drivers: Arc::default(),
        }
    }

    fn context(&self) -> Result<&Arc<objects::Context>, TransferError> {
        let made = self.context.get_or_init(|| {
            let Some(libraries) = &self.libraries else {
                return Err(TransferError::transport(
                    "it is switched off: UCX lets anyone who can reach its ports read and write all memory of a process. \
                     If only trusted machines can, set MESH_RDMA_UCX=1",
                ));
            };
            objects::Context::new(Arc::new(library::Library::open(libraries)?)).map(Arc::new)
        });
        made.as_ref().map_err(TransferError::clone)
    }

    fn serving(&self) -> Option<Arc<owner::Service>> {
        lock(&self.service).clone()
    }
}

impl Transport for Ucx {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: false, remote: true, one_sided: false }
    }

    fn probe(&self) -> Result<(), TransferError> {
        self.context().map(|_| ())
    }

    fn offer(&self, exports: &Arc<Exports>, _export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        self.drivers.check()?;
        let mut service = lock(&self.service);
        let service = match &mut *service {
            Some(service) => service,
            empty => empty.insert(Arc::new(owner::Service::start(exports, self.context()?)?)),
        };
        Ok(places::Places::here(service.port, service.door, exports.descriptor()).encode())
    }

    fn holds_memory(&self) -> bool {
        self.serving().is_some()
    }

    fn withdraw(&self, export: &Export) {
        if let Some(service) = self.serving() {
            service.withdraw(export);
        }
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        self.drivers.check()?;
        let places = places::Places::decode(section)?;
        let peer = peer::UcxPeer::new(&self.realm, handle, &places, self.context()?, &self.drivers)?;
        peer.reach(watch)?;
        Ok(Arc::new(peer))
    }

    fn end(&self) {
        if self.realm.check_fork().is_err() {
            return;
        }
        self.drivers.stop();
        if let Some(service) = self.serving() {
            service.stop();
        }
    }
}
