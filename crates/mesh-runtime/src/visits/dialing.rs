//! The visitor's side: dials a host, and gets a local socket on which the job's controller answers.

use super::ends::{LocalEnd, PacketEnd};
use super::pump::{Over, Rules, pump};
use crate::greeting::{AGAIN, hear, on_thread, say};
use crate::locks::lock;
use crate::tls::{DialError, Dialed, Identity, Pace, TlsStream, dial};
use mesh_proto::hosts::{Look, PacketDecoder, PacketKind, Refusal, Refuse, Welcome};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why a job cannot be looked into.
#[derive(Debug, Error)]
pub enum VisitError {
    /// The host was not reached, or one side does not accept the other.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The host refused.
    #[error("{address} refuses: {text}")]
    Refused {
        /// Where.
        address: String,
        /// For the program.
        code: Refusal,
        /// What it said.
        text: String,
    },
    /// The host does not answer, or not as a host does.
    #[error("{address} did not answer as a host does: {why}; it may be of an older version, which lets nobody look in")]
    Strange {
        /// Where.
        address: String,
        /// Why.
        why: String,
    },
    /// The system reported an error.
    #[error("no local socket can be had: {0}")]
    Io(std::io::Error),
}

impl VisitError {
    /// Whether credentials are the problem.
    #[must_use]
    pub fn is_credentials(&self) -> bool {
        matches!(self, Self::Dial(DialError::NotAuthenticated { .. }) | Self::Refused { code: Refusal::NotAllowed, .. })
    }
}

/// A way into a job.
#[derive(Debug)]
pub struct Visited {
    /// What is sent here arrives at the job, as if sent on the controller's machine.
    pub socket: OwnedFd,
    /// Why the visit ended.
    pub end: VisitEnd,
}

/// Why a visit ended, once its socket has.
#[derive(Clone, Debug, Default)]
pub struct VisitEnd(Arc<Mutex<Option<String>>>);

impl VisitEnd {
    /// What went wrong; none if the other end ended in order, or nothing has ended yet.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

fn greet(
    address: &str,
    identity: &Identity,
    look: Look,
    limit: Duration,
) -> Result<(TlsStream, PacketDecoder, Welcome), VisitError> {
    let until = Instant::now() + limit;
    let Dialed { mut stream, .. } =
        dial(address, identity, None, Pace { timeout: limit, again: AGAIN[1], over: None })?;
    let mut decoder = PacketDecoder::default();
    let strange = |why: String| VisitError::Strange { address: address.to_owned(), why };
    // The refusal may arrive while this side is still sending.
    let said = say(&mut stream, &look.packet(), until);
    let answer = hear(&mut stream, &mut decoder, until)
        .map_err(|error| strange(said.err().map_or_else(|| error.to_string(), |error| error.to_string())))?;
    if answer.kind == PacketKind::Refuse {
        let Refuse { code, text } = Refuse::read(&answer).map_err(|error| strange(error.to_string()))?;
        return Err(VisitError::Refused { address: address.to_owned(), code, text });
    }
    let welcome = Welcome::read(&answer).map_err(|error| strange(error.to_string()))?;
    Ok((stream, decoder, welcome))
}

/// The jobs that the host at `address` takes part in.
///
/// # Errors
/// If it is not reached, or refuses.
pub fn jobs_at(address: &str, identity: &Identity, limit: Duration) -> Result<Vec<u64>, VisitError> {
    let (_, _, welcome) = greet(address, identity, Look { job: 0 }, limit)?;
    let strange = || VisitError::Strange { address: address.to_owned(), why: "a list that is none".to_owned() };
    Look::jobs(&welcome).ok_or_else(strange)
}

/// Opens a way into a job, through the host at `address`. A thread passes bytes on until either side ends.
///
/// # Errors
/// If the host is not reached, refuses, or takes no part in such a job.
pub fn visit(address: &str, identity: &Identity, job: u64, limit: Duration) -> Result<Visited, VisitError> {
    let (stream, decoder, _) = greet(address, identity, Look { job }, limit)?;
    let (here, socket) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| VisitError::Io(errno.into()))?;
    let end = VisitEnd::default();
    let (told, address) = (end.clone(), address.to_owned());
    let serve = move || {
        let (mut local, mut there) = (LocalEnd::new(here), PacketEnd::new(stream, decoder));
        let over = pump(&mut local, &mut there, Rules::default(), || Ok(()));
        *lock(&told.0) = match &over {
            Over::Left => None,
            Over::Refused(Refuse { text, .. }) => Some(format!("{address} has ended it: {text}")),
            Over::Broke(why) => Some(format!("the connection to {address} was lost: {why}")),
        };
        // Set before the socket ends.
        drop(local);
        there.finish(&Over::Left);
    };
    on_thread("mesh-visit", serve).map_err(VisitError::Io)?;
    Ok(Visited { socket, end })
}
