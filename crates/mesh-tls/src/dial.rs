//! Dialing: from an address to an encrypted connection, or to the reason why there is none.

use super::error::{Reason, TlsError};
use super::facts::PeerFacts;
use super::identity::Identity;
use super::role::Role;
use super::stream::{Progress, TlsStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with, sockopt};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How often an attempt looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// How long an attempt to connect may take, and when to try another connection in parallel.
#[derive(Clone, Copy, Debug)]
pub struct Pace<'a> {
    /// The limit for everything.
    pub timeout: Duration,
    /// How long to wait for a connection before trying another beside it.
    pub again: Duration,
    /// Set once nobody wants the connection any more: the attempt ends soon afterwards.
    pub over: Option<&'a AtomicBool>,
}

impl From<Duration> for Pace<'_> {
    /// A single connection attempt.
    fn from(timeout: Duration) -> Self {
        Self { timeout, again: timeout, over: None }
    }
}

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum DialError {
    /// The address is malformed.
    #[error(
        "{address:?} is not an address: write \"host:port\" or \"tcp://host:port\", with a port up to 65535, and [...] \
         around an IPv6 address"
    )]
    BadAddress {
        /// What was given.
        address: String,
    },
    /// The host's name cannot be looked up.
    #[error("the name of {address} cannot be looked up: {why}; compare it with what `mesh host` was started with")]
    Unresolved {
        /// What was given.
        address: String,
        /// What the system said.
        why: String,
    },
    /// The machine is there, but nobody listens.
    #[error("{address} refused the connection: no `mesh host` listens there, or it has ended")]
    Refused {
        /// Where.
        address: String,
    },
    /// The machine cannot be reached.
    #[error(
        "{address} cannot be reached: {errno}; is the network up, and does a firewall let port and address through?"
    )]
    Unreachable {
        /// Where.
        address: String,
        /// What the system said.
        errno: Errno,
    },
    /// No answer.
    #[error(
        "{address} did not answer within {timeout:.1?} ({stage}): it is down or overloaded, or a firewall is in between"
    )]
    TimedOut {
        /// Where.
        address: String,
        /// How long was waited.
        timeout: Duration,
        /// What was under way.
        stage: &'static str,
    },
    /// One side does not authenticate the other.
    #[error("{address} is not authenticated: {reason}")]
    NotAuthenticated {
        /// Where.
        address: String,
        /// Why not.
        reason: Reason,
    },
    /// The system reported another error.
    #[error("cannot connect to {address}: {error}")]
    Io {
        /// Where.
        address: String,
        /// The error.
        error: std::io::Error,
    },
}

/// An established connection.
#[derive(Debug)]
pub struct Dialed {
    /// The connection, after its handshake.
    pub stream: TlsStream,
    /// The peer.
    pub peer: PeerFacts,
    /// Its address.
    pub addr: SocketAddr,
}

/// The host and port of `host:port` or `tcp://host:port`.
///
/// # Errors
/// If the address is malformed.
pub fn split_address(address: &str) -> Result<(&str, u16), DialError> {
    let bad = || DialError::BadAddress { address: address.to_owned() };
    let (host, port) = address.strip_prefix("tcp://").unwrap_or(address).rsplit_once(':').ok_or_else(bad)?;
    let bare = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').ok_or_else(bad)?,
        None if host.contains(':') => return Err(bad()),
        None => host,
    };
    if bare.is_empty() || bare.contains(['/', ' ', '@']) {
        return Err(bad());
    }
    Ok((bare, port.parse().map_err(|_| bad())?))
}

/// The addresses of a host. Names are looked up on a separate thread, as the system may take its time.
///
/// # Errors
/// If it has none, or the lookup takes too long.
pub fn resolve(address: &str, timeout: Duration) -> Result<Vec<SocketAddr>, DialError> {
    let (host, port) = split_address(address)?;
    if let Ok(ip) = host.parse() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let unresolved = |why: String| DialError::Unresolved { address: address.to_owned(), why };
    let (tell, told) = mpsc::channel();
    let owned = host.to_owned();
    std::thread::Builder::new()
        .name("mesh-resolve".to_owned())
        .spawn(move || tell.send((owned.as_str(), port).to_socket_addrs().map(Vec::from_iter)))
        .map_err(|error| DialError::Io { address: address.to_owned(), error })?;
    match told.recv_timeout(timeout) {
        Ok(Ok(found)) if found.is_empty() => Err(unresolved("it has no address".to_owned())),
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(unresolved(error.to_string())),
        Err(_) => Err(DialError::TimedOut { address: address.to_owned(), timeout, stage: "looking up its name" }),
    }
}

/// How long to wait before the next look whether the connection is still wanted; an error if it is not.
fn turn(left: Duration, over: Option<&AtomicBool>) -> Result<Timespec, Errno> {
    match over {
        Some(over) if over.load(Ordering::Relaxed) => Err(Errno::CANCELED),
        Some(_) => Ok(crate::timespec(left.min(LOOK))),
        None => Ok(crate::timespec(left)),
    }
}

/// Waits for a descriptor. Returns whether it was ready in time.
fn wait(fd: BorrowedFd<'_>, flags: PollFlags, until: Instant, over: Option<&AtomicBool>) -> Result<bool, Errno> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let timeout = turn(left, over)?;
        match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno),
        }
    }
}

/// Dials a member of the job, and blocks until both sides have authenticated each other or time is up. `expect` is the
/// role that the other must have; none for any. For a thread that has nothing else to do.
///
/// # Errors
/// Says what is in the way.
pub fn dial<'a>(
    address: &str,
    identity: &Identity,
    expect: Option<Role>,
    pace: impl Into<Pace<'a>>,
) -> Result<Dialed, DialError> {
    let pace = pace.into();
    let timeout = pace.timeout;
    let until = Instant::now() + timeout;
    let addrs = resolve(address, timeout)?;
    let mut last = None;
    for (i, addr) in addrs.iter().enumerate() {
        // A name may have addresses that lead nowhere: leave time for the next one.
        let left = until.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(addrs.len() - i).unwrap_or(1);
        match dial_one(address, *addr, identity, expect, pace, Instant::now() + share) {
            // A member would say the same at any other address.
            Err(error @ DialError::NotAuthenticated { .. }) => return Err(error),
            Err(error) => last = Some(error),
            done => return done,
        }
    }
    Err(last.unwrap_or_else(|| DialError::BadAddress { address: address.to_owned() }))
}

fn dial_one(
    address: &str,
    addr: SocketAddr,
    identity: &Identity,
    expect: Option<Role>,
    Pace { timeout, again, over }: Pace<'_>,
    until: Instant,
) -> Result<Dialed, DialError> {
    let address =
        || if address.contains(&addr.to_string()) { address.to_owned() } else { format!("{address} ({addr})") };
    let os = |errno: Errno| match errno {
        Errno::CONNREFUSED => DialError::Refused { address: address() },
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NETDOWN | Errno::ADDRNOTAVAIL | Errno::HOSTDOWN => {
            DialError::Unreachable { address: address(), errno }
        }
        Errno::TIMEDOUT => DialError::TimedOut { address: address(), timeout, stage: "connecting" },
        errno => DialError::Io { address: address(), error: errno.into() },
    };
    let fd = connect_until(addr, until, again, over).map_err(os)?;
    let Some(fd) = fd else {
        return Err(DialError::TimedOut { address: address(), timeout, stage: "connecting" });
    };
    let refused = |error: TlsError| match error {
        TlsError::Refused(Reason::Broke(why)) => {
            DialError::Io { address: address(), error: std::io::Error::other(why) }
        }
        // A connection that ends says nothing about the peer: the network may have ended it.
        TlsError::Refused(reason @ Reason::Left) => {
            DialError::Io { address: address(), error: std::io::Error::other(reason.to_string()) }
        }
        TlsError::Refused(reason) => DialError::NotAuthenticated { address: address(), reason },
        TlsError::Io(error) => DialError::Io { address: address(), error },
    };
    let mut stream = TlsStream::client(fd, identity, expect).map_err(refused)?;
    loop {
        let flags = match stream.handshake().map_err(refused)? {
            Progress::Done(peer) => return Ok(Dialed { stream, peer, addr }),
            Progress::WantRead => PollFlags::IN,
            Progress::WantWrite => PollFlags::OUT,
        };
        if !wait(stream.as_fd(), flags, until, over).map_err(os)? {
            return Err(DialError::TimedOut { address: address(), timeout, stage: "waiting for its handshake" });
        }
    }
}

/// The first connection that comes up. TCP doubles the time between its own attempts: after a brief network failure, a
/// connection begun later gets through sooner.
fn connect_until(
    addr: SocketAddr,
    until: Instant,
    again: Duration,
    over: Option<&AtomicBool>,
) -> Result<Option<OwnedFd>, Errno> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let mut tried: Vec<OwnedFd> = Vec::new();
    loop {
        let now = Instant::now();
        if now >= until {
            return Ok(None);
        }
        let fd = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        match connect(&fd, &addr) {
            Ok(()) => return Ok(Some(fd)),
            Err(Errno::INPROGRESS | Errno::INTR) => tried.push(fd),
            Err(errno) if tried.is_empty() => return Err(errno),
            Err(_) => {}
        }
        let next = (now + again).min(until);
        while let Some(at) = wait_any(&tried, next, over)? {
            let fd = tried.swap_remove(at);
            match sockopt::socket_error(&fd)? {
                Ok(()) => return Ok(Some(fd)),
                Err(errno) if errno == Errno::CONNREFUSED || tried.is_empty() => return Err(errno),
                Err(_) => {}
            }
        }
    }
}

/// Which of these is connected or has failed; none if that takes too long.
fn wait_any(fds: &[OwnedFd], until: Instant, over: Option<&AtomicBool>) -> Result<Option<usize>, Errno> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::OUT)).collect();
        match poll(&mut polled, Some(&turn(left, over)?)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(polled.iter().position(|fd| !fd.revents().is_empty())),
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        for (text, host, port) in [
            ("b7:26600", "b7", 26600),
            ("tcp://b7.example:1", "b7.example", 1),
            ("tcp://[::1]:0", "::1", 0),
            ("[fe80::1%eth0]:9", "fe80::1%eth0", 9),
        ] {
            assert_eq!(split_address(text).unwrap(), (host, port), "{text}");
        }
        for text in ["", "b7", "b7:", "b7:x", "b7:70000", ":1", "::1:1", "[::1:1", "tcp://a/b:1", "user@b7:1", "[]:1"] {
            assert!(matches!(split_address(text), Err(DialError::BadAddress { .. })), "{text}");
        }
    }
}
