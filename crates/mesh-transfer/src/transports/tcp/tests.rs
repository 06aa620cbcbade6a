//! Members of a job and strangers in one process, as if they were on two hosts.

use super::member::Member;
use super::section::Place;
use super::*;
use crate::error::Closing;
use crate::operation::Op;
use crate::operation::Work;
use mesh_tls::{Identity, Role, Store, TlsStream};
use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
const LONG: Duration = Duration::from_secs(20);

/// A folder that is removed with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = format!("mesh-transfer-{:032x}", u128::from_le_bytes(random().unwrap()));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn membership(credentials: &Path, revocations: Option<PathBuf>) -> Membership {
    let addresses = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    Membership { credentials: credentials.into(), revocations, addresses, silence: Duration::from_secs(5) }
}

fn segments(data: &[u8]) -> crate::segments::Segments {
    crate::segments::Segments::one(data.as_ptr() as u64, data.len() as u64)
}

/// An owner, with its memory, that only other hosts reach.
struct Owner {
    data: Vec<u8>,
    exports: Arc<Exports>,
    export: Arc<Export>,
    handle: Arc<Handle>,
    place: Place,
    /// Listens until dropped.
    _remote: server::Remote,
}

impl Owner {
    fn new(credentials: &Path, revocations: Option<PathBuf>, size: usize) -> Self {
        let realm = Realm::draw().unwrap();
        let exports = Arc::new(Exports::new(&realm).unwrap());
        let data: Vec<u8> = (0..size as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        // SAFETY: `data` lives as long as the owner, and moving a vector does not move its contents.
        let export = unsafe { exports.open(segments(&data), true, Box::new(())) }.unwrap();
        let (door, member) = (random().unwrap(), Arc::new(Member::new(membership(credentials, revocations))));
        let remote = server::Remote::open(&exports, door, &member, &Sockets::default()).unwrap();
        let place = Place { port: 1, network: 0, numbers: 0, door, remote: Ok(remote.addrs.clone()) };
        let handle = Arc::new(Handle {
            realm: realm.id,
            // Another machine, as far as readers can tell.
            boot: [1; 16],
            pid: 1,
            host: "there".to_owned(),
            token: export.token,
            slot: export.slot,
            generation: export.generation,
            length: size as u64,
            start: 0,
            len: size as u64,
            writable: true,
            sections: Vec::new(),
        });
        Self { data, exports, export, handle, place, _remote: remote }
    }

    fn addr(&self) -> SocketAddr {
        self.place.remote.as_ref().unwrap()[0]
    }

    fn reach(&self, user: &Tcp) -> Result<Arc<dyn Peer>, TransferError> {
        user.connect(&self.handle, &self.place.encode(), &Watch::new(Some(Instant::now() + LONG)))
    }

    fn read(&self, peer: &Arc<dyn Peer>) -> Result<Vec<u8>, TransferError> {
        let copy = vec![0_u8; self.data.len()];
        self.run(peer, Work::Read { local: segments(&copy), offset: 0 })?;
        Ok(std::hint::black_box(copy))
    }

    fn run(&self, peer: &Arc<dyn Peer>, work: Work) -> Result<u64, TransferError> {
        let op = Op::new(&self.handle, work).unwrap();
        let mut found = [0];
        // SAFETY: what the callers name lives until this returns.
        unsafe { peer.run(&[op], &mut found, &Watch::new(Some(Instant::now() + LONG))) }.map(|()| found[0])
    }
}

/// A process elsewhere.
fn user(membership: Option<&Membership>) -> Tcp {
    let made = Tcp::new(&Realm::draw().unwrap());
    membership.iter().for_each(|membership| made.join(membership));
    made
}

struct Job {
    folder: Folder,
    store: Store,
}

impl Job {
    fn new() -> Self {
        let folder = Folder::new();
        let store = Store::create(&folder.0.join("job"), WEEK, WEEK).unwrap();
        Self { folder, store }
    }

    fn host(&self, name: &str) -> PathBuf {
        let path = self.folder.0.join(name);
        self.store.issue_host(&path, WEEK).unwrap();
        path
    }
}

#[test]
fn members_on_other_hosts_read_and_write_memory_of_any_size() {
    let job = Job::new();
    for size in [8, 16 * 1024, (9 << 20) + 13] {
        let owner = Owner::new(&job.host(&format!("owner-{size}")), None, size);
        let peer = owner.reach(&user(Some(&membership(job.store.dir(), None)))).unwrap();
        assert_eq!(owner.read(&peer).unwrap(), owner.data);
        let fresh: Vec<u8> = (0..size).map(|i| (i / 7) as u8).collect();
        owner.run(&peer, Work::Write { local: segments(&fresh), offset: 0 }).unwrap();
        assert!(owner.read(&peer).unwrap() == fresh && *std::hint::black_box(&owner.data) == fresh);
        let before = u64::from_ne_bytes(std::array::from_fn(|i| fresh[i]));
        assert_eq!(owner.run(&peer, Work::FetchAdd { offset: 0, value: 5 }).unwrap(), before);
        let desired = Work::CompareAndSwap { offset: 0, expected: before + 5, desired: 1 };
        assert_eq!(owner.run(&peer, desired).unwrap(), before + 5);
        owner.exports.close(&owner.export, Closing::Dropped);
        assert_eq!(owner.read(&peer).unwrap_err().kind, ErrorKind::Gone);
    }
}

#[test]
fn each_of_its_addresses_leads_to_it() {
    let job = Job::new();
    let owner = Owner::new(&job.host("owner"), None, 8);
    let user = user(Some(&membership(&job.host("user"), None)));
    // Only one address, if the machine has no IPv6.
    for addr in owner.place.remote.clone().unwrap() {
        let place = Place { remote: Ok(vec![addr]), ..owner.place.clone() };
        let peer = user.connect(&owner.handle, &place.encode(), &Watch::new(Some(Instant::now() + LONG))).unwrap();
        assert_eq!(owner.read(&peer).unwrap(), owner.data, "{addr}");
    }
}

#[test]
fn pieces_of_memory_end_anywhere_in_records() {
    let job = Job::new();
    let owner = Owner::new(&job.host("owner"), None, 3 << 20);
    let peer = owner.reach(&user(Some(&membership(&job.host("user"), None)))).unwrap();
    // More pieces than fit into one call, of odd lengths, some longer than a record.
    let mut copy = vec![0_u8; 2 * owner.data.len()];
    let mut list = Vec::new();
    let (mut at, mut whole) = (0, 0);
    for n in (0..).map(|n: usize| if n % 50 == 49 { 40_000 } else { 1 + n * 131 % 977 }) {
        let len = n.min(owner.data.len() - whole);
        if len == 0 {
            break;
        }
        list.push(crate::segments::Segment { addr: copy.as_mut_ptr() as u64 + at, len: len as u64 });
        at += len as u64 + 1;
        whole += len;
    }
    assert!(list.len() > 1000);
    let local = crate::segments::Segments::new(list.clone()).unwrap();
    owner.run(&peer, Work::Read { local: local.clone(), offset: 0 }).unwrap();
    let gathered: Vec<u8> = list
        .iter()
        .flat_map(|piece| {
            let at = (piece.addr - copy.as_ptr() as u64) as usize;
            std::hint::black_box(&copy)[at..at + piece.len as usize].to_vec()
        })
        .collect();
    assert!(gathered == owner.data);
    owner.run(&peer, Work::Write { local, offset: 0 }).unwrap();
    assert!(owner.read(&peer).unwrap() == gathered);
}

#[test]
fn who_joins_again_is_reached_where_it_was_and_who_joins_another_job_is_not() {
    let (job, other) = (Job::new(), Job::new());
    // Only this network can reach it, but the question is whether it listens at all.
    let elsewhere = |dir: &Path, silence| Membership {
        addresses: vec![own_address()],
        silence: Duration::from_secs(silence),
        ..membership(dir, None)
    };
    let realm = Realm::draw().unwrap();
    let (exports, owner) = (Arc::new(Exports::new(&realm).unwrap()), Tcp::new(&realm));
    let data = [7_u8; 8];
    // SAFETY: `data` lives to the end of the test.
    let export = unsafe { exports.open(segments(&data), true, Box::new(())) }.unwrap();
    let listens = || Place::decode(&owner.offer(&exports, &export).unwrap()).unwrap().remote;
    assert_eq!(listens(), Err(Why::NoJob));
    let first = elsewhere(&job.host("owner"), 5);
    owner.join(&first);
    let place = listens();
    if first.addresses[0].is_loopback() {
        assert_eq!(place, Err(Why::Alone));
        return;
    }
    let addr = place.clone().unwrap()[0];
    owner.join(&first.clone());
    assert_eq!(listens(), place);
    owner.join(&Membership { silence: Duration::from_secs(9), ..first });
    assert_ne!(listens(), place);
    assert!(TcpStream::connect(addr).is_ok(), "handles that were given away lead nowhere");
    owner.join(&elsewhere(&other.host("owner"), 5));
    assert!(listens().is_ok());
    assert!(TcpStream::connect(addr).is_err(), "members of the job that was left are let in");
}

/// This machine's address on the way to others; loopback if it has none.
fn own_address() -> IpAddr {
    let asked = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    // Nothing is sent.
    match asked.connect((Ipv4Addr::new(198, 51, 100, 1), 9)) {
        Ok(()) => asked.local_addr().unwrap().ip(),
        Err(_) => Ipv4Addr::LOCALHOST.into(),
    }
}

/// TCP-4
#[test]
fn nobody_reaches_it_but_members_of_the_job() {
    let (job, other) = (Job::new(), Job::new());
    let owner = Owner::new(&job.host("owner"), None, 8);
    let section = owner.place.encode();
    let stranger = user(None);
    assert!(stranger.why_not(&owner.handle, &section).is_some_and(|why| why.contains("belongs to no job")));
    assert!(!stranger.capabilities().remote);
    assert_eq!(owner.reach(&stranger).unwrap_err().kind, ErrorKind::Transport);
    let foreign = user(Some(&membership(&other.host("host"), None)));
    assert_eq!(foreign.why_not(&owner.handle, &section), None);
    let error = owner.reach(&foreign).unwrap_err();
    assert!(error.kind == ErrorKind::Transport && error.message.contains("another job"), "{error}");
    // Nor does an observer, at either end.
    let observer = job.folder.0.join("observer");
    job.store.issue_observer(&observer, WEEK).unwrap();
    let looks = Identity::load_as(&observer, Role::Observer).unwrap();
    let stream = TcpStream::connect(owner.addr()).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut tls = TlsStream::client(stream.into(), &looks, None).unwrap();
    let wait = |tls: &TlsStream, flags| {
        let fd = tls.as_fd();
        rustix::event::poll(&mut [rustix::event::PollFd::from_borrowed_fd(fd, flags)], None).map(drop).unwrap();
    };
    // Go on as a member would.
    let hello = [b"MXT\x01".as_slice(), &[0; 16], &owner.handle.realm].concat();
    let mut is_told = true;
    let heard = loop {
        match tls.handshake() {
            Ok(mesh_tls::Progress::Done(_)) => {
                if std::mem::take(&mut is_told) {
                    // It may be closed already.
                    let _ = tls.write(&[std::io::IoSlice::new(&hello)]);
                }
                match tls.read(&mut [0; 64]) {
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        wait(&tls, rustix::event::PollFlags::IN)
                    }
                    read => break read.unwrap_or(0),
                }
            }
            Ok(_) => wait(&tls, rustix::event::PollFlags::IN),
            Err(_) => break 0,
        }
    };
    assert_eq!(heard, 0, "an observer was answered");
    // A member that does not know the door key learns nothing either.
    let guess = Place { door: [0; 16], ..owner.place.clone() };
    let member = user(Some(&membership(job.store.dir(), None)));
    let watch = Watch::new(Some(Instant::now() + LONG));
    assert!(member.connect(&owner.handle, &guess.encode(), &watch).is_err());
    assert_eq!(owner.read(&owner.reach(&member).unwrap()).unwrap(), owner.data);
}

/// TCP-3
#[test]
fn in_the_clear_it_says_nothing_but_an_alert() {
    let job = Job::new();
    let owner = Owner::new(&job.host("owner"), None, 8);
    let mut stream = TcpStream::connect(owner.addr()).unwrap();
    stream.write_all(&[b"MXT\x01".as_slice(), &[0; 16], &owner.handle.realm].concat()).unwrap();
    let mut heard = Vec::new();
    // A reset will do as well.
    let _ = stream.read_to_end(&mut heard);
    assert!(heard.len() <= 7, "{heard:?}");
}

#[test]
fn addresses_at_which_nobody_listens_mean_that_it_has_ended_unless_another_leads_to_it() {
    let job = Job::new();
    let member = membership(&job.host("user"), None);
    let nobody = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = nobody.local_addr().unwrap();
    drop(nobody);
    let owner = Owner::new(&job.host("owner"), None, 8);
    let ended = Place { remote: Ok(vec![addr]), ..owner.place.clone() };
    let watch = Watch::new(Some(Instant::now() + LONG));
    let error = user(Some(&member)).connect(&owner.handle, &ended.encode(), &watch).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone, "{error}");
    // One of its addresses leads nowhere, another one to it.
    let several = Place { remote: Ok(vec![addr, owner.addr()]), ..owner.place.clone() };
    let peer = user(Some(&member)).connect(&owner.handle, &several.encode(), &watch).unwrap();
    assert_eq!(owner.read(&peer).unwrap(), owner.data);
}

/// TCP-4
#[test]
fn a_member_that_is_revoked_loses_its_connections_and_gets_no_others() {
    let job = Job::new();
    let (host, list) = (job.host("owner"), job.folder.0.join("revoked.crl"));
    let owner = Owner::new(&host, Some(list.clone()), 8);
    let thief = job.host("thief");
    let user = user(Some(&membership(&thief, None)));
    let peer = owner.reach(&user).unwrap();
    assert_eq!(owner.read(&peer).unwrap(), owner.data);
    job.store.revoke(thief.join("host.pem").to_str().unwrap()).unwrap();
    // The agent passes the list on like this: the owner's own folder keeps the old one.
    std::fs::write(&list, Identity::load(job.store.dir()).unwrap().revocations().unwrap()).unwrap();
    let end = Instant::now() + LONG;
    let error = loop {
        assert!(Instant::now() < end, "it is served still");
        if let Err(error) = owner.read(&peer) {
            break error;
        }
    };
    assert_eq!(error.kind, ErrorKind::Transport, "{error}");
    let error = owner.reach(&user).unwrap_err();
    assert!(error.message.contains("revoked"), "{error}");
}

#[test]
fn a_user_that_gives_up_waits_for_nobody() {
    let job = Job::new();
    // Accepts, and says nothing.
    let silent = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let owner = Owner::new(&job.host("owner"), None, 8);
    let place = Place { remote: Ok(vec![silent.local_addr().unwrap()]), ..owner.place.clone() };
    let user = user(Some(&membership(&job.host("user"), None)));
    let watch = Watch::new(None);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| tell.send(user.connect(&owner.handle, &place.encode(), &watch).unwrap_err()).unwrap());
        let (_stream, _) = silent.accept().unwrap();
        watch.give_up();
        assert_eq!(told.recv_timeout(LONG).unwrap().kind, ErrorKind::Cancelled);
    });
}
