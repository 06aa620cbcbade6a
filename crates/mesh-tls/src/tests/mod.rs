//! Members and strangers, over real sockets.

mod clock;
mod door;
mod folders;
mod speed;
mod stream;

use super::*;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

const LONG: Duration = Duration::from_secs(20);
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// A folder that is removed with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let name = format!(
            "mesh-tls-{}-{:016x}",
            std::process::id(),
            provider::random::<8>().map(u64::from_ne_bytes).unwrap()
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A job: its folder, and a controller's and a host's identity.
struct Job {
    folder: Folder,
    store: Store,
    controller: Arc<Identity>,
    host: Arc<Identity>,
}

impl Job {
    fn new() -> Self {
        let folder = Folder::new();
        let store = Store::create(&folder.join("job"), WEEK, WEEK).unwrap();
        let controller = Identity::load(store.dir()).unwrap();
        let host = Identity::load_as(store.dir(), Role::Host).unwrap();
        Self { folder, store, controller, host }
    }

    /// A member whose certificate was issued `before` now and is valid for `lifetime` from then.
    fn member(&self, role: Role, before: Duration, lifetime: Duration) -> Arc<Identity> {
        self.member_from(role, SystemTime::now() - before, lifetime)
    }

    /// A member whose certificate was issued at `made`.
    fn member_from(&self, role: Role, made: SystemTime, lifetime: Duration) -> Arc<Identity> {
        let dir = self.folder.join(&format!("member-{}", provider::random::<4>().map(u32::from_ne_bytes).unwrap()));
        files::make_dir(&dir).unwrap();
        let pem = files::read(&self.store.dir().join("ca.pem")).unwrap();
        let key = files::read_key(&self.store.dir().join("ca.key")).unwrap();
        let issued = Authority::from_pem(&pem, &key).unwrap().issue(role, lifetime, made, None).unwrap();
        files::write(&dir.join("ca.pem"), &pem).unwrap();
        files::write(&dir.join("crl.pem"), &files::read(&self.store.dir().join("crl.pem")).unwrap()).unwrap();
        files::write(&dir.join(format!("{role}.pem")), &issued.certificate).unwrap();
        files::write(&dir.join(format!("{role}.key")), &issued.key).unwrap();
        Identity::load_unchecked(&dir, role)
    }
}

/// A listener, and what it reports.
struct Door {
    listener: Listener,
    told: mpsc::Receiver<ListenerEvent>,
}

impl Door {
    fn open(identity: &Arc<Identity>, limits: Limits) -> Self {
        let (tell, told) = mpsc::channel();
        let addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = Listener::bind(&[addr], Arc::clone(identity), limits, move |event| {
            let _ = tell.send(event);
        })
        .unwrap();
        Self { listener, told }
    }

    fn addr(&self) -> SocketAddr {
        self.listener.addrs()[0]
    }

    fn dial(&self, identity: &Identity, expect: Option<Role>) -> Result<Dialed, DialError> {
        dial(&self.addr().to_string(), identity, expect, LONG)
    }

    fn joined(&self) -> (TlsStream, PeerFacts) {
        match self.told.recv_timeout(LONG).unwrap() {
            ListenerEvent::Joined { stream, peer, .. } => (stream, peer),
            other => panic!("{other:?}"),
        }
    }

    fn refused(&self) -> Reason {
        match self.told.recv_timeout(LONG).unwrap() {
            ListenerEvent::Refused { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    }
}

/// Both ends of a connection.
fn pair(job: &Job) -> (TlsStream, TlsStream) {
    let door = Door::open(&job.host, Limits::default());
    let client = door.dial(&job.controller, Some(Role::Host)).unwrap().stream;
    (client, door.joined().0)
}

fn wait(stream: &TlsStream, flags: rustix::event::PollFlags) {
    let timeout = crate::timespec(LONG);
    let n = rustix::event::poll(&mut [rustix::event::PollFd::from_borrowed_fd(stream.as_fd(), flags)], Some(&timeout));
    assert_ne!(n, Ok(0), "nothing came");
}

/// Fills the buffer, waiting for data.
fn read_all(stream: &mut TlsStream, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match stream.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                wait(stream, rustix::event::PollFlags::IN);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn read_error(stream: &mut TlsStream) -> std::io::Error {
    read_all(stream, &mut [0; 64]).unwrap_err()
}
