//! An owner on another host: its addresses, and which of them lead to it.

use super::member::{Guard, Member};
use crate::error::TransferError;
use crate::lock;
use crate::watch::{Watch, timespec};
use mesh_tls::{Identity, Progress, Reason, TlsError, TlsReader, TlsStream, TlsWriter};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, ipproto, socket_with, sockopt};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How often to check for cancellation while nobody answers.
const LOOK: Duration = Duration::from_millis(100);

/// An address, and why it does not lead to the owner.
pub(super) type Failed = (SocketAddr, TransferError);

/// Whether an error says that the other host is silent, rather than something about its processes.
pub(super) fn is_silence(error: &io::Error) -> bool {
    error.raw_os_error().map(Errno::from_raw_os_error).is_some_and(|errno| {
        matches!(errno, Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NETDOWN | Errno::HOSTDOWN)
    })
}

#[derive(Debug)]
pub(super) struct Remote {
    addrs: Vec<SocketAddr>,
    member: Arc<Member>,
    /// The address that led to the owner.
    known: Mutex<Option<SocketAddr>>,
    /// The host was silent at the last attempt.
    silent: AtomicBool,
    /// The owner answered after a connection was lost.
    answers: AtomicBool,
}

impl Remote {
    pub(super) fn new(addrs: Vec<SocketAddr>, member: Arc<Member>) -> Self {
        let (silent, answers) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { addrs, member, known: Mutex::default(), silent, answers }
    }

    pub(super) fn identity(&self) -> Result<Arc<Identity>, TransferError> {
        self.member.identity()
    }

    pub(super) fn known(&self) -> Option<SocketAddr> {
        *self.lock()
    }

    /// Notes that this address leads to the owner.
    pub(super) fn leads(&self, addr: SocketAddr) {
        *self.lock() = Some(addr);
    }

    fn lock(&self) -> MutexGuard<'_, Option<SocketAddr>> {
        lock(&self.known)
    }

    /// The addresses to try first, and those to try after them.
    pub(super) fn rounds(&self) -> Vec<Vec<SocketAddr>> {
        match self.known() {
            Some(known) => {
                let others: Vec<_> = self.addrs.iter().copied().filter(|addr| *addr != known).collect();
                if others.is_empty() { vec![vec![known]] } else { vec![vec![known], others] }
            }
            None => vec![self.addrs.clone()],
        }
    }

    pub(super) fn begins_again(&self) {
        self.silent.store(false, Ordering::Relaxed);
        self.answers.store(false, Ordering::Relaxed);
    }

    pub(super) fn fell_silent(&self) {
        self.silent.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    pub(super) fn answered(&self) {
        self.answers.store(true, Ordering::Relaxed);
    }

    pub(super) fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }

    /// Starts connecting to all these addresses.
    pub(super) fn begin<'a>(
        &self,
        addrs: Vec<SocketAddr>,
        watch: &'a Watch,
        failed: &mut Vec<Failed>,
    ) -> Result<Dialing<'a>, TransferError> {
        let mut dialing = Dialing { watch, under_way: Vec::new(), taken: Vec::new() };
        for addr in addrs {
            match self.socket(addr) {
                Ok(stream) => {
                    watch.add(&stream)?;
                    dialing.under_way.push((addr, stream));
                }
                Err(errno) => failed.push((addr, not_connected(addr, errno))),
            }
        }
        Ok(dialing)
    }

    fn socket(&self, addr: SocketAddr) -> Result<Arc<TcpStream>, Errno> {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        sockopt::set_tcp_nodelay(&fd, true)?;
        self.member.limit_silence(&fd)?;
        match connect(&fd, &addr) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(Arc::new(TcpStream::from(fd))),
            Err(errno) => Err(errno),
        }
    }

    /// Performs the handshake; on success, both ends have let each other in.
    pub(super) fn shake(
        &self,
        stream: &TcpStream,
        identity: &Arc<Identity>,
        wait: &dyn Fn(PollFlags) -> io::Result<()>,
    ) -> Result<((TlsReader, TlsWriter), Guard), Result<io::Error, Reason>> {
        let told = |error: TlsError| match error {
            TlsError::Io(error) => Ok(error),
            // The owner may have ended just then.
            TlsError::Refused(Reason::Left) => Ok(io::ErrorKind::UnexpectedEof.into()),
            TlsError::Refused(reason) => Err(reason),
        };
        let fd = stream.as_fd().try_clone_to_owned().map_err(Ok)?;
        let mut tls = TlsStream::client(fd, identity, None).map_err(told)?;
        let peer = loop {
            match tls.handshake().map_err(told)? {
                Progress::Done(peer) => break peer,
                Progress::WantRead => wait(PollFlags::IN).map_err(Ok)?,
                Progress::WantWrite => wait(PollFlags::OUT).map_err(Ok)?,
            }
        };
        let guard = Guard::new(identity, peer).map_err(Err)?;
        let halves = tls.into_split().map_err(|_| Err(Reason::Left))?;
        Ok((halves, guard))
    }

    /// The error if no address has led to the owner.
    pub(super) fn sum_up(&self, pid: u32, failed: Vec<Failed>) -> TransferError {
        use crate::error::ErrorKind;
        // Nobody listens there, or somebody else does: the owner has ended.
        if !failed.is_empty() && failed.iter().all(|(_, error)| error.kind == ErrorKind::Gone) {
            return TransferError::ended(pid);
        }
        let mut told: Vec<String> = Vec::new();
        for (_, error) in failed {
            if !told.contains(&error.message) {
                told.push(error.message);
            }
        }
        TransferError::transport(format!("cannot reach process {pid}: {}", told.join("; ")))
    }
}

fn not_connected(addr: SocketAddr, errno: Errno) -> TransferError {
    match errno {
        Errno::CONNREFUSED => TransferError::gone(format!("nobody listens at {addr}")),
        errno => TransferError::transport(format!("{addr}: {errno}")),
    }
}

/// Connections being set up.
pub(super) struct Dialing<'a> {
    watch: &'a Watch,
    under_way: Vec<(SocketAddr, Arc<TcpStream>)>,
    taken: Vec<Arc<TcpStream>>,
}

impl Dialing<'_> {
    /// The connections that have not come up.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = Failed> + '_ {
        let told = |addr| (addr, TransferError::transport(format!("{addr} does not answer")));
        self.under_way.iter().map(move |(addr, _)| told(*addr))
    }

    /// The next connection that has come up; none if no more do.
    pub(super) fn next(
        &mut self,
        hello: &Watch,
        failed: &mut Vec<Failed>,
    ) -> Result<Option<(SocketAddr, Arc<TcpStream>)>, TransferError> {
        while !self.under_way.is_empty() {
            self.watch.check()?;
            hello.check()?;
            let limit = timespec(hello.left().unwrap_or(LOOK).min(LOOK));
            let mut list: Vec<_> =
                self.under_way.iter().map(|(_, stream)| PollFd::new(&**stream, PollFlags::OUT)).collect();
            match poll(&mut list, Some(&limit)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(TransferError::os("wait for a connection")(errno)),
            }
            let Some(at) = list.iter().position(|fd| !fd.revents().is_empty()) else { continue };
            let (addr, stream) = self.under_way.swap_remove(at);
            match sockopt::socket_error(&*stream) {
                Ok(Ok(())) => {
                    self.taken.push(Arc::clone(&stream));
                    return Ok(Some((addr, stream)));
                }
                Ok(Err(errno)) | Err(errno) => {
                    self.watch.remove(&stream);
                    failed.push((addr, not_connected(addr, errno)));
                }
            }
        }
        Ok(None)
    }
}

impl Drop for Dialing<'_> {
    fn drop(&mut self) {
        for stream in self.under_way.iter().map(|(_, stream)| stream).chain(&self.taken) {
            self.watch.remove(stream);
        }
    }
}
