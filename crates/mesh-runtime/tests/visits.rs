//! Who may look into jobs through a host, over real connections (VIS-1, VIS-2). The Python tests cover what they see.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use mesh_proto::control::Traits;
use mesh_proto::hosts::{Join, Look, Packet, PacketDecoder, PacketKind, Refusal, Refuse, Short};
use mesh_runtime::tls::{Dialed, Identity, Role, Store, TlsStream, dial};
use mesh_runtime::{Host, HostOptions, Options, Spare, VisitError, jobs_at, visit};
use std::io::{ErrorKind, IoSlice};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

struct Agent {
    dir: PathBuf,
    host: Arc<Host>,
    address: String,
    controller: Arc<Identity>,
    member: Arc<Identity>,
    observer: Arc<Identity>,
    told: Arc<Mutex<Vec<String>>>,
}

impl Agent {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("mesh-visits-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let store = Store::create(&dir.join("job"), LONG, LONG).unwrap();
        store.issue_observer(&dir.join("observer"), LONG).unwrap();
        let member = Identity::load_as(store.dir(), Role::Host).unwrap();
        let options = HostOptions {
            name: "b7".to_owned(),
            traits: Traits::default(),
            python: Vec::new(),
            env: Vec::new(),
            scratch: dir.join("scratch"),
            once: false,
            standby: Spare::default(),
            runtime: Options {
                spin: Duration::ZERO,
                link_budget: 1 << 20,
                mailbox_budget: 1 << 20,
                reply_budget: u64::MAX,
                ref_budget: 1 << 20,
                shm_budget: 1 << 20,
                shm_threshold: 1 << 20,
                shm_idle: Duration::ZERO,
                direct_links: 0,
            },
        };
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let tell = Arc::clone(&told);
        let tell = Box::new(move |text: &str| tell.lock().unwrap().push(text.to_owned()));
        let host = Host::start(Some("127.0.0.1:0"), Arc::clone(&member), options, tell).unwrap();
        Self {
            address: host.addrs()[0].to_string(),
            host,
            controller: Identity::load(store.dir()).unwrap(),
            observer: Identity::load_to_look(&dir.join("observer")).unwrap(),
            member,
            told,
            dir,
        }
    }

    fn dial(&self, identity: &Identity) -> TlsStream {
        let Dialed { stream, peer, .. } = dial(&self.address, identity, None, LONG).unwrap();
        assert_eq!(peer.role, Role::Host);
        stream
    }

    /// Sends a first message and returns the answer; none if the connection ends without one.
    fn say(&self, identity: &Identity, packet: &Packet) -> Option<Packet> {
        let mut stream = self.dial(identity);
        let mut bytes = packet.encode_head();
        packet.body.iter().for_each(|piece| bytes.extend_from_slice(piece));
        assert_eq!(stream.write(&[IoSlice::new(&bytes)]).unwrap(), bytes.len());
        answer(&mut stream)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.host.close();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn answer(stream: &mut TlsStream) -> Option<Packet> {
    let mut decoder = PacketDecoder::default();
    let until = Instant::now() + LONG;
    loop {
        if let Some(packet) = decoder.next_packet().unwrap() {
            return Some(packet);
        }
        match stream.read(decoder.room()) {
            Ok(0) => return None,
            Ok(n) => decoder.filled(n),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                assert!(Instant::now() < until, "no answer");
                std::thread::yield_now();
            }
            Err(_) => return None,
        }
    }
}

fn refused(answer: Option<Packet>) -> (Refusal, String) {
    let Refuse { code, text } = Refuse::read(&answer.unwrap()).unwrap();
    (code, text)
}

#[test]
fn owners_and_observers_may_look_and_hosts_may_not() {
    let agent = Agent::new("roles");
    assert_eq!(agent.observer.role(), Role::Observer);
    for identity in [&agent.controller, &agent.observer] {
        assert_eq!(jobs_at(&agent.address, identity, LONG).unwrap(), Vec::<u64>::new());
        let error = visit(&agent.address, identity, 5, LONG).unwrap_err();
        assert!(matches!(error, VisitError::Refused { code: Refusal::NoSuchJob, .. }), "{error}");
        assert!(!error.is_credentials());
    }
    for look in [0, 5] {
        let (code, text) = refused(agent.say(&agent.member, &Look { job: look }.packet()));
        assert_eq!(
            (code, text.as_str()),
            (Refusal::NotAllowed, "a host's certificate does not let anybody look into jobs")
        );
    }
    let error = jobs_at(&agent.address, &agent.member, LONG).unwrap_err();
    assert!(error.is_credentials(), "{error}");
    assert!(agent.told.lock().unwrap().iter().any(|line| line.contains("does not let anybody look")));
}

#[test]
fn an_observer_joins_nothing() {
    let agent = Agent::new("joins");
    for from in [0, 3] {
        let join = Join { job: 5, from, to: 1, incarnation: 7, expected: 0, body: bytes::Bytes::new() };
        let (code, text) = refused(agent.say(&agent.observer, &join.packet()));
        assert_eq!((code, text.as_str()), (Refusal::NotAllowed, "an observer can look into jobs, and not join them"));
    }
    assert_eq!(agent.host.jobs(), 0);
}

#[test]
fn an_observer_is_nobody_to_dial() {
    let agent = Agent::new("dialed");
    let (tell, told) = std::sync::mpsc::channel();
    let listener = mesh_runtime::tls::Listener::bind(
        &[std::net::SocketAddr::from(([127, 0, 0, 1], 0))],
        Arc::clone(&agent.observer),
        mesh_runtime::tls::Limits::default(),
        move |event| drop(tell.send(event)),
    )
    .unwrap();
    let address = listener.addrs()[0].to_string();
    for expect in [None, Some(Role::Host), Some(Role::Controller)] {
        dial(&address, &agent.member, expect, LONG).unwrap_err();
    }
    drop(listener);
    assert!(told.iter().all(|event| !matches!(event, mesh_runtime::tls::ListenerEvent::Joined { .. })));
}

#[test]
fn garbage_is_not_answered() {
    let agent = Agent::new("garbage");
    let mut long = Look { job: 5 }.packet();
    long.body = Short::from_iter([bytes::Bytes::from_static(&[0; 9])]);
    let mut said = Packet::new(PacketKind::Said, 0);
    said.body = Short::from_iter([bytes::Bytes::from_static(b"{}\n")]);
    for packet in [long, said, Packet::new(PacketKind::Ping, 0)] {
        assert_eq!(agent.say(&agent.observer, &packet), None);
    }
    let mut stream = agent.dial(&agent.observer);
    stream.write(&[IoSlice::new(&[7; 4096])]).unwrap();
    assert_eq!(answer(&mut stream), None);
    assert!(jobs_at(&agent.address, &agent.observer, LONG).unwrap().is_empty());
}

#[test]
fn who_says_nothing_has_a_bounded_number_of_places() {
    let agent = Agent::new("places");
    let mut silent: Vec<TlsStream> = (0..32).map(|_| agent.dial(&agent.observer)).collect();
    // Places are given in the order in which connections are announced, and these were first.
    let (code, text) = refused(agent.say(&agent.observer, &Look { job: 0 }.packet()));
    assert_eq!(code, Refusal::Busy, "{text}");
    // Members have separate places.
    let join = Join { job: 5, from: 0, to: 1, incarnation: 7, expected: 1, body: bytes::Bytes::new() };
    let (code, _) = refused(agent.say(&agent.controller, &join.packet()));
    assert_eq!(code, Refusal::NoSuchJob);
    silent.clear();
    let until = Instant::now() + LONG;
    while let Err(error) = jobs_at(&agent.address, &agent.observer, LONG) {
        assert!(matches!(error, VisitError::Refused { code: Refusal::Busy, .. }), "{error}");
        assert!(Instant::now() < until, "places are not given back");
    }
}
