//! Who is admitted, and what everybody else costs.

use super::*;
use rustls::crypto::ring;
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn members_of_either_role_are_let_in_and_known() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    for identity in [&job.controller, &job.host] {
        let dialed = door.dial(identity, Some(Role::Host)).unwrap();
        assert_eq!(dialed.peer, job.host.own());
        assert_eq!(door.joined().1, identity.own());
    }
    let any = door.dial(&job.controller, None).unwrap();
    assert_eq!(any.peer.role, Role::Host);
}

/// What both sides say about a refused client.
fn refusal(door: &Door, identity: &Identity) -> (Reason, Reason) {
    let reason = match door.dial(identity, Some(Role::Host)).unwrap_err() {
        DialError::NotAuthenticated { reason, .. } => reason,
        other => panic!("{other}"),
    };
    (door.refused(), reason)
}

fn refused_us(reason: &Reason) -> &str {
    match reason {
        Reason::RefusedUs(why) => why,
        other => panic!("{other}"),
    }
}

/// TLS-1.
#[test]
fn an_expired_client_is_refused_and_both_sides_say_so() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let late = job.member(Role::Controller, WEEK, WEEK - Duration::from_secs(60));
    let (ours, theirs) = refusal(&door, &late);
    assert_eq!(ours, Reason::Expired);
    assert!(refused_us(&theirs).contains("expired"), "{theirs}");
}

/// As when this side's clock was set back, or is slow.
#[test]
fn a_certificate_from_tomorrow_is_refused() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let early = job.member_from(Role::Controller, SystemTime::now() + Duration::from_secs(24 * 3600), WEEK);
    let (ours, _) = refusal(&door, &early);
    assert_eq!(ours, Reason::NotYet);
}

#[test]
fn an_expired_server_is_not_talked_to() {
    let job = Job::new();
    let late = job.member(Role::Host, WEEK, WEEK - Duration::from_secs(60));
    let door = Door::open(&late, Limits::default());
    let (ours, theirs) = refusal(&door, &job.controller);
    assert_eq!(theirs, Reason::Expired);
    assert!(refused_us(&ours).contains("expired"), "{ours}");
}

/// TLS-1.
#[test]
fn a_revoked_client_is_refused_by_whoever_has_the_list() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    job.store.revoke(&job.controller.own().serial).unwrap();
    assert!(job.host.reload_if_changed().unwrap());
    let (ours, theirs) = refusal(&door, &job.controller);
    assert_eq!(ours, Reason::Revoked);
    assert!(refused_us(&theirs).contains("revoked"), "{theirs}");
    assert!(!job.host.reload_if_changed().unwrap());
}

#[test]
fn a_revoked_server_is_not_talked_to() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    job.store.revoke(&job.host.own().fingerprint).unwrap();
    assert!(job.controller.reload_if_changed().unwrap());
    let (ours, theirs) = refusal(&door, &job.controller);
    assert_eq!(theirs, Reason::Revoked);
    assert!(refused_us(&ours).contains("revoked"), "{ours}");
}

#[test]
fn every_connection_shows_its_certificate_anew() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let (config, name) = job.controller.client(None).unwrap();
    let mut config = (*config).clone();
    // A client that tries to resume an earlier connection.
    config.resumption = rustls::client::Resumption::in_memory_sessions(8);
    let config = Arc::new(config);
    for _ in 0..2 {
        let mut socket = TcpStream::connect(door.addr()).unwrap();
        let mut client = rustls::ClientConnection::new(Arc::clone(&config), name.clone()).unwrap();
        let mut greeting = [0; 6];
        rustls::Stream::new(&mut client, &mut socket).read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"mesh/1");
        assert_eq!(client.handshake_kind(), Some(rustls::HandshakeKind::Full));
        assert_eq!(client.tls13_tickets_received(), 0);
        door.joined();
    }
}

#[test]
fn a_hello_that_comes_byte_by_byte_is_one_and_names_nobody() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let (config, name) = job.controller.client(None).unwrap();
    let mut socket = TcpStream::connect(door.addr()).unwrap();
    socket.set_nodelay(true).unwrap();
    let mut client = rustls::ClientConnection::new(config, name).unwrap();
    let mut hello = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut hello).unwrap();
    }
    assert!(!hello.windows(4).any(|four| four == b"mesh"), "the hello tells whom it wants");
    for byte in hello {
        socket.write_all(&[byte]).unwrap();
    }
    rustls::Stream::new(&mut client, &mut socket).read_exact(&mut [0; 6]).unwrap();
    assert_eq!(door.joined().1, job.controller.own());
}

/// TLS-1.
#[test]
fn another_jobs_members_are_strangers_in_both_directions() {
    let (job, other) = (Job::new(), Job::new());
    let door = Door::open(&job.host, Limits::default());
    // The client checks first, and shows its own certificate to no stranger.
    let (ours, theirs) = refusal(&door, &other.controller);
    assert_eq!(theirs, Reason::OtherJob);
    assert!(matches!(ours, Reason::RefusedUs(_)), "{ours}");
}

#[test]
fn a_client_that_does_not_mind_is_refused_by_the_server() {
    // Another authority's key, with this job's `ca.pem`: a stranger that has seen a host's certificate.
    let (job, other) = (Job::new(), Job::new());
    let dir = job.folder.join("forged");
    files::make_dir(&dir).unwrap();
    for name in ["controller.pem", "controller.key"] {
        std::fs::copy(other.store.dir().join(name), dir.join(name)).unwrap();
    }
    for name in ["ca.pem", "crl.pem"] {
        std::fs::copy(job.store.dir().join(name), dir.join(name)).unwrap();
    }
    let refused = Identity::load(&dir).unwrap_err().to_string();
    assert!(refused.contains("not signed by the authority in ca.pem"), "{refused}");
    let forged = Identity::load_unchecked(&dir, Role::Controller);
    let door = Door::open(&job.host, Limits::default());
    // It believes a server only under its own job's name, so it is made to accept any.
    let (mut config, _) = forged.client(None).map(|(config, name)| ((*config).clone(), name)).unwrap();
    config.dangerous().set_certificate_verifier(Arc::new(AnyServer));
    assert_eq!(raw_client(&door, config), Reason::OtherJob);
}

/// TLS-1.
#[test]
fn a_client_without_a_certificate_is_refused() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let config = rustls::ClientConfig::builder_with_provider(provider::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer))
        .with_no_client_auth();
    assert_eq!(raw_client(&door, config), Reason::NoCertificate);
}

#[test]
fn a_host_is_not_taken_for_a_controller() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let error = door.dial(&job.host, Some(Role::Controller)).unwrap_err();
    let DialError::NotAuthenticated { reason, .. } = error else { panic!("{error}") };
    assert_eq!(reason, Reason::WrongRole { found: Role::Host, expected: Role::Controller });
    assert!(matches!(door.refused(), Reason::RefusedUs(_)));
}

/// Accepts every server's certificate, as an attacker's client would.
#[derive(Debug)]
struct AnyServer;

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Connects with plain rustls. Returns why the door refused. The client never reads application data.
fn raw_client(door: &Door, config: rustls::ClientConfig) -> Reason {
    let mut socket = TcpStream::connect(door.addr()).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let name = rustls::pki_types::ServerName::try_from("anybody").unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut told = Vec::new();
    let end = rustls::Stream::new(&mut client, &mut socket).read_to_end(&mut told);
    assert!(end.is_err(), "it was let in");
    assert_eq!(told, b"", "a stranger was told something");
    door.refused()
}

/// A hello record that offers only TLS 1.2, like an old client's.
fn old_hello() -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
    // supported_groups: x25519; signature_algorithms: ECDSA with P-256; no supported_versions.
    let extensions = [0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 4, 0, 2, 4, 3];
    body.extend([0, extensions.len() as u8]);
    body.extend(extensions);
    let mut record = vec![22, 3, 1, 0, body.len() as u8 + 4, 1, 0, 0, body.len() as u8];
    record.extend(body);
    record
}

/// TLS-3: a stranger is told nothing but an alert.
#[test]
fn other_protocols_are_refused_with_an_alert_at_most() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    for hello in [
        b"GET / HTTP/1.1\r\nHost: mesh\r\n\r\n".to_vec(),
        old_hello(),
        vec![0; 64],
        vec![22, 3, 1, 0xff, 0xff, 1],
        vec![23, 3, 3, 0, 5, 1, 2, 3, 4, 5],
        // A plaintext alert before anything else.
        vec![21, 3, 3, 0, 2, 2, 40],
    ] {
        let mut socket = TcpStream::connect(door.addr()).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket.write_all(&hello).unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        // No bytes, or the seven of one alert.
        assert!(answer.is_empty() || (answer.len() == 7 && answer[0] == 21), "{answer:?} for {hello:?}");
        let reason = door.refused();
        assert!(reason.may_be_damage(), "{reason:?} for {hello:?}");
    }
}

/// TLS-3: a stranger costs a bounded time.
#[test]
fn whoever_says_nothing_or_leaves_is_let_go() {
    let job = Job::new();
    let deadline = Duration::from_millis(50);
    let door = Door::open(&job.host, Limits { deadline, ..Limits::default() });
    let mut silent = TcpStream::connect(door.addr()).unwrap();
    assert_eq!(door.refused(), Reason::TooSlow(deadline));
    assert_eq!(silent.read(&mut [0; 8]).unwrap_or(0), 0, "it was told something");
    // Half a hello, forever.
    let mut half = TcpStream::connect(door.addr()).unwrap();
    half.write_all(&old_hello()[..20]).unwrap();
    assert_eq!(door.refused(), Reason::TooSlow(deadline));
    let patient = Door::open(&job.host, Limits { deadline: LONG, ..Limits::default() });
    drop(TcpStream::connect(patient.addr()).unwrap());
    assert_eq!(patient.refused(), Reason::Left);
}

/// TLS-3: and a bounded number of bytes.
#[test]
fn nobody_sends_more_than_a_handshake_before_proving_who_they_are() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let mut socket = TcpStream::connect(door.addr()).unwrap();
    // A handshake message that never ends, in full records.
    let mut record = vec![22, 3, 1, 0x40, 0];
    record.extend([0; 16 * 1024]);
    record[5..9].copy_from_slice(&[1, 0, 0xff, 0xff]);
    while socket.write_all(&record).is_ok() {}
    let reason = door.refused();
    assert!(matches!(reason, Reason::TooMuch(MOST_HANDSHAKE) | Reason::NotTls(_)), "{reason:?}");
}

#[test]
fn a_flood_takes_places_from_itself_and_not_from_members() {
    let job = Job::new();
    let limits = Limits { places: 8, told: 1000, ..Limits::default() };
    let door = Door::open(&job.host, limits);
    let mut crowd = Vec::new();
    for i in 0..8 {
        let mut socket = TcpStream::connect(door.addr()).unwrap();
        // Every other one looks like the start of a handshake.
        if i % 2 == 0 {
            socket.write_all(&old_hello()[..20]).unwrap();
        }
        crowd.push(socket);
    }
    let dialed = door.dial(&job.controller, None).unwrap();
    assert_eq!(dialed.peer, job.host.own());
    match door.told.recv_timeout(LONG).unwrap() {
        // One of those that had sent nothing.
        ListenerEvent::Refused { reason: Reason::Crowded(7), addr, .. } => {
            let at = crowd.iter().position(|socket| socket.local_addr().unwrap() == addr).unwrap();
            assert_eq!(at % 2, 1);
        }
        other => panic!("{other:?}"),
    }
    door.joined();
}

#[test]
fn each_of_a_thousand_garbage_connections_is_let_go_and_members_get_in() {
    let job = Job::new();
    let limits = Limits { deadline: Duration::from_secs(2), told: 2000, ..Limits::default() };
    let door = Door::open(&job.host, limits);
    let mut seed = 0x5eed_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut open = Vec::new();
    for i in 0..1000_u64 {
        let mut socket = TcpStream::connect(door.addr()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let bytes: Vec<u8> = match i % 4 {
            0 => (0..random() % 600).map(|_| random().to_le_bytes()[0]).collect(),
            1 => old_hello()[..usize::try_from(random() % 40).unwrap()].to_vec(),
            2 => vec![22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xf0, 3, 3],
            _ => Vec::new(),
        };
        let _ = socket.write_all(&bytes);
        if i % 3 == 0 {
            open.push(socket);
        }
        if i % 100 == 99 {
            door.dial(&job.controller, None).expect("a member is let in meanwhile");
        }
    }
    // Idle ones are dropped as well. All are reported, and each descriptor is closed with its report.
    let (mut joined, mut refused) = (0, 0);
    while joined < 10 || refused < 1000 {
        match door.told.recv_timeout(LONG).unwrap() {
            ListenerEvent::Joined { .. } => joined += 1,
            ListenerEvent::Refused { reason, .. } => {
                assert!(!matches!(reason, Reason::Broke(_)), "{reason}");
                refused += 1;
            }
            ListenerEvent::Stuck { errno } => panic!("{errno}"),
        }
    }
    assert_eq!((joined, refused), (10, 1000));
    drop(open);
}

#[test]
fn refusals_are_told_in_moderation() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits { told: 2, ..Limits::default() });
    for _ in 0..50 {
        let mut socket = TcpStream::connect(door.addr()).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    }
    door.dial(&job.controller, None).unwrap();
    let mut told = 0;
    loop {
        match door.told.recv_timeout(LONG).unwrap() {
            ListenerEvent::Refused { .. } => told += 1,
            ListenerEvent::Joined { .. } => break,
            ListenerEvent::Stuck { errno } => panic!("{errno}"),
        }
    }
    // Two, and one for each second that this took.
    assert!((2..20).contains(&told), "{told}");
}

#[test]
fn a_closed_door_tells_nothing_and_refuses() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let waiting = TcpStream::connect(door.addr()).unwrap();
    door.listener.close();
    assert!(matches!(door.told.recv(), Err(mpsc::RecvError)));
    assert!(matches!(door.dial(&job.controller, None), Err(DialError::Refused { .. })));
    drop(waiting);
}

#[test]
fn addresses_that_cannot_be_had_are_named() {
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let bind =
        |addr: SocketAddr| Listener::bind(&[addr], Arc::clone(&job.host), Limits::default(), |_| {}).unwrap_err();
    assert!(matches!(bind(door.addr()), ListenError::InUse { .. }));
    assert!(matches!(bind(SocketAddr::from(([192, 0, 2, 1], 0))), ListenError::NotHere { .. }));
}

#[test]
fn dialing_tells_apart_what_is_in_the_way() {
    let job = Job::new();
    // A port that nobody listens at any more.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = dial(&gone.to_string(), &job.controller, None, LONG).unwrap_err();
    assert!(matches!(refused, DialError::Refused { .. }), "{refused}");
    // A server that accepts and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let late = dial(&addr, &job.controller, None, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(late, DialError::TimedOut { stage: "waiting for its handshake", .. }), "{late}");
    // A server with another protocol.
    let server = std::thread::spawn(move || {
        // The previous connection is still in the backlog.
        let _first = silent.accept().unwrap();
        let (mut socket, _) = silent.accept().unwrap();
        socket.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let _ = socket.read(&mut [0; 512]);
        socket
    });
    let other = dial(&addr, &job.controller, None, LONG).unwrap_err();
    assert!(matches!(other, DialError::NotAuthenticated { reason: Reason::NotTls(_), .. }), "{other}");
    server.join().unwrap();
    let unknown = dial("no-such-host.invalid:1", &job.controller, None, LONG).unwrap_err();
    assert!(matches!(unknown, DialError::Unresolved { .. } | DialError::TimedOut { .. }), "{unknown}");
}

#[test]
fn both_families_are_listened_at() {
    let job = Job::new();
    let addrs = [SocketAddr::from(([127, 0, 0, 1], 0)), SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 0))];
    let (tell, told) = mpsc::channel();
    let bound =
        Listener::bind(&addrs, Arc::clone(&job.host), Limits::default(), move |event| tell.send(event).unwrap());
    let listener = match bound {
        Ok(listener) => listener,
        Err(ListenError::NotHere { .. } | ListenError::Io { .. }) => return, // No IPv6 on this machine.
        Err(error) => panic!("{error}"),
    };
    for addr in listener.addrs() {
        dial(&format!("tcp://{addr}"), &job.controller, None, LONG).unwrap();
        assert!(matches!(told.recv_timeout(LONG).unwrap(), ListenerEvent::Joined { .. }));
    }
    // All addresses of a name are tried.
    let port = listener.addrs()[0].port();
    dial(&format!("localhost:{port}"), &job.controller, None, LONG).unwrap();
}
