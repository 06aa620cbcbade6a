//! A queue pair of this process, with the connection to the owner that made it. The connection also shows when the
//! owner ends.
//!
//! If requests are still under way when a link is given up, the queue pair is stopped and destroyed first, so that the
//! device no longer touches the caller's memory (OPR-1).

use super::device::{Queue, Rail, Region, There};
use super::sys::{Completion, SendRequest, access, status};
use super::wire::{self, ANSWER, Connect, End, Fate, PROTOCOL, READY, decode_answer, encode_question};
use crate::door::{Side, WELCOME};
use crate::error::{ErrorKind, TransferError, advice};
use crate::handle::{RealmId, Token};
use crate::realm::random;
use crate::watch::{Watch, timespec};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait for a connection, and for each answer of the owner.
const CONNECTING: Duration = Duration::from_secs(5);
/// How long to poll for completions before sleeping.
const LOOK: Duration = Duration::from_micros(20);
/// How long to wait for a queue pair that was stopped.
const STOPPING: Duration = Duration::from_secs(1);
/// The size of the registered buffer for operations too short to register memory for.
pub(super) const STAGE: usize = 64 * 1024;
/// The most questions sent before their answers are read.
const AHEAD: usize = 64;

/// Where and how to reach the owner.
#[derive(Clone, Debug)]
pub(super) struct Door {
    pub(super) addr: SocketAddr,
    pub(super) key: Token,
    pub(super) realm: RealmId,
    /// The owner, for people.
    pub(super) owner: String,
}

/// Why there is no link.
#[derive(Debug)]
pub(super) enum Shut {
    /// Nobody listens where the owner did.
    Nobody,
    /// Somebody listens, but it is not the owner, which has therefore ended.
    Another,
    /// The connection broke, as when the owner is about to end.
    BrokeOff(io::Error),
    Failed(TransferError),
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The owner's device refused it.
    Refused(usize),
    /// The queue pair, the device or the owner no longer works.
    Lost(String),
    /// The transfer is over: cancelled, or late.
    Over(TransferError),
}

impl From<TransferError> for Failure {
    fn from(error: TransferError) -> Self {
        match error.kind {
            ErrorKind::TimedOut | ErrorKind::Cancelled => Self::Over(error),
            _ => Self::Lost(error.message),
        }
    }
}

/// The fields are dropped in this order.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) queue: Queue,
    pub(super) stage: Stage,
    pub(super) stream: Arc<TcpStream>,
    /// Requests posted, requests completed successfully, and requests that the device is finished with.
    posted: u64,
    completed: u64,
    ended: u64,
    pub(super) depth: u32,
}

/// Memory that is always registered.
#[derive(Debug)]
pub(super) struct Stage {
    region: Region,
    memory: Box<[u64]>,
}

impl Stage {
    fn new(rail: &Rail) -> Result<Self, TransferError> {
        let memory = vec![0_u64; STAGE / 8].into_boxed_slice();
        let region = rail.device.register(memory.as_ptr() as u64, STAGE as u64, access::LOCAL_WRITE)?;
        Ok(Self { region, memory })
    }

    pub(super) fn key(&self) -> u32 {
        self.region.lkey
    }

    /// The address at `offset`. The device writes there too, while requests are under way.
    pub(super) fn at(&mut self, offset: usize) -> *mut u8 {
        self.memory.as_mut_ptr().cast::<u8>().wrapping_add(offset)
    }
}

impl Link {
    /// Connects a queue pair of `rail` with one on the owner's rail of that number.
    pub(super) fn make(
        door: &Door,
        rail: &Rail,
        (number, theirs): (u8, &wire::Rail),
        watch: &Watch,
    ) -> Result<Self, Shut> {
        watch.check().map_err(Shut::Failed)?;
        let limit = watch.left().unwrap_or(CONNECTING).clamp(Duration::from_millis(1), CONNECTING);
        let stream = TcpStream::connect_timeout(&door.addr, limit).map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => Shut::Nobody,
            _ => {
                let advice = advice(error.raw_os_error());
                Shut::Failed(TransferError::transport(format!("cannot connect to {}: {error}{advice}", door.addr)))
            }
        })?;
        set_up(&stream).map_err(Shut::BrokeOff)?;
        let stream = Arc::new(stream);
        let until = Instant::now() + limit;
        let followed = watch.follow(&stream).map_err(Shut::Failed);
        let made = followed.and_then(|_followed| Self::greet(door, rail, (number, theirs), &stream, until));
        // The connection often breaks because the transfer was cancelled.
        made.map_err(|shut| match watch.check() {
            Ok(()) => shut,
            Err(error) => Shut::Failed(error),
        })
    }

    fn greet(
        door: &Door,
        rail: &Rail,
        (number, theirs): (u8, &wire::Rail),
        stream: &Arc<TcpStream>,
        until: Instant,
    ) -> Result<Self, Shut> {
        // VRB-1
        let client = random().map_err(Shut::Failed)?;
        say(stream, &PROTOCOL.hello(&client, &door.realm))?;
        let welcome: [u8; WELCOME] = hear(stream, until, door)?;
        let talk = PROTOCOL.recognise(&welcome, door.key, door.realm, client).ok_or(Shut::Another)?;
        let limits = rail.device.limits;
        let queue = Queue::make(&rail.device, limits.depth).map_err(Shut::Failed)?;
        let stage = Stage::new(rail).map_err(Shut::Failed)?;
        queue.bind(rail, false).map_err(Shut::Failed)?;
        let first = first_packet().map_err(Shut::Failed)?;
        let end = End { number: queue.number(), first, mtu: rail.mtu, reads: limits.asks };
        let connect = Connect { rail: number, gid: rail.port.gid, lid: rail.port.lid, end }.encode(&talk);
        say(stream, &[talk.prove(Side::Client).as_slice(), &connect].concat())?;
        let answer: [u8; ANSWER] = hear(stream, until, door)?;
        let strange = || Shut::Failed(TransferError::transport("the owner answers in another protocol"));
        let refused = || {
            let owner = &door.owner;
            Shut::Failed(TransferError::transport(format!("the owner, {owner}, cannot make another queue pair")))
        };
        let end = decode_answer(&talk, &answer).ok_or_else(strange)?.ok_or_else(refused)?;
        let there = There { gid: theirs.gid, lid: theirs.lid, end: End { reads: 1, ..end } };
        queue.receive(rail, &there).and_then(|()| queue.send(first, end.reads.max(1))).map_err(Shut::Failed)?;
        say(stream, &[READY])?;
        Ok(Self { queue, stage, stream: Arc::clone(stream), depth: limits.depth, posted: 0, completed: 0, ended: 0 })
    }

    /// Whether the owner has kept the connection and has said nothing unasked.
    pub(super) fn is_sound(&self) -> bool {
        let now = timespec(Duration::ZERO);
        matches!(poll(&mut [PollFd::new(&*self.stream, PollFlags::IN)], Some(&now)), Ok(0))
    }

    /// Asks the owner about exports; returns the answers in order.
    pub(super) fn ask(&self, exports: &[(u32, u32, Token)], watch: &Watch) -> Result<Vec<Fate>, Failure> {
        let limit = watch.left().unwrap_or(CONNECTING).min(CONNECTING);
        let mut fates = Vec::with_capacity(exports.len());
        for some in exports.chunks(AHEAD) {
            let questions: Vec<u8> =
                some.iter().flat_map(|(slot, generation, token)| encode_question(*slot, *generation, token)).collect();
            let asked = (&*self.stream).write_all(&questions);
            let mut said = vec![0; some.len()];
            let heard = asked.and_then(|()| fill(&self.stream, &mut said, Instant::now() + limit));
            if let Err(error) = heard {
                watch.check().map_err(Failure::Over)?;
                return Err(Failure::Lost(format!("the owner does not say what became of the buffer: {error}")));
            }
            for byte in said {
                fates
                    .push(Fate::of(byte).ok_or_else(|| Failure::Lost("the owner answers in another protocol".into()))?);
            }
        }
        Ok(fates)
    }

    /// The number of further requests that it takes.
    pub(super) fn room(&self) -> usize {
        (u64::from(self.depth) - (self.posted - self.completed)) as usize
    }

    /// The number of the next request.
    pub(super) fn next(&self) -> u64 {
        self.posted
    }

    /// All requests before this number have completed.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    pub(super) fn is_idle(&self) -> bool {
        self.posted == self.completed
    }

    /// Posts linked requests, numbered from [`Self::next`] on.
    ///
    /// # Safety
    /// As for [`Queue::post`]; if this fails, [`Self::stop`] must be called while the memory still exists.
    pub(super) unsafe fn post(&mut self, first: *mut SendRequest, count: u64) -> Result<(), Failure> {
        // Count all, even if only some were taken.
        self.posted += count;
        // SAFETY: as the caller vouches.
        unsafe { self.queue.post(first) }.map_err(Failure::from)
    }

    /// Waits for completions, or for a reason to stop waiting; `operation` maps a request to its operation.
    pub(super) fn wait(&mut self, watch: &Watch, operation: impl Fn(u64) -> usize) -> Result<(), Failure> {
        let mut list = [Completion::default(); 16];
        let mut until = Some(Instant::now() + LOOK);
        loop {
            let mut count = self.queue.poll(&mut list)?;
            if count == 0 && until.is_some_and(|until| Instant::now() < until) {
                std::hint::spin_loop();
                continue;
            }
            if count == 0 {
                until = None;
                self.queue.arm()?;
                // A completion that came before arming gives no notice.
                count = self.queue.poll(&mut list)?;
            }
            if count > 0 {
                return self.complete(&list[..count], operation);
            }
            if self.sleep(watch)? {
                // Completions that have arrived still count.
                let count = self.queue.poll(&mut list)?;
                if count == 0 {
                    return Err(Failure::Lost("the owner has closed the connection of the queue pair".to_owned()));
                }
                return self.complete(&list[..count], operation);
            }
        }
    }

    fn complete(&mut self, list: &[Completion], operation: impl Fn(u64) -> usize) -> Result<(), Failure> {
        self.ended = list.last().map_or(self.ended, |last| last.id + 1);
        for each in list {
            match each.status {
                status::SUCCESS => self.completed = each.id + 1,
                status::REMOTE_ACCESS | status::REMOTE_INVALID | status::REMOTE_OPERATION => {
                    return Err(Failure::Refused(operation(each.id)));
                }
                other => return Err(Failure::Lost(status::word(other))),
            }
        }
        Ok(())
    }

    /// Sleeps until there is something to look at; returns whether the connection has ended.
    fn sleep(&mut self, watch: &Watch) -> Result<bool, Failure> {
        watch.check().map_err(Failure::Over)?;
        let limit = watch.left().map(timespec);
        let ready = {
            let mut list = [PollFd::new(&self.queue, PollFlags::IN), PollFd::new(&*self.stream, PollFlags::IN)];
            match poll(&mut list, limit.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(TransferError::os("wait for completions")(errno).into()),
            }
            [!list[0].revents().is_empty(), !list[1].revents().is_empty()]
        };
        watch.check().map_err(Failure::Over)?;
        if ready[0] {
            self.queue.hear();
        }
        Ok(ready[1])
    }

    /// Stops everything, and waits until nothing is under way (OPR-1). The link must not be used afterwards.
    pub(super) fn stop(&mut self) {
        if self.is_idle() || self.queue.fail().is_err() {
            return;
        }
        let until = Instant::now() + STOPPING;
        let mut list = [Completion::default(); 16];
        // Each request that was taken completes as failed. Do not wait for ever for requests that were not taken: the
        // queue pair is destroyed next, which the device must obey in any case.
        while self.ended < self.posted && Instant::now() < until {
            match self.queue.poll(&mut list) {
                Ok(0) => {
                    if self.queue.arm().is_err() {
                        return;
                    }
                    let left = timespec(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(10)));
                    let _ = poll(&mut [PollFd::new(&self.queue, PollFlags::IN)], Some(&left));
                    self.queue.hear();
                }
                Ok(count) => self.ended = list[count - 1].id + 1,
                Err(_) => return,
            }
        }
    }
}

/// A 24-bit number that nobody can guess.
pub(super) fn first_packet() -> Result<u32, TransferError> {
    let drawn = random()?;
    Ok(u32::from_le_bytes([drawn[0], drawn[1], drawn[2], 0]))
}

/// Sets options for a peer whose host may vanish without a word.
pub(super) fn set_up(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(CONNECTING))?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

fn say(stream: &TcpStream, bytes: &[u8]) -> Result<(), Shut> {
    let mut stream = stream;
    stream.write_all(bytes).map_err(Shut::BrokeOff)
}

fn hear<const N: usize>(stream: &TcpStream, until: Instant, door: &Door) -> Result<[u8; N], Shut> {
    let mut bytes = [0; N];
    match fill(stream, &mut bytes, until) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Shut::Failed(TransferError::transport(format!(
            "the owner, {}, does not answer: it may be stopped, or out of descriptors",
            door.owner
        )))),
        Err(error) => Err(Shut::BrokeOff(error)),
    }
}

/// Fills `into` in time, even if bytes trickle in.
pub(super) fn fill(stream: &TcpStream, into: &mut [u8], until: Instant) -> io::Result<()> {
    let (mut stream, mut filled) = (stream, 0);
    while filled < into.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut into[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
