//! Attaching hosts, at the controller, before everything needed to connect to them is known.
//!
//! Credentials may be on a slow disk, name lookups may be slow, and a launcher may not know an address yet. So hosts get their
//! numbers and places in the tree at once, and messages to them wait in their peer streams (ATT-1).

use super::{Event, Gateway, GatewayOptions, Machine, Process, agents};
use crate::call::Call;
use crate::error::{ErrorKind, RuntimeError};
use crate::greeting::GREETING;
use crate::reactor::Reactor;
use crate::tls::{Identity, resolve};
use mesh_proto::HostNo;
use mesh_proto::hosts::{Fate, HostSet, Standing};
use std::sync::{Arc, MutexGuard};

/// The fate of a host that could not be attached because of this side's credentials or address.
fn fate_of(error: &RuntimeError) -> Fate {
    match error.kind() {
        ErrorKind::Credentials => Fate::NotAuthenticated,
        _ => Fate::NotAttached,
    }
}

impl<P: Process> Gateway<P> {
    /// Returns the process if it may attach and release hosts.
    pub(super) fn controller(&self) -> Result<Arc<P>, RuntimeError> {
        self.parts.standing.usable()?;
        self.process.upgrade().filter(|_| self.is_controller()).ok_or(RuntimeError::NotController)
    }

    /// Locks the machine to attach hosts. Fails after [`Gateway::close`].
    fn usable_machine(&self) -> Result<MutexGuard<'_, Machine<Reactor>>, RuntimeError> {
        let machine = self.machine();
        if machine.is_over() { Err(RuntimeError::Closed) } else { Ok(machine) }
    }

    /// Runs slow work on a new thread. If it fails, none of these hosts can be used.
    fn attach_behind(
        self: &Arc<Self>,
        hosts: HostSet,
        work: impl FnOnce(&Arc<Self>) -> Result<(), RuntimeError> + Send + 'static,
    ) -> Result<(), RuntimeError> {
        // A thread that waits for a slow disk does not keep the gateway alive.
        let this = Arc::downgrade(self);
        let behind = move || {
            let Some(this) = this.upgrade() else { return };
            if let Err(error) = work(&this) {
                this.give_up(hosts, fate_of(&error), error.to_string());
            }
        };
        let thread = std::thread::Builder::new().name("mesh-attach".to_owned()).spawn(behind);
        thread.map(drop).map_err(|error| RuntimeError::thread(&error))
    }

    /// Returns the credentials to use for these hosts.
    fn agree(&self, identity: &Arc<Identity>, hosts: HostSet) -> Result<Arc<Identity>, RuntimeError> {
        let is_gone = |host| self.machine().stands(host) == Standing::Dead;
        // Where hosts with the former credentials were waited for, nobody is let in any more.
        self.credentials.agree(identity, hosts, is_gone, || self.listeners.close())
    }

    /// Attaches hosts at these addresses. An address that is not known yet is set later by [`Gateway::place_host`]. Returns the
    /// number of the first host, and a call that each host answers with its introduction as it comes up. Credentials are read
    /// on another thread; if that fails, so does the call.
    pub(crate) fn attach(
        self: &Arc<Self>,
        addresses: &[Option<String>],
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        let process = self.controller()?;
        let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        let (base, call) = {
            let mut machine = self.usable_machine()?;
            let base = machine.next_host();
            let call = process.open_call(agents(base, count))?;
            machine.attach(call.id, addresses, &options);
            self.activate();
            (base, call)
        };
        let hosts = HostSet::range(base, count);
        let proven = hosts.clone();
        let behind = self.attach_behind(hosts.clone(), move |this| {
            this.agree(&identity()?, proven.clone())?;
            this.on(Event::Proven(proven));
            Ok(())
        });
        if let Err(error) = behind {
            self.give_up(hosts, Fate::NotAttached, error.to_string());
            return Err(error);
        }
        Ok((base, call))
    }

    /// Sets the address of a host that was attached without one.
    pub(crate) fn place_host(self: &Arc<Self>, host: HostNo, address: String) {
        self.on(Event::Placed { host, address });
    }

    /// Gives up a host that was attached without an address and has none.
    pub(crate) fn displace_host(self: &Arc<Self>, host: HostNo, why: &str) {
        self.give_up(HostSet::one(host), Fate::NotAttached, why.to_owned());
    }

    /// Gives up hosts that cannot be attached.
    fn give_up(self: &Arc<Self>, hosts: HostSet, fate: Fate, why: String) {
        self.on(Event::GivenUp { hosts, fate, why });
    }

    /// Listens for hosts that can only dial out, and accepts up to `count` of them. Returns the number of the first, and a call
    /// that completes as they come. Credentials are read and names looked up on another thread; if that fails, so does the call.
    pub(crate) fn attach_dialers(
        self: &Arc<Self>,
        address: &str,
        count: u32,
        identity: impl FnOnce() -> Result<Arc<Identity>, RuntimeError> + Send + 'static,
        options: GatewayOptions,
    ) -> Result<(HostNo, Arc<Call>), RuntimeError> {
        let process = self.controller()?;
        let (told, call) = {
            let mut machine = self.usable_machine()?;
            let base = machine.next_host();
            let call = process.open_call(agents(base, count))?;
            self.activate();
            (machine.attach_dialers(call.id, count, &options), call)
        };
        let (address, base) = (address.to_owned(), told.base);
        self.attach_behind(HostSet::range(base, count), move |this| {
            let listening = identity().and_then(|identity| {
                let identity = this.agree(&identity, HostSet::range(base, count))?;
                let addrs = resolve(&address, GREETING).map_err(|error| RuntimeError::Address(error.to_string()))?;
                this.listen_for_dialers(addrs[0], identity, &told)
            });
            if listening.is_err() {
                // Nobody knows of these hosts so far.
                let mut machine = this.machine();
                (base..base + count).for_each(|host| machine.seat(host, None));
            }
            listening
        })?;
        Ok((base, call))
    }
}
