//! This process as a member of its job, and the members to which it is connected.

use crate::error::TransferError;
use crate::lock;
use crate::membership::Membership;
use mesh_tls::{Identity, PeerFacts, Reason, Role};
use rustix::net::sockopt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// How often a connected peer's certificate is checked again.
const LOOK: Duration = Duration::from_secs(1);
/// Probes of a silent connection before it counts as dead.
const PROBES: u32 = 3;

/// This process, as other hosts see it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) said: Membership,
    /// Read when first needed, and retried until that succeeds: certificates may be renewed.
    identity: Mutex<Option<Arc<Identity>>>,
}

impl Member {
    pub(super) fn new(said: Membership) -> Self {
        Self { said, identity: Mutex::default() }
    }

    pub(super) fn identity(&self) -> Result<Arc<Identity>, TransferError> {
        let mut identity = lock(&self.identity);
        if let Some(identity) = &*identity {
            return Ok(Arc::clone(identity));
        }
        let read = Identity::load_watching(&self.said.credentials, self.said.revocations.as_deref());
        let read = read.map_err(|error| {
            TransferError::transport(format!("this process cannot use its job's credentials: {error}"))
        })?;
        Ok(Arc::clone(identity.insert(read)))
    }

    /// Makes the kernel end a connection whose other end is silent for too long: its host is dead, or unreachable.
    pub(super) fn limit_silence(&self, socket: impl AsFd) -> rustix::io::Result<()> {
        let silence = self.said.silence.max(Duration::from_millis(100));
        let millis = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&socket, millis)?;
        // In whole seconds, at least one.
        let pause = Duration::from_secs((silence.as_secs() / u64::from(PROBES + 1)).clamp(1, 3600));
        sockopt::set_tcp_keepidle(&socket, pause)?;
        sockopt::set_tcp_keepintvl(&socket, pause)?;
        sockopt::set_tcp_keepcnt(&socket, PROBES)?;
        sockopt::set_socket_keepalive(&socket, true)
    }
}

/// The member at the other end of a connection.
///
/// TCP-4: a peer without a certificate of this job, or with an observer's, an expired or a revoked one, gets no
/// connection. If its certificate expires or is revoked later, it serves and is served for at most one more second.
#[derive(Debug)]
pub(super) struct Guard {
    identity: Arc<Identity>,
    peer: PeerFacts,
    last: Instant,
}

impl Guard {
    pub(super) fn new(identity: &Arc<Identity>, peer: PeerFacts) -> Result<Self, Reason> {
        if !peer.role.may_join() {
            return Err(Reason::WrongRole { found: peer.role, expected: Role::Host });
        }
        identity.check_peer(&peer, SystemTime::now())?;
        Ok(Self { identity: Arc::clone(identity), peer, last: Instant::now() })
    }

    pub(super) fn check(&mut self) -> Result<(), Reason> {
        if self.last.elapsed() < LOOK {
            return Ok(());
        }
        self.last = Instant::now();
        self.identity.look();
        self.identity.check_peer(&self.peer, SystemTime::now())
    }
}
