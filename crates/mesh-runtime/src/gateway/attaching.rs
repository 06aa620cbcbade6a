//! Attaching hosts, at the controller, before all that it takes to connect to them is known.
//!
//! Credentials may lie on a slow disk, names may take long to look up, and a launcher may not know an address yet. So
//! hosts get their numbers and their places in the tree at once, and messages to them wait in their peer streams. ATT-1: no
//! host is connected to before the credentials of its attachment were read and its address, and those of all hosts below
//! it, are known; until then its silence does not count.

use super::greeting::GREETING;
use super::{GatewayOptions, State, agents};
use crate::calls::Call;
use crate::error::{ErrorKind, RuntimeError};
use crate::runtime::{Runtime, lock};
use crate::tls::{Identity, resolve};
use mesh_proto::control::{Attachment, Report};
use mesh_proto::hosts::{Fate, HostSet};
use mesh_proto::{HostNo, ProcAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Hosts that nobody connects to yet (ATT-1).
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// The credentials of their attachment are being read.
    unproven: HostSet,
    /// Their addresses are not known.
    unplaced: HostSet,
}

impl State {
    /// Whether a host may not be connected to yet (ATT-1).
    pub(super) fn is_pending(&self, host: HostNo) -> bool {
        let Pending { unproven, unplaced } = &self.pending;
        if unproven.is_empty() && unplaced.is_empty() {
            return false;
        }
        let below = self.topology.subtree(host);
        below.overlaps(unproven) || below.overlaps(unplaced)
    }
}

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
                runtime.give_up(&hosts, fate_of(&error), &error.to_string());
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
            let mut state = lock(&self.gateway.state);
            let base = state.next_host;
            let call = self.open(agents(base, count), false)?;
            state.next_host += count;
            state.window = options.window;
            state.hold = state.hold.max(options.hold);
            state.fan_out = options.fan_out;
            state.topology.add_group(base, count, options.fan_out);
            state.pending.unproven.extend_by(&HostSet::range(base, count));
            for (host, address) in (base..).zip(addresses) {
                if address.is_none() {
                    state.pending.unplaced.push(host);
                }
                let peer = state.peers.entry(host).or_default();
                peer.address.clone_from(address);
                let attachment = Attachment {
                    call: call.id,
                    base,
                    count,
                    fan_out: options.fan_out,
                    window: options.window,
                    patience: options.patience,
                    hold: options.hold,
                    dialed: false,
                    below: Vec::new(),
                };
                peer.attachment = Some(Arc::new(attachment));
            }
            (base, call)
        };
        self.gateway.active.store(true, Ordering::SeqCst);
        let hosts = HostSet::range(base, count);
        let proven = hosts.clone();
        let behind = self.attach_behind(hosts.clone(), move |this| {
            this.gateway.known_as(&identity()?)?;
            this.no_longer_pending(&proven, |state| state.pending.unproven.reduce_by(&proven));
            Ok(())
        });
        if let Err(error) = behind {
            self.give_up(&hosts, Fate::NotAttached, &error.to_string());
            return Err(error);
        }
        Ok((base, call))
    }

    /// Says where a host is that was attached without an address.
    pub fn place_host(&self, host: HostNo, address: String) {
        let above: HostSet = {
            let mut state = lock(&self.gateway.state);
            if !state.pending.unplaced.contains(host) {
                return;
            }
            state.peers.entry(host).or_default().address = Some(address);
            let ancestors = state.topology.ancestors(host).into_iter().filter(|above| *above != 0);
            ancestors.chain(std::iter::once(host)).collect()
        };
        self.no_longer_pending(&above, |state| {
            state.pending.unplaced.remove(host);
        });
    }

    /// Says that a host that was attached without an address has none.
    pub fn displace_host(&self, host: HostNo, why: &str) {
        self.give_up(&HostSet::one(host), Fate::NotAttached, why);
    }

    /// Something was found out of these hosts: those that can be connected to now are. Their silence counts from now on.
    fn no_longer_pending(&self, hosts: &HostSet, change: impl FnOnce(&mut State)) {
        {
            let mut state = lock(&self.gateway.state);
            change(&mut state);
            let now = self.started.elapsed();
            let ready: Vec<HostNo> = hosts.iter().filter(|host| !state.is_pending(*host)).collect();
            for host in ready {
                if let Some(peer) = state.peers.get_mut(&host).filter(|peer| peer.connection.is_none()) {
                    peer.lost_since.get_or_insert(now);
                }
            }
            state.armed = std::time::Duration::ZERO;
        }
        self.reach_out();
        self.reactor.ring_io();
    }

    /// These hosts cannot be attached.
    fn give_up(&self, hosts: &HostSet, fate: Fate, why: &str) {
        for host in hosts.iter() {
            self.on_host_lost(host, Report::dead(fate, why));
        }
        let mut state = lock(&self.gateway.state);
        state.pending.unproven.reduce_by(hosts);
        state.pending.unplaced.reduce_by(hosts);
        drop(state);
        // Those above them may have waited for this alone.
        self.no_longer_pending(&self.all_pending(), |_| {});
    }

    fn all_pending(&self) -> HostSet {
        let state = lock(&self.gateway.state);
        state
            .peers
            .iter()
            .filter(|(_, peer)| peer.attachment.is_some() && peer.incarnation == 0)
            .map(|(host, _)| *host)
            .collect()
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
        let (base, call) = {
            let mut state = lock(&self.gateway.state);
            let base = state.next_host;
            state.next_host += count;
            state.window = options.window;
            state.hold = state.hold.max(options.hold);
            state.fan_out = options.fan_out;
            (base, self.open(agents(base, count), false)?)
        };
        self.gateway.active.store(true, Ordering::SeqCst);
        let (address, told) = (address.to_owned(), call.id);
        self.attach_behind(HostSet::range(base, count), move |this| {
            let listening = identity().and_then(|identity| {
                let identity = Arc::clone(this.gateway.known_as(&identity)?);
                let addrs = resolve(&address, GREETING).map_err(|error| RuntimeError::Address(error.to_string()))?;
                this.listen_for_dialers(addrs[0], identity, (told, base, count, options))
            });
            if listening.is_err() {
                // So far nobody knows of them.
                let mut state = lock(&this.gateway.state);
                (base..base + count).for_each(|host| {
                    state.topology.add_dialed(host);
                });
            }
            listening
        })?;
        Ok((base, call))
    }
}
