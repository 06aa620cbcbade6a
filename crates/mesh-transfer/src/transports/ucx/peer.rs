//! An owner reached by UCX.

use super::super::Peer;
use super::driver::{Driver, Drivers};
use super::objects::Context;
use super::places::Places;
use super::wire::{ADDRESS, PROTOCOL, Wire};
use crate::bytes::u32_at;
use crate::cma::Other;
use crate::control::{Control, Leased, identity};
use crate::door::{Side, WELCOME};
use crate::error::{ErrorKind, TransferError, advice};
use crate::handle::{Handle, RealmId, Token};
use crate::lock;
use crate::operation::Op;
use crate::realm::{Realm, namespace, random};
use crate::watch::{Watch, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long to wait for a connection and the owner's proof.
const CONNECT: Duration = Duration::from_secs(5);
/// How often a wait for the owner checks for cancellation.
const LOOK: Duration = Duration::from_millis(50);
/// How often to start an operation again that another one interrupted.
const TRIES: usize = 4;
/// The most operations under one lease, and roughly the most bytes.
const GROUP: usize = 1000;
const TOGETHER: u64 = 4 << 20;

#[derive(Debug)]
pub(super) struct UcxPeer {
    context: Arc<Context>,
    drivers: Arc<Drivers>,
    routes: Vec<SocketAddr>,
    realm: RealmId,
    door: Token,
    pid: u32,
    /// The owner's process, if visible: a forked copy of it may keep its connections open.
    process: Option<OwnedFd>,
    /// The owner's control page, if available, and this process's identity there.
    control: Option<Control>,
    /// The owner as the kernel knows it, if there is a control page.
    other: Option<Other>,
    me: u64,
    driver: Mutex<Option<Arc<Driver>>>,
}

impl UcxPeer {
    pub(super) fn new(
        here: &Realm,
        handle: &Handle,
        places: &Places,
        context: &Arc<Context>,
        drivers: &Arc<Drivers>,
    ) -> Result<Self, TransferError> {
        let is_here = handle.boot == here.boot;
        let is_visible = is_here && places.numbers != 0 && places.numbers == namespace("pid");
        // Opened before the owner proves that it lives, so that it is not a later process with the same pid.
        let process = Pid::from_raw(handle.pid.cast_signed()).filter(|_| is_visible);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // If this process may not look into the owner, the kernel will not write there for it either: nothing to lease.
        let control = match Control::attach(handle.pid, places.page, &handle.realm) {
            _ if !is_visible => None,
            Ok(control) => Some(control),
            Err(error) if error.kind == ErrorKind::Gone => return Err(error),
            Err(_) => None,
        };
        let (pid, realm) = (handle.pid, handle.realm);
        let other = control.as_ref().map(|control| Other { pid, witness: control.witness(), realm });
        Ok(Self {
            context: Arc::clone(context),
            drivers: Arc::clone(drivers),
            routes: places.routes(is_here),
            realm: handle.realm,
            door: places.door,
            pid: handle.pid,
            process,
            control,
            other,
            me: identity(here.pid, here.started),
            driver: Mutex::default(),
        })
    }

    /// The connection; a new one if none works.
    pub(super) fn reach(&self, watch: &Watch) -> Result<Arc<Driver>, TransferError> {
        // Held meanwhile, so that later callers use what the first one made.
        let mut driver = lock(&self.driver);
        if let Some(driver) = driver.as_ref().filter(|driver| !driver.has_ended()) {
            return Ok(Arc::clone(driver));
        }
        *driver = None;
        let made = Arc::new(self.dial(watch)?);
        *driver = Some(Arc::clone(&made));
        Ok(made)
    }

    fn dial(&self, watch: &Watch) -> Result<Driver, TransferError> {
        let mut last = TransferError::transport("the owner has no address at which this host could reach it");
        for route in &self.routes {
            watch.check()?;
            match self.dial_at(route, watch) {
                Ok(driver) => return Ok(driver),
                Err(error) if error.kind == ErrorKind::Transport => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn dial_at(&self, route: &SocketAddr, watch: &Watch) -> Result<Driver, TransferError> {
        let end = Instant::now() + watch.left().unwrap_or(CONNECT).clamp(Duration::from_millis(1), CONNECT);
        let left = || end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(route, left()).map_err(|error| self.failed(&error))?;
        let mut wire = Wire::new(stream).map_err(|error| self.failed(&error))?;
        let reader = random()?;
        wire.send(&PROTOCOL.hello(&reader, &self.realm)).map_err(|error| self.failed(&error))?;
        let welcome = self.wait_for(&mut wire, WELCOME, end, watch)?;
        // If it is not recognised, somebody else is there now.
        let talk = PROTOCOL.recognise(&welcome, self.door, self.realm, reader).ok_or_else(|| self.ended())?;
        let mine = talk.prove(Side::Client);
        wire.send(&mine).map_err(|error| self.failed(&error))?;
        let len = self.wait_for(&mut wire, 4, end, watch)?;
        let len = u32_at(&len, 0) as usize;
        if len > ADDRESS {
            return Err(TransferError::transport("the owner speaks another protocol"));
        }
        let address = self.wait_for(&mut wire, len, end, watch)?;
        let process = self.process.as_ref().and_then(|process| process.try_clone().ok());
        Driver::start(wire, address, process, self.pid, &self.context, &self.drivers)
    }

    fn wait_for(&self, wire: &mut Wire, len: usize, end: Instant, watch: &Watch) -> Result<Vec<u8>, TransferError> {
        loop {
            if let Some(bytes) = wire.take(len) {
                return Ok(bytes);
            }
            watch.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransferError::transport(format!(
                    "process {} did not answer in time: it may be stopped, or out of descriptors",
                    self.pid
                )));
            }
            let mut list = vec![PollFd::new(&wire.stream, PollFlags::IN)];
            if let Some(process) = &self.process {
                list.push(PollFd::new(process, PollFlags::IN));
            }
            match poll(&mut list, Some(&timespec(left.min(LOOK)))) {
                Ok(_) if list.get(1).is_some_and(|process| !process.revents().is_empty()) => return Err(self.ended()),
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => wire.receive().map_err(|error| self.failed(&error))?,
                Err(errno) => return Err(TransferError::os("wait for the owner")(errno)),
            }
        }
    }

    fn ended(&self) -> TransferError {
        TransferError::ended(self.pid)
    }

    fn failed(&self, error: &io::Error) -> TransferError {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => self.ended(),
            _ => {
                let advice = advice(error.raw_os_error());
                TransferError::transport(format!("the connection to process {} failed: {error}{advice}", self.pid))
            }
        }
    }

    /// Leases the operations' memory while the kernel writes to it for this process (LSE-1).
    fn lease(&self, ops: &[Op]) -> Result<Option<Leased<'_>>, TransferError> {
        let Some(control) = &self.control else { return Ok(None) };
        match ops {
            [one] => control.lease(self.me, one.handle.slot, one.handle.generation).map(|(lease, _)| Some(lease)),
            many => {
                let lease = control.lease_every(self.me)?;
                for op in many {
                    lease.offered(op.handle.slot, op.handle.generation)?;
                }
                Ok(Some(lease))
            }
        }
    }

    /// Fails if the owner has ended, or become another program. UCX's `cma` knows it only by its pid.
    fn is_there(&self) -> Result<(), TransferError> {
        match self.other.map(|other| other.check()) {
            Some(Err(error)) if error.kind == ErrorKind::Gone => Err(error),
            // If the kernel does not let this process look into the owner, it does not let it copy either.
            _ => Ok(()),
        }
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_group(&self, ops: &[Op], watch: &Watch) -> Result<(), TransferError> {
        for _ in 0..TRIES {
            watch.check()?;
            let driver = self.reach(watch)?;
            let _lease = self.lease(ops)?;
            self.is_there()?;
            // SAFETY: as the caller vouches.
            match unsafe { driver.carry(ops, watch) } {
                None => {}
                // What was read may be from another program.
                Some(Ok(())) => return self.is_there(),
                // The owner may be alive and only the connection dead: making a new one shows which.
                Some(Err(error)) if error.kind == ErrorKind::Transport => {
                    return Err(match self.reach(watch) {
                        Err(why) if why.kind == ErrorKind::Gone => why,
                        _ => error,
                    });
                }
                Some(done) => return done,
            }
        }
        Err(TransferError::transport("UCX was interrupted repeatedly by cancelled operations"))
    }
}

impl Peer for UcxPeer {
    unsafe fn run(&self, ops: &[Op], _found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        self.drivers.check()?;
        let mut rest = ops;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |op: &&Op| {
                bytes += op.work.span().1;
                bytes <= TOGETHER
            };
            let count = rest.iter().take(GROUP).take_while(fits).count();
            let (group, after) = rest.split_at(count.max(1));
            // SAFETY: as the caller vouches.
            unsafe { self.run_group(group, watch)? };
            rest = after;
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        match &self.process {
            Some(process) => {
                let limit = timespec(Duration::ZERO);
                poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).is_ok_and(|count| count == 0)
            }
            None => lock(&self.driver).as_ref().is_some_and(|driver| !driver.has_ended()),
        }
    }

    fn is_quick(&self) -> bool {
        false
    }
}
