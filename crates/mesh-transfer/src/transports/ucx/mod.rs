//! Memory reached by UCX: one-sided operations of libucp, which is opened at run time where the user has switched it on.
//!
//! UCX itself asks nobody who they are, and looks at no address: whoever reaches a worker may have it read and write any
//! memory of its process. So this transport is used only where the user has said so, and these hold among those who use it:
//!
//! Before anything else both ends of the control connection prove that they know the owner's door key, which only its
//! handles carry. The address of the owner's worker is told only then, so that it is the owner that is reached.
//!
//! UCX-2: a reader uses an export only after the owner has shown it on that connection, to who has shown its token; it checks
//! bounds and rights by what the owner says there. An owner that closes an export has every reader leave it first.
//! UCX-3: each reader has a worker of its own at the owner. If the reader ends, or does not leave in time, that worker is ended
//! before the memory is let go: what is still on its way finds nobody. What the kernel does for the reader on the owner's
//! host (`cma`) is under a lease besides (LSE-1).
//! UCX-5: nothing goes over UCX's `tcp`. There is nothing one-sided about that: the other end answers each read and acknowledges
//! each write, and UCX ends the process that cannot say so any more, as who wanted to know has gone.
//! UCX-6: a request of UCX begins as zeros, so that a worker can be ended while answers to its reader have not left it.

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

/// The transport, in this process.
#[derive(Debug)]
pub(crate) struct Ucx {
    realm: Realm,
    /// Where the library may be; none where UCX is switched off.
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
                    "it is switched off: UCX lets whoever reaches its ports read and write all memory of a process. \
                     Where only those you trust can, set MESH_RDMA_UCX=1",
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
