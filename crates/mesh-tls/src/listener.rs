//! Where other hosts connect: accepts connections and drives many handshakes at once, on a separate thread.
//!
//! That thread yields to all others on the machine. A handshake takes a fraction of a millisecond of a core, and a
//! thread woken for a member's message would otherwise wait for that time slice to end. Results are reported on another
//! thread with the process's priority, which threads started there inherit.
//!
//! A peer that has not authenticated has one of a limited number of places, for a limited time, and may send a limited
//! number of bytes (TLS-3). All of them together may use a limited share of one core. When places run out, first those
//! that have sent nothing yet are dropped, then those from the address with the most places, then the oldest. Real
//! members are done within milliseconds, and a flood from one address does not hold up the others.

use super::budget::{Allowance, CpuBudget};
use super::error::Reason;
use super::facts::PeerFacts;
use super::identity::Identity;
use super::stream::{Progress, TlsStream};
use crate::timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, ipproto, listen, socket_with, sockopt};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

const TOKEN_STOP: u64 = u64::MAX;
/// Listening sockets have tokens from here on.
const TOKEN_LISTEN: u64 = 1 << 48;
const BATCH: usize = 64;
const BACKLOG: i32 = 1024;
/// How many connections to accept before looking at those under way again.
const ACCEPTS: usize = 32;
/// The nice increment of the listening thread: it still gets a tenth of a contended core, so members get through on a
/// busy machine.
const YIELDING: i32 = 10;
/// The most events that wait to be reported. A member beyond that is closed, and dials again.
const MOST_UNTOLD: usize = 1024;
/// How long to stop accepting when descriptors run out.
const NO_FDS_PAUSE: Duration = Duration::from_millis(100);

/// What a listener allows peers that have not authenticated.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many handshakes may be under way.
    pub places: usize,
    /// How long one may take.
    pub deadline: Duration,
    /// Which share of one core they may use together in the long run, in percent.
    pub cpu_percent: u32,
    /// How much core time they may use at once, as when all of a job's hosts connect together.
    pub cpu_burst: Duration,
    /// How many refusals to report at once, before one a second.
    pub told: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            places: 64,
            deadline: Duration::from_secs(5),
            cpu_percent: 50,
            cpu_burst: Duration::from_millis(500),
            told: 20,
        }
    }
}

/// A listener's events, reported on a separate thread. The callback must not block for long.
#[derive(Debug)]
pub enum ListenerEvent {
    /// A member of the job, after its handshake. The stream may still have its greeting to send:
    /// [`TlsStream::wants_write`].
    Joined {
        /// The connection.
        stream: TlsStream,
        /// The member.
        peer: PeerFacts,
        /// Its address.
        addr: SocketAddr,
    },
    /// A refused peer.
    Refused {
        /// Its address.
        addr: SocketAddr,
        /// Why.
        reason: Reason,
        /// How many more were refused since the last report.
        more: u64,
    },
    /// Nobody can be admitted for the moment. The listener keeps trying.
    Stuck {
        /// What the system said.
        errno: Errno,
    },
}

/// A listener could not be made.
#[derive(Debug, Error)]
pub enum ListenError {
    /// The address is in use.
    #[error("{addr} is in use: another `mesh host` may listen there already; take another port, or 0 for any")]
    InUse {
        /// The address.
        addr: SocketAddr,
    },
    /// The address is not one of this machine.
    #[error("{addr} is not an address of this machine; 0.0.0.0 or [::] stands for all of its addresses")]
    NotHere {
        /// The address.
        addr: SocketAddr,
    },
    /// The port is reserved for root.
    #[error("this user may not listen at {addr}: ports below 1024 are kept for root")]
    Denied {
        /// The address.
        addr: SocketAddr,
    },
    /// The system reported another error.
    #[error("cannot listen at {addr}: {error}")]
    Io {
        /// The address.
        addr: SocketAddr,
        /// The error.
        error: std::io::Error,
    },
    /// No address was given.
    #[error("no address to listen at was given")]
    Nowhere,
}

/// Listens until it is dropped.
#[derive(Debug)]
pub struct Listener {
    addrs: Vec<SocketAddr>,
    descriptors: Vec<RawFd>,
    stop: Arc<OwnedFd>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Listener {
    /// Listens at these addresses. `tell` is called on a thread of the listener's.
    ///
    /// # Errors
    /// If an address cannot be used.
    pub fn bind(
        addrs: &[SocketAddr],
        identity: Arc<Identity>,
        limits: Limits,
        mut tell: impl FnMut(ListenerEvent) + Send + 'static,
    ) -> Result<Self, ListenError> {
        let first = *addrs.first().ok_or(ListenError::Nowhere)?;
        let mut sockets = Vec::new();
        for &addr in addrs {
            sockets.push(open(addr).map_err(|errno| match errno {
                Errno::ADDRINUSE => ListenError::InUse { addr },
                Errno::ADDRNOTAVAIL => ListenError::NotHere { addr },
                Errno::ACCESS => ListenError::Denied { addr },
                errno => ListenError::Io { addr, error: errno.into() },
            })?);
        }
        let failed = |error: std::io::Error| ListenError::Io { addr: first, error };
        let os = |errno: Errno| failed(errno.into());
        let descriptors = sockets.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect();
        let bound = sockets.iter().map(local).collect::<Result<Vec<_>, _>>().map_err(os)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os)?);
        let set = epoll::create(CreateFlags::CLOEXEC).map_err(os)?;
        epoll::add(&set, &*stop, EventData::new_u64(TOKEN_STOP), EventFlags::IN).map_err(os)?;
        for (i, socket) in sockets.iter().enumerate() {
            epoll::add(&set, socket, EventData::new_u64(TOKEN_LISTEN + i as u64), EventFlags::IN).map_err(os)?;
        }
        let (event, on_event) = mpsc::sync_channel(MOST_UNTOLD);
        let door = Door {
            set,
            sockets,
            stop: Arc::clone(&stop),
            identity,
            limits,
            event,
            shaking: HashMap::new(),
            next: 0,
            open: true,
            shut_until: None,
            begun: Instant::now(),
            cpu: CpuBudget::new(limits.cpu_percent, limits.cpu_burst, Duration::ZERO),
            allowance: Allowance::new(limits.told, Duration::ZERO),
            stuck: false,
        };
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        // This thread ends with the other, which has the only sender.
        let telling = thread("mesh-event").spawn(move || on_event.iter().for_each(&mut tell)).map_err(failed)?;
        let listening = thread("mesh-listen").spawn(move || door.run()).map_err(failed)?;
        Ok(Self { addrs: bound, descriptors, stop, threads: Mutex::new(vec![listening, telling]) })
    }

    /// The addresses, with ports that the system chose filled in.
    #[must_use]
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// The descriptors of its sockets, valid until it is closed: for forked copies of the process, which have them too.
    #[must_use]
    pub fn descriptors(&self) -> &[RawFd] {
        &self.descriptors
    }

    /// Stops listening and aborts handshakes under way. Nothing is reported after that.
    pub fn close(&self) {
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        // The caller may be one of these threads.
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}

fn open(addr: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    if addr.is_ipv6() {
        // IPv4 has its own socket, if wanted, so "0.0.0.0" and "[::]" can share one port.
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    bind(&fd, &addr)?;
    listen(&fd, BACKLOG)?;
    Ok(fd)
}

fn local(fd: &OwnedFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// Core time used by this thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// A handshake under way.
struct Guest {
    stream: TlsStream,
    addr: SocketAddr,
    since: Instant,
    writing: bool,
}

/// The state of the listening thread.
struct Door {
    set: OwnedFd,
    sockets: Vec<OwnedFd>,
    stop: Arc<OwnedFd>,
    identity: Arc<Identity>,
    limits: Limits,
    event: mpsc::SyncSender<ListenerEvent>,
    /// By token, assigned in order of arrival.
    shaking: HashMap<u64, Guest>,
    next: u64,
    /// Whether the listening sockets are watched.
    open: bool,
    shut_until: Option<Instant>,
    /// The zero of the budgets' clock.
    begun: Instant,
    cpu: CpuBudget,
    /// How many refusals may be reported.
    allowance: Allowance,
    /// The last attempt to accept failed, and that was reported.
    stuck: bool,
}

impl Door {
    fn run(mut self) {
        // If that is not allowed, it runs at normal priority.
        let _ = rustix::process::nice(YIELDING);
        let mut buffer = [MaybeUninit::<Event>::uninit(); BATCH];
        let mut used = cpu_time();
        loop {
            let now = Instant::now();
            let (paused, timeout) = self.pause(now);
            // While the share is used up, only wait to be stopped.
            let (ready, stop) = if paused {
                (Vec::new(), wait_stop(&self.stop, timeout.unwrap_or(Duration::ZERO)))
            } else {
                match epoll::wait(&self.set, &mut buffer, timeout.map(timespec).as_ref()) {
                    Ok((events, _)) => {
                        let ready: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
                        let stop = ready.contains(&TOKEN_STOP);
                        (ready, stop)
                    }
                    Err(_) => (Vec::new(), false),
                }
            };
            if stop {
                return;
            }
            // Handshakes under way first, before new connections take time.
            for &token in ready.iter().filter(|&&token| token < TOKEN_LISTEN) {
                self.advance(token);
            }
            for &token in ready.iter().filter(|&&token| (TOKEN_LISTEN..TOKEN_STOP).contains(&token)) {
                self.accept(token);
            }
            self.expire(Instant::now());
            let spent = cpu_time();
            self.cpu.spend(spent.saturating_sub(used), self.begun.elapsed());
            used = spent;
        }
    }

    /// Whether to rest, and the longest time to wait.
    fn pause(&mut self, now: Instant) -> (bool, Option<Duration>) {
        if let Some(rest) = self.cpu.rest() {
            return (true, Some(rest));
        }
        if self.shut_until.is_some_and(|until| until <= now) {
            self.shut_until = None;
            self.watch_door(true);
        }
        let oldest = self.shaking.values().map(|guest| guest.since + self.limits.deadline).min();
        let next = oldest.into_iter().chain(self.shut_until).min();
        (false, next.map(|at| at.saturating_duration_since(now) + Duration::from_millis(1)))
    }

    fn watch_door(&mut self, open: bool) {
        if self.open == open {
            return;
        }
        self.open = open;
        let flags = if open { EventFlags::IN } else { EventFlags::empty() };
        for (i, socket) in self.sockets.iter().enumerate() {
            let _ = epoll::modify(&self.set, socket, EventData::new_u64(TOKEN_LISTEN + i as u64), flags);
        }
    }

    fn accept(&mut self, token: u64) {
        let Some(at) = usize::try_from(token - TOKEN_LISTEN).ok().filter(|at| *at < self.sockets.len()) else { return };
        for _ in 0..ACCEPTS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::acceptfrom_with(&self.sockets[at], flags) {
                Ok((fd, addr)) => {
                    self.stuck = false;
                    if let Some(addr) = addr.and_then(|addr| SocketAddr::try_from(addr).ok()) {
                        self.admit(fd, addr);
                    }
                }
                Err(Errno::AGAIN) => return,
                // The connection is gone, or the network had a hiccup: the next one may be better.
                Err(
                    Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM | Errno::NETDOWN | Errno::HOSTUNREACH,
                ) => {}
                Err(errno) => {
                    // Out of descriptors or memory. Unaccepted connections would wake this thread at once.
                    self.watch_door(false);
                    self.shut_until = Some(Instant::now() + NO_FDS_PAUSE);
                    if !self.stuck {
                        self.stuck = true;
                        self.tell(ListenerEvent::Stuck { errno });
                    }
                    return;
                }
            }
        }
    }

    fn admit(&mut self, fd: OwnedFd, addr: SocketAddr) {
        while self.shaking.len() >= self.limits.places.max(1) {
            let Some(token) = self.least_wanted() else { break };
            let others = self.shaking.len() - 1;
            self.refuse(token, Reason::Crowded(others));
        }
        let stream = match TlsStream::server(fd, &self.identity) {
            Ok(stream) => stream,
            Err(error) => return self.tell_refusal(addr, error.into_reason()),
        };
        let token = self.next;
        self.next += 1;
        if epoll::add(&self.set, stream.as_fd(), EventData::new_u64(token), EventFlags::IN).is_err() {
            return;
        }
        self.shaking.insert(token, Guest { stream, addr, since: Instant::now(), writing: false });
        // Its first bytes are usually there already.
        self.advance(token);
    }

    /// The handshake to drop when places run out.
    fn least_wanted(&self) -> Option<u64> {
        let mut places: HashMap<IpAddr, usize> = HashMap::new();
        for guest in self.shaking.values() {
            *places.entry(guest.addr.ip()).or_default() += 1;
        }
        let rank = |(token, guest): &(&u64, &Guest)| {
            (guest.stream.heard() == 0, places.get(&guest.addr.ip()).copied(), std::cmp::Reverse(**token))
        };
        self.shaking.iter().max_by_key(rank).map(|(token, _)| *token)
    }

    fn advance(&mut self, token: u64) {
        let Some(guest) = self.shaking.get_mut(&token) else { return };
        // Strangers may send anything: if that makes a library panic, only this connection is lost.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| guest.stream.handshake()))
            .unwrap_or_else(|_| Err(Reason::Broke("its handshake made this side panic".to_owned()).into()));
        match done {
            Ok(Progress::Done(peer)) => {
                let Some(Guest { stream, addr, .. }) = self.shaking.remove(&token) else { return };
                let _ = epoll::delete(&self.set, stream.as_fd());
                self.tell(ListenerEvent::Joined { stream, peer, addr });
            }
            Ok(wants) => {
                let writing = wants == Progress::WantWrite;
                if guest.writing != writing {
                    guest.writing = writing;
                    let flags = if writing { EventFlags::OUT } else { EventFlags::IN };
                    let _ = epoll::modify(&self.set, guest.stream.as_fd(), EventData::new_u64(token), flags);
                }
            }
            Err(error) => self.refuse(token, error.into_reason()),
        }
    }

    fn expire(&mut self, now: Instant) {
        let deadline = self.limits.deadline;
        let late = |guest: &Guest| now.saturating_duration_since(guest.since) >= deadline;
        let tokens: Vec<u64> = self.shaking.iter().filter(|(_, guest)| late(guest)).map(|(token, _)| *token).collect();
        for token in tokens {
            self.refuse(token, Reason::TooSlow(deadline));
        }
    }

    /// Drops a handshake. The descriptor is closed with the stream.
    fn refuse(&mut self, token: u64, reason: Reason) {
        if let Some(guest) = self.shaking.remove(&token) {
            let _ = epoll::delete(&self.set, guest.stream.as_fd());
            self.tell_refusal(guest.addr, reason);
        }
    }

    /// Never blocks: the reporting thread may be waiting for this one to end.
    fn tell(&self, event: ListenerEvent) {
        let _ = self.event.try_send(event);
    }

    /// Keeps a flood from filling logs: reports a number of refusals at once, then one a second.
    fn tell_refusal(&mut self, addr: SocketAddr, reason: Reason) {
        let Some(more) = self.allowance.tell(self.begun.elapsed()) else { return };
        self.tell(ListenerEvent::Refused { addr, reason, more });
    }
}

/// Rests. Returns whether the listener was stopped meanwhile.
fn wait_stop(stop: &OwnedFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&timespec(limit))).is_ok_and(|n| n > 0)
}
