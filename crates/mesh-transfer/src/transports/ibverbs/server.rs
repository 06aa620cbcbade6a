//! The owner's end: a thread that accepts connections, and one for each client, which keeps its queue pair and answers
//! whether exports are live. The transfers themselves involve neither.

use super::device::{Queue, Rail, There};
use super::link::{fill, first_packet, set_up};
use super::wire::{ASK, CONNECT, Connect, End, Fate, PROTOCOL, QUESTION, READY, decode_question, encode_answer};
use crate::door::{HELLO, PROOF, Place, Side, Strangers, pause};
use crate::error::{ErrorKind, TransferError};
use crate::exports::Exports;
use crate::handle::Token;
use crate::lock;
use crate::realm::random;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The most queue pairs at once.
const QUEUES: usize = 1024;
/// How long a stranger may take for each message.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Makes queue pairs for others. Ends with the process.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) addr: SocketAddr,
    pub(super) key: Token,
    sockets: Arc<Sockets>,
}

/// Sockets whose closing tells others that this process has ended.
#[derive(Debug, Default)]
struct Sockets(Mutex<Vec<RawFd>>);

impl Sockets {
    fn list(&self, socket: &impl AsRawFd) -> Listed<'_> {
        let fd = socket.as_raw_fd();
        lock(&self.0).push(fd);
        Listed(self, fd)
    }
}

/// A socket that stays open as long as this lives.
struct Listed<'a>(&'a Sockets, RawFd);

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).retain(|fd| *fd != self.1);
    }
}

#[derive(Debug, Default)]
struct Places {
    strangers: Strangers,
    queues: AtomicUsize,
}

impl Server {
    /// Listens at the first of these addresses that exists here.
    pub(super) fn start(
        exports: &Arc<Exports>,
        rails: Arc<[Rail]>,
        addresses: &[IpAddr],
    ) -> Result<Self, TransferError> {
        let key = random()?;
        let failed = |error: io::Error| TransferError::transport(format!("cannot listen for queue pairs: {error}"));
        let bound = addresses.iter().find_map(|address| TcpListener::bind((*address, 0)).ok());
        let listener = bound.map_or_else(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)), Ok).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let sockets = Arc::new(Sockets::default());
        let host =
            Host { exports: Arc::clone(exports), rails, key, places: Places::default(), sockets: Arc::clone(&sockets) };
        let thread = std::thread::Builder::new().name("mesh-verbs".to_owned()).stack_size(128 * 1024);
        thread.spawn(move || listen(&listener, &Arc::new(host))).map_err(failed)?;
        Ok(Self { addr, key, sockets })
    }

    /// Closes what this forked copy would keep open for its parent (FRK-1). Call it from the fork's only thread.
    pub(super) fn forked(&self) {
        // If a thread of the parent held the lock, they stay open.
        if let Ok(mut sockets) = self.sockets.0.try_lock() {
            for fd in sockets.drain(..) {
                // SAFETY: open sockets, whose owners are threads that this copy does not have.
                unsafe { libc::close(fd) };
            }
        }
    }
}

#[derive(Debug)]
struct Host {
    exports: Arc<Exports>,
    rails: Arc<[Rail]>,
    key: Token,
    places: Places,
    sockets: Arc<Sockets>,
}

fn listen(listener: &TcpListener, host: &Arc<Host>) {
    let _listed = host.sockets.list(listener);
    loop {
        let Ok((stream, _)) = listener.accept() else {
            pause();
            continue;
        };
        host.places.strangers.wait();
        let thread = std::thread::Builder::new().name("mesh-verbs".to_owned()).stack_size(256 * 1024);
        let its = Arc::clone(host);
        // Without a thread, the connection ends, and its other end reports that.
        let served = thread.spawn(move || {
            let _listed = its.sockets.list(&stream);
            let made = greet(&its, &stream);
            its.places.strangers.one_fewer();
            if let Ok((queue, _place)) = made {
                // However it ends, the other end notices; and the queue pair ends with it.
                let _ = serve(&its, &stream);
                drop(queue);
            }
        });
        if served.is_err() {
            host.places.strangers.one_fewer();
        }
    }
}

fn part<const N: usize>(stream: &TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    fill(stream, &mut bytes, Instant::now() + HANDSHAKE)?;
    Ok(bytes)
}

/// VRB-1
fn greet<'a>(host: &'a Host, stream: &TcpStream) -> io::Result<(Queue, Place<'a>)> {
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let mut out = stream;
    set_up(stream)?;
    let hello: [u8; HELLO] = part(stream)?;
    let (talk, welcome) = PROTOCOL.answer(&hello, host.key, host.exports.realm()).ok_or_else(refused)?;
    out.write_all(&welcome)?;
    let proof: [u8; PROOF] = part(stream)?;
    if !talk.proves(Side::Client, &proof) {
        return Err(refused());
    }
    let connect: [u8; CONNECT] = part(stream)?;
    let connect = Connect::decode(&talk, &connect).ok_or_else(refused)?;
    let place = Place::take(&host.places.queues, QUEUES);
    let made = place.and_then(|place| Some((make(host, &connect).ok()?, place)));
    match made {
        Some(((queue, end), place)) => {
            out.write_all(&encode_answer(&talk, Some(end)))?;
            Ok((queue, place))
        }
        None => {
            out.write_all(&encode_answer(&talk, None))?;
            Err(io::Error::from(io::ErrorKind::OutOfMemory))
        }
    }
}

/// Makes a queue pair that serves the client's, and sends nothing itself.
fn make(host: &Host, connect: &Connect) -> Result<(Queue, End), TransferError> {
    let rail = host.rails.get(usize::from(connect.rail));
    let rail = rail.ok_or_else(|| TransferError::invalid("there is no such rail"))?;
    let queue = Queue::make(&rail.device, 1)?;
    queue.bind(rail, true)?;
    let reads = connect.end.reads.min(rail.device.limits.serves).max(1);
    let mtu = connect.end.mtu.min(rail.mtu);
    queue.receive(rail, &There { gid: connect.gid, lid: connect.lid, end: End { mtu, reads, ..connect.end } })?;
    let end = End { number: queue.number(), first: first_packet()?, mtu, reads };
    Ok((queue, end))
}

/// Answers until the other end closes.
fn serve(host: &Host, stream: &TcpStream) -> io::Result<()> {
    let mut stream = stream;
    stream.set_read_timeout(None)?;
    let mut letter = [0];
    loop {
        stream.read_exact(&mut letter)?;
        match letter[0] {
            READY => {}
            ASK => {
                let question: [u8; QUESTION] = part(stream)?;
                stream.set_read_timeout(None)?;
                let (slot, generation, token) = decode_question(&question);
                let fate = match host.exports.find(slot, generation, &token) {
                    Ok(_) => Fate::Live,
                    Err(error) if error.kind == ErrorKind::Refused => Fate::Refused,
                    Err(_) => Fate::Gone,
                };
                stream.write_all(&[fate as u8])?;
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::{ANSWER, decode_answer};
    use super::*;
    use crate::door::{Talk, WELCOME};
    use crate::realm::Realm;

    /// An owner without rails, so that every queue pair is refused, though not every client is told.
    struct Owner {
        realm: Realm,
        server: Server,
    }

    fn owner() -> Owner {
        let realm = Realm::draw().unwrap();
        let exports = Arc::new(Exports::new(&realm).unwrap());
        let server = Server::start(&exports, Arc::new([]), &[]).unwrap();
        Owner { realm, server }
    }

    impl Owner {
        fn dial(&self) -> TcpStream {
            let stream = TcpStream::connect(self.server.addr).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            stream
        }

        fn hello(&self) -> Vec<u8> {
            PROTOCOL.hello(&[5; 16], &self.realm.id)
        }

        /// A connection on which the owner has proved who it is.
        fn greeted(&self) -> (TcpStream, Talk, [u8; PROOF]) {
            let mut stream = self.dial();
            stream.write_all(&self.hello()).unwrap();
            let mut welcome = [0; WELCOME];
            stream.read_exact(&mut welcome).unwrap();
            let talk = PROTOCOL.recognise(&welcome, self.server.key, self.realm.id, [5; 16]).unwrap();
            let proof = std::array::from_fn(|at| welcome[16 + at]);
            (stream, talk, proof)
        }
    }

    /// The number of bytes that the other end sends until it closes or breaks off.
    fn rest(mut stream: &TcpStream) -> usize {
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        said.len()
    }

    const CONNECTS: Connect =
        Connect { rail: 0, gid: [7; 16], lid: 0, end: End { number: 17, first: 1, mtu: 3, reads: 1 } };

    #[test]
    fn strangers_are_told_nothing_and_hold_nobody_up() {
        let owner = owner();
        let mut wrong = owner.hello();
        wrong[35] ^= 1;
        for opening in [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n".to_vec(), vec![0; 36], wrong] {
            let mut stream = owner.dial();
            stream.write_all(&opening).unwrap();
            assert_eq!(rest(&stream), 0);
        }
        // Silent clients, fewer than there are places.
        let silent: Vec<_> = (0..8).map(|_| owner.dial()).collect();
        owner.greeted();
        drop(silent);
    }

    /// VRB-1
    #[test]
    fn who_does_not_know_the_key_is_told_nothing_more() {
        let owner = owner();
        let (mut stream, _, theirs) = owner.greeted();
        stream.write_all(&[0; PROOF + CONNECT]).unwrap();
        assert_eq!(rest(&stream), 0);
        // A proof cannot be replayed to its sender.
        let (mut stream, talk, _) = owner.greeted();
        stream.write_all(&[theirs.as_slice(), &CONNECTS.encode(&talk)].concat()).unwrap();
        assert_eq!(rest(&stream), 0);
    }

    /// VRB-1
    #[test]
    fn what_is_not_sealed_makes_no_queue_pair() {
        let owner = owner();
        let (_, earlier, _) = owner.greeted();
        let (mut stream, talk, _) = owner.greeted();
        stream.write_all(&[talk.prove(Side::Client).as_slice(), &CONNECTS.encode(&earlier)].concat()).unwrap();
        assert_eq!(rest(&stream), 0);
    }

    #[test]
    fn a_rail_that_is_not_there_is_refused_by_name() {
        let owner = owner();
        let (mut stream, talk, _) = owner.greeted();
        stream.write_all(&[talk.prove(Side::Client).as_slice(), &CONNECTS.encode(&talk)].concat()).unwrap();
        let mut answer = [0; ANSWER];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(decode_answer(&talk, &answer), Some(None));
        assert_eq!(rest(&stream), 0);
    }
}
