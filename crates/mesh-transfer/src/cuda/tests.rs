//! Copies and their failures, with a driver that the test controls.

use super::driver::{About, Device, Driver, Failure, INVALID_VALUE, IpcHandle, Rows};
use super::lanes::STEP;
use super::*;
use crate::error::ErrorKind;
use crate::handle::Handle;
use crate::segments::Segment;
use crate::transports::Peer;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Devices whose memory is `Vec`s of the test. Copies happen only when they are waited for.
#[derive(Debug, Default)]
struct Fake {
    given: Mutex<Vec<Rows>>,
    /// The number of the copy that fails.
    fails_at: Mutex<Option<usize>>,
    has_no_events: AtomicBool,
    copies: AtomicUsize,
    made: AtomicUsize,
    ended: AtomicUsize,
    has_no_pinned: AtomicBool,
    is_held: AtomicBool,
    memory: Mutex<Vec<Segment>>,
}

fn failure(code: i32) -> Failure {
    Failure { what: "do what the test says", code, text: "told so".to_owned() }
}

impl Fake {
    fn carry_out(&self) {
        for rows in lock(&self.given).drain(..) {
            for row in 0..rows.rows {
                let (to, from) = (rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch);
                // SAFETY: memory of the test, which outlives the lane.
                unsafe { std::ptr::copy(from as *const u8, to as *mut u8, rows.width as usize) };
            }
        }
    }
}

impl Driver for Fake {
    fn uuids(&self) -> &[[u8; 16]] {
        &[[1; 16], [2; 16]]
    }

    fn about(&self, addr: u64) -> Result<About, Failure> {
        let memory = lock(&self.memory);
        let found = memory.iter().position(|each| (each.addr..each.addr + each.len).contains(&addr));
        let at = found.ok_or_else(|| failure(INVALID_VALUE))?;
        Ok(About { device: at % 2, base: memory[at].addr, len: memory[at].len, id: at as u64, shareable: true })
    }

    fn share(&self, _device: Device, _base: u64) -> Result<IpcHandle, Failure> {
        Err(failure(1))
    }

    fn open(&self, _device: Device, _handle: &IpcHandle) -> Result<(u64, u64), Failure> {
        Err(failure(1))
    }

    fn close(&self, _device: Device, _base: u64) {}

    fn make_stream(&self, _device: Device) -> Result<u64, Failure> {
        self.made.fetch_add(1, Ordering::SeqCst);
        Ok(7)
    }

    fn end_stream(&self, _device: Device, _stream: u64) {
        assert!(lock(&self.given).is_empty(), "a stream ends after its work");
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    fn await_stream(&self, _device: Device, _stream: u64) -> Result<(), Failure> {
        self.carry_out();
        Ok(())
    }

    fn make_event(&self, _device: Device) -> Result<u64, Failure> {
        self.made.fetch_add(1, Ordering::SeqCst);
        Ok(8)
    }

    fn end_event(&self, _device: Device, _event: u64) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    unsafe fn copy(&self, _device: Device, _stream: u64, rows: &Rows) -> Result<(), Failure> {
        if *lock(&self.fails_at) == Some(self.copies.fetch_add(1, Ordering::SeqCst)) {
            return Err(failure(719));
        }
        lock(&self.given).push(*rows);
        Ok(())
    }

    fn record(&self, _device: Device, _event: u64, _stream: u64) -> Result<(), Failure> {
        if self.has_no_events.load(Ordering::SeqCst) { Err(failure(719)) } else { Ok(()) }
    }

    fn is_reached(&self, _device: Device, _event: u64) -> Result<bool, Failure> {
        Ok(!self.is_held.load(Ordering::SeqCst) && lock(&self.given).is_empty())
    }

    fn await_event(&self, _device: Device, _event: u64) -> Result<(), Failure> {
        self.carry_out();
        Ok(())
    }

    fn allocate_pinned(&self, _device: Device, len: u64) -> Result<u64, Failure> {
        if self.has_no_pinned.load(Ordering::SeqCst) {
            return Err(failure(2));
        }
        Ok(Box::leak(vec![0_u8; len as usize].into_boxed_slice()).as_mut_ptr() as u64)
    }

    fn free_pinned(&self, _device: Device, _addr: u64) {}

    fn dma_buf(&self, _device: Device, _addr: u64, _len: u64) -> Result<OwnedFd, Failure> {
        Err(failure(1))
    }
}

fn cuda() -> (Arc<Cuda>, Arc<Fake>) {
    let fake = Arc::new(Fake::default());
    (Cuda::with(&Realm::draw().unwrap(), Arc::clone(&fake) as Arc<dyn Driver>), fake)
}

fn on_gpu(fake: &Fake, data: &[u8]) -> Segments {
    let one = Segment { addr: data.as_ptr() as u64, len: data.len() as u64 };
    lock(&fake.memory).push(one);
    Segments::one(one.addr, one.len).within(Space::Cuda { stream: None })
}

fn handle(len: u64) -> Arc<Handle> {
    let sections = Vec::new();
    let (host, pid, slot, generation) = ("h".to_owned(), 1, 0, 1);
    let (realm, boot, token) = ([1; 16], [2; 16], [3; 16]);
    let (start, length, writable) = (0, len, true);
    Arc::new(Handle { realm, boot, pid, host, token, slot, generation, length, start, len, writable, sections })
}

/// An owner with this memory.
#[derive(Debug)]
struct There {
    memory: Mutex<Vec<u8>>,
    fails: bool,
}

impl Peer for There {
    unsafe fn run(&self, ops: &[Op], _found: &mut [u64], _watch: &Watch) -> Result<(), TransferError> {
        if self.fails {
            return Err(TransferError::transport("told so"));
        }
        for op in ops {
            let (offset, len) = op.work.span();
            let mut memory = lock(&self.memory);
            let there = &mut memory[offset as usize..(offset + len) as usize];
            let local = op.work.local().unwrap();
            assert!(!local.is_cuda(), "CUD-1");
            let [here] = local.list() else { panic!("slots are one piece") };
            // SAFETY: a slot.
            let here = unsafe { std::slice::from_raw_parts_mut(here.addr as *mut u8, len as usize) };
            match op.work {
                Work::Read { .. } => here.copy_from_slice(there),
                _ => there.copy_from_slice(here),
            }
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        true
    }

    fn is_quick(&self) -> bool {
        true
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 % 251) as u8).collect()
}

#[test]
fn nothing_is_under_way_when_a_copy_is_over_or_has_failed() {
    let (cuda, fake) = cuda();
    let (from, to) = (pattern(100), vec![0_u8; 100]);
    for fails_at in [None, Some(1)] {
        fake.copies.store(0, Ordering::SeqCst);
        *lock(&fake.fails_at) = fails_at;
        let mut lane = cuda.lane(0).unwrap();
        let rows = (0..4).map(|at| Rows::one(to.as_ptr() as u64 + 25 * at, from.as_ptr() as u64 + 25 * at, 25));
        // SAFETY: both live to the end of the test.
        let done = unsafe { lane.run(rows, &Watch::default()) };
        assert_eq!(done.is_err(), fails_at.is_some());
        assert!(lock(&fake.given).is_empty(), "CUD-5: what was begun before the failure is done");
        assert_eq!(lane.is_sound(), fails_at.is_none());
        cuda.give_lane(lane);
    }
    // The failed lane is not used again.
    assert_eq!(fake.ended.load(Ordering::SeqCst), 1 + super::lanes::MARKS);
    assert_eq!(to, from);
}

#[test]
fn work_that_cannot_be_marked_is_waited_for() {
    let (cuda, fake) = cuda();
    fake.has_no_events.store(true, Ordering::SeqCst);
    let (from, to) = (pattern(8), vec![0_u8; 8]);
    let mut lane = cuda.lane(0).unwrap();
    let rows = Rows::one(to.as_ptr() as u64, from.as_ptr() as u64, 8);
    // SAFETY: both live to the end of the test.
    let done = unsafe { lane.run(std::iter::once(rows), &Watch::default()) };
    assert_eq!(done.unwrap_err().kind, ErrorKind::Transport);
    assert!(lock(&fake.given).is_empty(), "CUD-5");
}

#[test]
fn a_long_copy_heeds_its_deadline() {
    let (cuda, fake) = cuda();
    let watch = Watch::default();
    watch.give_up();
    let mut lane = cuda.lane(0).unwrap();
    let memory = vec![0_u8; STEP as usize];
    let taken = AtomicUsize::new(0);
    let copies = (0..10).map(|_| {
        taken.fetch_add(1, Ordering::SeqCst);
        Rows::one(memory.as_ptr() as u64, memory.as_ptr() as u64, STEP)
    });
    // SAFETY: memory of this test is copied to itself.
    let done = unsafe { lane.run(copies, &watch) };
    assert_eq!(done.unwrap_err().kind, ErrorKind::Cancelled);
    assert!(taken.load(Ordering::SeqCst) < 10);
    assert!(lock(&fake.given).is_empty(), "CUD-5");
}

#[test]
fn memory_of_gpus_is_staged_for_a_peer_that_takes_none() {
    let size = (20 << 20) + 13;
    let (cuda, fake) = cuda();
    for pinned in [true, false] {
        fake.has_no_pinned.store(!pinned, Ordering::SeqCst);
        let here = vec![0_u8; size];
        let there = There { memory: Mutex::new(pattern(size)), fails: false };
        let local = on_gpu(&fake, &here);
        let handle = handle(size as u64);
        let read = Op { handle: Arc::clone(&handle), work: Work::Read { local: local.clone(), offset: 0 } };
        // SAFETY: `here` lives to the end of the turn.
        unsafe { run_staged(&cuda, &there, &[read], &mut [0], &Watch::default()) }.unwrap();
        assert_eq!(std::hint::black_box(&here), &pattern(size));
        lock(&there.memory).fill(0);
        let write = Op { handle, work: Work::Write { local, offset: 0 } };
        // SAFETY: as above.
        unsafe { run_staged(&cuda, &there, &[write], &mut [0], &Watch::default()) }.unwrap();
        assert_eq!(*lock(&there.memory), pattern(size));
        lock(&fake.memory).clear();
        lock(&cuda.slots).clear();
    }
}

#[test]
fn many_short_and_strided_ones_are_staged_together() {
    let (cuda, fake) = cuda();
    let here = vec![0_u8; 4096];
    on_gpu(&fake, &here);
    let there = There { memory: Mutex::new(pattern(2048)), fails: false };
    let handle = handle(2048);
    let ops: Vec<Op> = (0..16)
        .map(|n| {
            // Every second byte of 256.
            let strided = Segments::strided(here.as_ptr() as u64 + 256 * n, &[128], &[2], 1).unwrap();
            let local = strided.within(Space::Cuda { stream: None });
            Op { handle: Arc::clone(&handle), work: Work::Read { local, offset: 128 * n } }
        })
        .collect();
    // SAFETY: `here` lives to the end of the test.
    unsafe { run_staged(&cuda, &there, &ops, &mut [0; 16], &Watch::default()) }.unwrap();
    let even: Vec<u8> = std::hint::black_box(&here).iter().step_by(2).copied().collect();
    assert_eq!(even, pattern(2048));
    assert!(here.iter().skip(1).step_by(2).all(|byte| *byte == 0));
    assert_eq!(fake.copies.load(Ordering::SeqCst), 16, "one copy of many rows for each");
}

#[test]
fn a_peer_that_fails_leaves_nothing_under_way() {
    let (cuda, fake) = cuda();
    let here = pattern(4096);
    let local = on_gpu(&fake, &here);
    let there = There { memory: Mutex::default(), fails: true };
    let write = Op { handle: handle(4096), work: Work::Write { local, offset: 0 } };
    // SAFETY: `here` lives to the end of the test.
    let done = unsafe { run_staged(&cuda, &there, &[write], &mut [0], &Watch::default()) };
    assert_eq!(done.unwrap_err().message, "told so");
    assert!(lock(&fake.given).is_empty());
}

#[test]
fn what_is_no_memory_of_a_gpu_is_an_error_of_the_caller() {
    let (cuda, fake) = cuda();
    let (one, other) = (vec![0_u8; 64], vec![0_u8; 64]);
    let nowhere = Segments::one(4096, 8).within(Space::Cuda { stream: None });
    assert_eq!(cuda.about(&nowhere).unwrap_err().kind, ErrorKind::Invalid);
    on_gpu(&fake, &one);
    on_gpu(&fake, &other);
    let both = Segments::new([&one, &other].map(|each| Segment { addr: each.as_ptr() as u64, len: 64 })).unwrap();
    let refused = cuda.about(&both.within(Space::Cuda { stream: None })).unwrap_err();
    assert!(refused.message.contains("several GPUs"), "{refused}");
}

#[test]
fn work_that_is_queued_is_waited_for_as_long_as_there_is_time() {
    let (cuda, fake) = cuda();
    let here = [0_u8; 8];
    let memory = on_gpu(&fake, &here).within(Space::Cuda { stream: Some(9) });
    let op = Op { handle: handle(8), work: Work::Write { local: memory, offset: 0 } };
    let noted = cuda.note(&[op.clone(), op]).unwrap();
    assert_eq!(noted.len(), 1, "once for each stream");
    noted[0].wait(&Watch::default()).unwrap();
    fake.is_held.store(true, Ordering::SeqCst);
    let late = Watch::new(Some(Instant::now()));
    assert_eq!(noted[0].wait(&late).unwrap_err().kind, ErrorKind::TimedOut);
}
