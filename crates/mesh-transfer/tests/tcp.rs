//! The owner's end of the TCP transport, facing peers that are strange, silent or rude (TCP-1..3).

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use mesh_transfer::{Engine, ErrorKind, Handle, Op, Segments, Work};
use proptest::prelude::*;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

struct Pair {
    reader: Arc<Engine>,
    handle: Arc<Handle>,
    data: Arc<Vec<u8>>,
    _owner: Arc<Engine>,
    _export: Arc<mesh_transfer::Export>,
}

fn pair() -> Pair {
    let (owner, reader) = (Engine::new(Vec::new()).unwrap(), Engine::new(Vec::new()).unwrap());
    let data = Arc::new((0..100_000_u32).map(|n| (n % 251) as u8).collect::<Vec<u8>>());
    let segments = Segments::one(data.as_ptr() as u64, data.len() as u64);
    // SAFETY: `keep` holds the data; nobody writes to it.
    let (export, handle) = unsafe { owner.export(segments, false, Box::new(Arc::clone(&data))) }.unwrap();
    Pair { reader, handle: Arc::new(handle), data, _owner: owner, _export: export }
}

impl Pair {
    fn read(&self, handle: &Arc<Handle>) -> Result<Vec<u8>, ErrorKind> {
        let copy = vec![0_u8; handle.len as usize];
        let local = Segments::one(copy.as_ptr() as u64, copy.len() as u64);
        let op = Op::new(handle, Work::Read { local, offset: 0 }).unwrap();
        // SAFETY: `copy` lives until the outcome is there.
        let operation = unsafe { self.reader.submit(([op], ()), None, Some("tcp")) };
        operation.wait().map(|_| std::hint::black_box(copy)).map_err(|error| error.kind)
    }

    fn dial(&self) -> TcpStream {
        let section = self.handle.section("tcp").unwrap();
        let port = u16::from_le_bytes([section[0], section[1]]);
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn hello(&self) -> Vec<u8> {
        [b"MXT\x01".as_slice(), &[5; 16], &self.handle.realm].concat()
    }
}

/// The number of bytes that the other end sends until it closes or breaks off.
fn rest(mut stream: &TcpStream) -> usize {
    let mut said = Vec::new();
    // A connection that was reset has ended, too.
    let _ = stream.read_to_end(&mut said);
    said.len()
}

#[test]
fn strangers_are_told_nothing_and_hold_nobody_up() {
    let pair = pair();
    for opening in [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n\r\n".to_vec(), vec![0; 36], {
        let mut wrong = pair.hello();
        wrong[35] ^= 1;
        wrong
    }] {
        let mut stream = pair.dial();
        stream.write_all(&opening).unwrap();
        assert_eq!(rest(&stream), 0);
    }
    // Says whom it wants, but cannot prove that it may.
    let mut stream = pair.dial();
    stream.write_all(&pair.hello()).unwrap();
    stream.write_all(&[0; 32]).unwrap();
    assert_eq!(rest(&stream), 48);
    // Silent clients, fewer than there are places.
    let silent: Vec<_> = (0..8).map(|_| pair.dial()).collect();
    assert_eq!(pair.read(&pair.handle).unwrap(), *pair.data);
    drop(silent);
}

/// TCP-3
#[test]
fn it_listens_on_the_loopback_interface_only() {
    let pair = pair();
    let section = pair.handle.section("tcp").unwrap();
    let port = format!(":{:04X}", u16::from_le_bytes([section[0], section[1]]));
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    // The second field is the local address, the fourth the state: 0A listens.
    let listening = tables.iter().flat_map(|table| table.lines()).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let local = fields.get(1)?.strip_suffix(port.as_str())?;
        (fields.get(3) == Some(&"0A")).then(|| local.to_owned())
    });
    let local = u32::from_ne_bytes([127, 0, 0, 1]);
    assert_eq!(listening.collect::<Vec<_>>(), [format!("{local:08X}")]);
}

#[test]
fn a_proof_cannot_be_sent_back() {
    let pair = pair();
    let mut stream = pair.dial();
    stream.write_all(&pair.hello()).unwrap();
    let mut welcome = [0; 48];
    stream.read_exact(&mut welcome).unwrap();
    stream.write_all(&welcome[16..]).unwrap();
    assert_eq!(rest(&stream), 0);
}

#[test]
fn an_owner_that_is_not_who_it_says_is_not_believed() {
    let pair = pair();
    let impostor = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut section = impostor.local_addr().unwrap().port().to_le_bytes().to_vec();
    section.extend_from_slice(&pair.handle.section("tcp").unwrap()[2..]);
    let mut forged = Handle::clone(&pair.handle);
    // The pid is a living process's, so that only the proof can tell.
    forged.sections.iter_mut().find(|each| each.name == "tcp").unwrap().data = section;
    let listening = std::thread::spawn(move || {
        let (mut stream, _) = impostor.accept().unwrap();
        let mut hello = [0; 36];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&[3; 48]).unwrap();
        // A reset is as good as a close.
        stream.read(&mut [0; 1]).unwrap_or(0)
    });
    assert_eq!(pair.read(&Arc::new(forged)), Err(ErrorKind::Gone));
    assert_eq!(listening.join().unwrap(), 0, "it was told something");
}

#[test]
fn forged_handles_are_refused() {
    let pair = pair();
    let change = |change: &dyn Fn(&mut Handle)| {
        let mut handle = Handle::clone(&pair.handle);
        change(&mut handle);
        pair.read(&Arc::new(handle)).map(drop)
    };
    assert_eq!(change(&|_| ()), Ok(()));
    assert_eq!(change(&|handle| handle.token[0] ^= 1), Err(ErrorKind::Refused));
    assert_eq!(change(&|handle| handle.slot += 1), Err(ErrorKind::Gone));
    assert_eq!(change(&|handle| handle.generation += 1), Err(ErrorKind::Gone));
    assert_eq!(change(&|handle| (handle.length, handle.len) = (100_001, 100_001)), Err(ErrorKind::Refused));
    assert_eq!(
        change(&|handle| (handle.length, handle.start) = (u64::MAX, u64::MAX - 100_000)),
        Err(ErrorKind::Refused)
    );
    // The connection works as before.
    assert_eq!(pair.read(&pair.handle).unwrap(), *pair.data);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn garbage_ends_a_connection_and_nothing_else(bytes in prop::collection::vec(any::<u8>(), 1..200), greets in any::<bool>()) {
        thread_local! {
            static PAIR: Pair = pair();
        }
        PAIR.with(|pair| {
            let mut stream = pair.dial();
            if greets {
                stream.write_all(&pair.hello()).unwrap();
            }
            // It may be closed already.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            rest(&stream);
            assert_eq!(pair.read(&pair.handle).unwrap(), *pair.data);
        });
    }
}
