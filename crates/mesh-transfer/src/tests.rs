//! Guarantees between an owner and its readers below the public API: leases, the witness page, draining.

use crate::cma::{Other, Way};
use crate::control::{Control, Leased, Offered, identity};
use crate::engine::Engine;
use crate::error::{Closing, ErrorKind, TransferError};
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::operation::Op;
use crate::operation::Work;
use crate::realm::{Realm, pid, started};
use crate::segments::Segments;
use crate::transports::shm::Shm;
use crate::transports::{Capabilities, Peer, Transport};
use crate::watch::Watch;
use crate::witness::Witness;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const OFFERED: Offered = Offered {
    token: [7; 16],
    length: 10,
    pieces_at: 0,
    pieces: 0,
    writable: true,
    one_piece: false,
    pooled: None,
    cuda: false,
};

fn control() -> Control {
    Control::create(&Realm::draw().unwrap(), 0).unwrap()
}

fn me() -> u64 {
    identity(pid(), started(pid()).unwrap())
}

/// The identity of a process that has ended.
fn dead() -> u64 {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let identity = identity(child.id(), started(child.id()).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    identity
}

fn segments(data: &[u8]) -> Segments {
    Segments::one(data.as_ptr() as u64, data.len() as u64)
}

/// LSE-1
#[test]
fn a_lease_keeps_an_export_from_being_closed_at_once_and_none_begins_after() {
    let control = control();
    control.open(3, 1, &OFFERED).unwrap();
    let lease = control.lease(me(), 3, 1).unwrap();
    assert_eq!(lease.1, OFFERED);
    assert!(control.lease(me(), 3, 2).is_err_and(|error| error.kind == ErrorKind::Gone));
    assert!(control.lease(me(), 4, 1).is_err_and(|error| error.kind == ErrorKind::Gone));
    assert!(!control.close(3, 1, Closing::Dropped));
    assert!(control.lease(me(), 3, 1).is_err());
    let seen = control.drained();
    control.set_draining(true);
    drop(lease);
    assert_ne!(control.drained(), seen);
    assert!(!control.is_leased(3, 1));
    control.open(3, 2, &OFFERED).unwrap();
    assert!(control.lease(me(), 3, 1).is_err());
    assert!(control.close(3, 2, Closing::Dropped));
}

/// LSE-4
#[test]
fn a_lease_of_all_keeps_every_export_and_shows_those_that_are_live() {
    let control = control();
    control.open(3, 1, &OFFERED).unwrap();
    control.open(4, 1, &OFFERED).unwrap();
    let lease = control.lease_every(me()).unwrap();
    assert_eq!(lease.offered(3, 1).unwrap(), OFFERED);
    assert!(!control.close(3, 1, Closing::Dropped));
    assert!(lease.offered(3, 1).is_err_and(|error| error.kind == ErrorKind::Gone));
    assert_eq!(lease.offered(4, 1).unwrap(), OFFERED);
    drop(lease);
    assert!(!control.is_leased(3, 1));
    assert!(control.close(4, 1, Closing::Dropped));
}

/// LSE-1, when both come at the same moment.
#[test]
fn either_the_reader_or_the_owner_sees_the_other() {
    race(|control, generation| control.lease(me(), 0, generation).ok().map(|(lease, _)| lease));
}

/// LSE-1, LSE-4
#[test]
fn either_the_reader_of_all_or_the_owner_sees_the_other() {
    race(|control, generation| {
        let lease = control.lease_every(me()).ok()?;
        lease.offered(0, generation).is_ok().then_some(lease)
    });
}

fn race(lease: impl Fn(&Control, u32) -> Option<Leased<'_>> + Sync) {
    let control = control();
    let alive: Vec<AtomicBool> = (0..2000).map(|_| AtomicBool::new(true)).collect();
    let (turn, read) = (AtomicU32::new(0), AtomicU32::new(0));
    control.open(0, 1, &OFFERED).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            loop {
                let at = turn.load(Ordering::Relaxed);
                if at as usize == alive.len() {
                    return;
                }
                if let Some(_lease) = lease(&control, at + 1) {
                    read.fetch_add(1, Ordering::Relaxed);
                    assert!(alive[at as usize].load(Ordering::SeqCst), "freed under a lease");
                }
            }
        });
        for (at, alive) in alive.iter().enumerate() {
            // With a single core, the other thread would otherwise never find anything live.
            while at % 200 == 0 && read.load(Ordering::Relaxed) == at as u32 / 200 && !reader.is_finished() {
                std::thread::yield_now();
            }
            if control.close(0, at as u32 + 1, Closing::Dropped) {
                alive.store(false, Ordering::SeqCst);
            }
            control.open(0, at as u32 + 2, &OFFERED).unwrap();
            turn.store(at as u32 + 1, Ordering::Relaxed);
        }
    });
}

/// LSE-2
#[test]
fn leases_of_the_dead_are_taken_back_and_those_of_the_living_are_not() {
    let control = control();
    control.open(0, 1, &OFFERED).unwrap();
    let held = control.lease(me(), 0, 1).unwrap();
    std::mem::forget(control.lease(dead(), 0, 1).unwrap());
    assert!(!control.close(0, 1, Closing::Dropped));
    assert_eq!(control.bury(), 1);
    assert!(control.is_leased(0, 1));
    drop(held);
    assert_eq!(control.bury(), 0);
    assert!(!control.is_leased(0, 1));
}

#[test]
fn when_all_leases_are_taken_the_dead_make_room() {
    let control = control();
    control.open(0, 1, &OFFERED).unwrap();
    let held: Vec<_> = (1..crate::control::LEASES).map(|_| control.lease(me(), 0, 1).unwrap()).collect();
    std::mem::forget(control.lease(dead(), 0, 1).unwrap());
    let last = control.lease(me(), 0, 1).unwrap();
    assert!(control.lease(me(), 0, 1).is_err_and(|error| error.kind == ErrorKind::Transport));
    drop((held, last));
    assert!(control.lease(me(), 0, 1).is_ok());
}

/// WIT-1
#[test]
fn without_the_witness_not_a_byte_is_moved() {
    let realm = Realm::draw().unwrap();
    let witness = Witness::raise(&realm.id, realm.pid).unwrap();
    let mut there = *b"there";
    let mut here = *b"here!";
    let other = Other { pid: pid(), witness: witness.addr(), realm: realm.id };
    other.check().unwrap();
    let carry = |other: Other, way, here: &mut [u8], there: &mut [u8]| {
        other.step(way, segments(here).window(0, 5), segments(there).window(0, 5))
    };
    // An address where another process has nothing.
    let elsewhere = Witness::raise(&realm.id, realm.pid).unwrap().addr();
    for way in [Way::Read, Way::Write] {
        let lost = Other { witness: elsewhere, ..other };
        assert_eq!(carry(lost, way, &mut here, &mut there).unwrap_err().kind, ErrorKind::Gone);
    }
    // A process with another realm.
    let stranger = Other { realm: [1; 16], ..other };
    assert_eq!(stranger.check().unwrap_err().kind, ErrorKind::Gone);
    assert_eq!((&here, &there), (b"here!", b"there"));
    carry(other, Way::Read, &mut here, &mut there).unwrap();
    assert_eq!(&here, b"there");
    carry(other, Way::Write, &mut b"again".to_owned(), &mut there).unwrap();
    assert_eq!(&there, b"again");
    other.check().unwrap();
}

#[test]
fn memory_that_is_not_there_is_an_error_of_its_own() {
    let realm = Realm::draw().unwrap();
    let witness = Witness::raise(&realm.id, realm.pid).unwrap();
    let other = Other { pid: pid(), witness: witness.addr(), realm: realm.id };
    let mut here = [0; 5];
    let gone = Segments::one(4096, 5);
    let error = other.step(Way::Read, segments(&here).window(0, 5), gone.window(0, 5)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert_eq!(std::hint::black_box(&mut here), &[0; 5]);
}

/// Sends a message when dropped.
struct Told(mpsc::Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        // The receiver may be gone.
        let _ = self.0.send(());
    }
}

/// EXP-1
#[test]
fn closed_memory_is_kept_until_its_lease_ends_and_let_go_then() {
    let realm = Realm::draw().unwrap();
    let exports = Exports::new(&realm).unwrap();
    let data = vec![0_u8; 100];
    let (told, dropped) = mpsc::channel();
    // SAFETY: `data` lives to the end of the test.
    let export = unsafe { exports.open(segments(&data), true, Box::new(Told(told))) }.unwrap();
    let reader = Control::attach(realm.pid, exports.descriptor(), &realm.id).unwrap();
    let lease = reader.lease(me(), export.slot, export.generation).unwrap();
    exports.close(&export, Closing::Dropped);
    assert!(exports.find(export.slot, export.generation, &export.token).is_err());
    drop(export);
    assert!(dropped.try_recv().is_err());
    assert_eq!(exports.counts(), (0, 1));
    drop(lease);
    dropped.recv().unwrap();
    assert_eq!(exports.counts(), (0, 0));
}

/// EXP-2
#[test]
fn memory_that_was_entrusted_to_its_owner_ends_after_those_who_work_on_it() {
    let realm = Realm::draw().unwrap();
    let exports = Exports::new(&realm).unwrap();
    let data = vec![0_u8; 100];
    let (told, dropped) = mpsc::channel();
    // SAFETY: `data` lives to the end of the test.
    let export = unsafe { exports.open(segments(&data), true, Box::new(Told(told))) }.unwrap();
    // SAFETY: as above.
    let kept = unsafe { export.entrust(None) };
    assert!(exports.is_live(&export) && dropped.try_recv().is_err());
    drop(kept);
    dropped.recv().unwrap();
    let reader = Control::attach(realm.pid, exports.descriptor(), &realm.id).unwrap();
    let lease = reader.lease(me(), export.slot, export.generation).unwrap();
    let ending = export.ending();
    exports.close(&export, Closing::Freed);
    let (slot, generation, token) = (export.slot, export.generation, export.token);
    let working = Arc::clone(&export);
    drop(export);
    assert!(!ending.wait(Some(Duration::ZERO)));
    drop(working);
    assert!(!ending.wait(Some(Duration::from_millis(1))));
    drop(lease);
    assert!(ending.wait(None));
    // What is told of it, until its place is used again.
    let why = |error: TransferError| error.message;
    let said = exports.find(slot, generation, &token).map_err(why).unwrap_err();
    assert!(said.contains("has let go"), "{said}");
    assert_eq!(reader.lease(me(), slot, generation).map(drop).map_err(why).unwrap_err(), said);
    let said = exports.find(slot, generation + 1, &token).map_err(why).unwrap_err();
    assert!(said.contains("dropped by its owner, or"), "{said}");
}

#[test]
fn closed_memory_is_let_go_when_its_reader_has_died() {
    let realm = Realm::draw().unwrap();
    let exports = Exports::new(&realm).unwrap();
    let data = vec![0_u8; 100];
    let (told, dropped) = mpsc::channel();
    // SAFETY: `data` lives to the end of the test.
    let export = unsafe { exports.open(segments(&data), true, Box::new(Told(told))) }.unwrap();
    let reader = Control::attach(realm.pid, exports.descriptor(), &realm.id).unwrap();
    std::mem::forget(reader.lease(dead(), export.slot, export.generation).unwrap());
    exports.close(&export, Closing::Dropped);
    drop(export);
    dropped.recv().unwrap();
}

#[test]
fn a_page_of_another_incarnation_is_not_attached() {
    let realm = Realm::draw().unwrap();
    let exports = Exports::new(&realm).unwrap();
    let other = Realm::draw().unwrap();
    let attach = |pid, fd, id| Control::attach(pid, fd, id).map(drop).map_err(|error| error.kind);
    assert_eq!(attach(realm.pid, exports.descriptor(), &realm.id), Ok(()));
    assert_eq!(attach(realm.pid, exports.descriptor(), &other.id), Err(ErrorKind::Gone));
    assert_eq!(attach(realm.pid, 0, &realm.id), Err(ErrorKind::Gone));
    assert_eq!(attach(realm.pid, u32::MAX, &realm.id), Err(ErrorKind::Gone));
    // A file of the same name that is no such page.
    let fake = rustix::fs::memfd_create("mesh-transfer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let number = u32::try_from(std::os::fd::AsRawFd::as_raw_fd(&fake)).unwrap();
    assert_eq!(attach(realm.pid, number, &realm.id), Err(ErrorKind::Gone));
}

#[test]
fn places_are_used_again_under_another_generation() {
    let realm = Realm::draw().unwrap();
    let exports = Exports::new(&realm).unwrap();
    let data = [0_u8; 8];
    let mut last = None;
    for _ in 0..3 {
        // SAFETY: `data` lives to the end of the test.
        let export = unsafe { exports.open(segments(&data), true, Box::new(())) }.unwrap();
        if let Some((slot, generation, token)) = last {
            assert_eq!((export.slot, export.generation), (slot, generation + 1));
            assert!(exports.find(slot, generation, &token).is_err());
        }
        last = Some((export.slot, export.generation, export.token));
        exports.close(&export, Closing::Dropped);
        exports.close(&Arc::clone(&export), Closing::Dropped);
    }
    let forged = exports.find(0, 9, &[0; 16]).unwrap_err();
    assert_eq!(forged.kind, ErrorKind::Gone);
}

/// A transport that works only while told to.
#[derive(Debug)]
struct Moody {
    name: &'static str,
    inner: Shm,
    works: Arc<AtomicBool>,
    used: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct MoodyPeer(Arc<dyn Peer>, Arc<AtomicBool>, Arc<AtomicUsize>);

impl Transport for Moody {
    fn name(&self) -> &str {
        self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn probe(&self) -> Result<(), TransferError> {
        Ok(())
    }

    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        self.inner.offer(exports, export)
    }

    fn connect(&self, handle: &Handle, section: &[u8], watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let peer = self.inner.connect(handle, section, watch)?;
        Ok(Arc::new(MoodyPeer(peer, Arc::clone(&self.works), Arc::clone(&self.used))))
    }
}

impl Peer for MoodyPeer {
    unsafe fn run(&self, ops: &[Op], found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        if !self.1.load(Ordering::SeqCst) {
            return Err(TransferError::transport("the device has gone away"));
        }
        self.2.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as the caller vouches.
        unsafe { self.0.run(ops, found, watch) }
    }

    fn is_alive(&self) -> bool {
        self.0.is_alive()
    }

    fn is_quick(&self) -> bool {
        true
    }
}

#[test]
fn another_transport_takes_over_in_mid_life_and_a_failed_one_is_tried_where_there_is_no_other() {
    let moods: Vec<_> = (0..2).map(|_| (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)))).collect();
    let realm = Realm::draw().unwrap();
    let transports = ["first", "second"].iter().zip(&moods).map(|(name, (works, used))| -> Arc<dyn Transport> {
        let (works, used) = (Arc::clone(works), Arc::clone(used));
        Arc::new(Moody { name, inner: Shm::new(&realm), works, used })
    });
    let engine = Engine::with(realm.clone(), transports.collect()).unwrap();
    let data = b"memory".to_vec();
    // SAFETY: `data` lives to the end of the test.
    let (export, handle) = unsafe { engine.export(segments(&data), false, Box::new(())) }.unwrap();
    let handle = Arc::new(handle);
    let read = || {
        let copy = vec![0_u8; 6];
        let op = Op::new(&handle, Work::Read { local: segments(&copy), offset: 0 }).unwrap();
        // SAFETY: `copy` lives until the outcome is there.
        let operation = unsafe { engine.submit(([op], ()), None, None) };
        operation.wait().map(|_| assert_eq!(std::hint::black_box(copy), data))
    };
    let used = || [moods[0].1.load(Ordering::SeqCst), moods[1].1.load(Ordering::SeqCst)];
    read().unwrap();
    read().unwrap();
    assert_eq!(used(), [2, 0]);
    moods[0].0.store(false, Ordering::SeqCst);
    read().unwrap();
    read().unwrap();
    assert_eq!(used(), [2, 2]);
    let need = crate::choice::Need { copies: true, atomics: false };
    let choice = engine.explain(&handle, need, None);
    assert_eq!(choice.candidates, ["second"]);
    assert_eq!(choice.passed, [("first".to_owned(), "the device has gone away".to_owned())]);
    moods[1].0.store(false, Ordering::SeqCst);
    let error = read().unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoTransport);
    assert!(error.message.contains("second: the device has gone away"), "{error}");
    moods[1].0.store(true, Ordering::SeqCst);
    read().unwrap();
    assert_eq!(engine.owners(), 1);
    // A dropped export is gone, but its living owner is remembered.
    engine.close(&export, Closing::Dropped, true);
    assert_eq!(read().unwrap_err().kind, ErrorKind::Gone);
    assert_eq!(engine.owners(), 1);
}

#[test]
fn one_from_outside_stands_in_the_place_of_a_native_one_of_its_name() {
    let (works, used) = (Arc::new(AtomicBool::new(true)), Arc::default());
    let outside = Moody { name: "tcp", inner: Shm::new(&Realm::draw().unwrap()), works, used };
    let engine = Engine::new(vec![Arc::new(outside)]).unwrap();
    let standing = engine.transports();
    let named: Vec<_> = standing.iter().filter(|each| each.name == "tcp").collect();
    assert_eq!(named.len(), 1);
    assert!(named[0].capabilities.one_sided, "it is the native one");
}
