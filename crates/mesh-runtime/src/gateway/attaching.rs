//! Attaching hosts, at the controller, before all that it takes to connect to them is known.
//!
//! Credentials may lie on a slow disk, names may take long to look up, and a launcher may not know an address yet. So
//! hosts get their numbers and their places in the tree at once, and messages to them wait in their peer streams (ATT-1).

use super::greeting::GREETING;
use super::{Event, GatewayOptions, agents};
use crate::calls::Call;
use crate::error::{ErrorKind, RuntimeError};
use crate::runtime::{Runtime, lock};
use crate::tls::{Identity, resolve};
use mesh_proto::hosts::{Fate, HostSet};
use mesh_proto::{HostNo, ProcAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How a script is told that its own credentials, or its own address, are of no use.
fn fate_of(error: &RuntimeError) -> Fate {
    match error.kind() {
        ErrorKind::Credentials => Fate::NotAuthenticated,
        _ => Fate::NotAttached,
    }
}

impl Runtime {
    fn may_attach(&self) -> Result<Arc<Self>, RuntimeError> {
        self.usable()?;
        self.this().filter(|_| self.me == ProcAddr::CONTROLLER).ok_or(RuntimeError::NotController)
    }

    /// Runs what may take long on a thread of its own; if it fails, none of these hosts can be used.
    fn attach_behind(
        &self,
        hosts: HostSet,
        work: impl FnOnce(&Arc<Self>) -> Result<(), RuntimeError> + Send + 'static,
    ) -> Result<(), RuntimeError> {
        let this = self.weak();
        let behind = move || {
            let Some(runtime) = this.upgrade() else { return };
            if let Err(error) = work(&runtime) {
                runtime.give_up(hosts, fate_of(&error), error.to_string());
            }
        };
        let thread = std::thread::Builder::new().name("mesh-attach".to_owned()).spawn(behind);
        thread.map(drop).map_err(|error| RuntimeError::thread(&error))
    }

    /// Attaches hosts that agents run on, at these addresses; an address that is not known yet is told later, by
    /// [`Runtime::place_host`]. Returns the number of the first, and the call that completes as they come up: each answers
    /// with what it says of itself. Credentials are read on another thread: what is wrong with them, the call says.
    ///
    /// # Errors
    /// If the runtime is closed, is not the controller's, or no thread can be started.
    pub fn attach(
        &self,
        addresses: &[Option<String>],
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        self.may_attach()?;
        let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        let (base, call) = {
            let machine = &mut lock(&self.gateway.state).machine;
            let base = machine.next_host();
            let call = self.open(agents(base, count), false)?;
            machine.attach(call.id, addresses, &options);
            (base, call)
        };
        self.gateway.active.store(true, Ordering::SeqCst);
        let hosts = HostSet::range(base, count);
        let proven = hosts.clone();
        let behind = self.attach_behind(hosts.clone(), move |this| {
            this.gateway.known_as(&identity()?)?;
            this.on_gateway(Event::Proven(proven));
            Ok(())
        });
        if let Err(error) = behind {
            self.give_up(hosts, Fate::NotAttached, error.to_string());
            return Err(error);
        }
        Ok((base, call))
    }

    /// Says where a host is that was attached without an address.
    pub fn place_host(&self, host: HostNo, address: String) {
        self.on_gateway(Event::Placed { host, address });
    }

    /// Says that a host that was attached without an address has none.
    pub fn displace_host(&self, host: HostNo, why: &str) {
        self.give_up(HostSet::one(host), Fate::NotAttached, why.to_owned());
    }

    /// These hosts cannot be attached.
    fn give_up(&self, hosts: HostSet, fate: Fate, why: String) {
        self.on_gateway(Event::GivenUp { hosts, fate, why });
    }

    /// Listens for hosts that can only dial out, and takes up to `count` of them. Returns the number of the first, and the
    /// call that completes as they come. Credentials are read and names looked up on another thread: what is wrong with
    /// them, and with the address, the call says.
    ///
    /// # Errors
    /// As for [`Runtime::attach`].
    pub fn attach_dialers(
        &self,
        address: &str,
        count: u32,
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        self.may_attach()?;
        let (told, call) = {
            let machine = &mut lock(&self.gateway.state).machine;
            let base = machine.next_host();
            let call = self.open(agents(base, count), false)?;
            (machine.attach_dialers(call.id, count, &options), call)
        };
        self.gateway.active.store(true, Ordering::SeqCst);
        let (address, base) = (address.to_owned(), told.base);
        self.attach_behind(HostSet::range(base, count), move |this| {
            let listening = identity().and_then(|identity| {
                let identity = Arc::clone(this.gateway.known_as(&identity)?);
                let addrs = resolve(&address, GREETING).map_err(|error| RuntimeError::Address(error.to_string()))?;
                this.listen_for_dialers(addrs[0], identity, &told)
            });
            if listening.is_err() {
                // So far nobody knows of them.
                let machine = &mut lock(&this.gateway.state).machine;
                (base..base + count).for_each(|host| machine.seat(host, None));
            }
            listening
        })?;
        Ok((base, call))
    }
}
