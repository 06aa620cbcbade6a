//! Shared memory: who may write when, and that all of it is returned.

use super::{SOON, procs};
use crate::buffer::Buffer;
use crate::shm::{Memory, SharedPart};
use mesh_proto::{Frame, Header, Kind, Part, Placement, ProcAddr, SharedRef, Sharing, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const KIB: usize = 1024;
const TO: ProcAddr = ProcAddr { mesh: 7, rank: 0, host: 0 };

fn memories() -> (Memory, Memory) {
    (Memory::new(64 << 20, 1000), Memory::new(64 << 20, 2000))
}

fn read(part: &SharedPart) -> &[u8] {
    // SAFETY: the part is mapped while it lives, and no test writes into it meanwhile.
    unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) }
}

fn write(part: &SharedPart, byte: u8) {
    // SAFETY: as above; the slice ends before anything else reads.
    unsafe { std::slice::from_raw_parts_mut(part.as_ptr(), part.len()) }.fill(byte);
}

#[test]
fn a_chunk_is_used_again_once_its_receiver_lets_go() {
    let (owner, receiver) = memories();
    let data = vec![1; 100 * KIB];
    let first = owner.put(&data, &Target::One(TO), 0).unwrap();
    let part = receiver.open(&first, data.len() as u64, true).unwrap();
    assert_eq!(read(&part), data);
    // SHM-1: while it is held, others get different memory.
    let mut second = Vec::new();
    for _ in 0..200 {
        let at = owner.put(&[9; 100 * KIB], &Target::One(TO), 0).unwrap();
        assert!((at.slab, at.chunk) != (first.slab, first.chunk));
        second.push(at);
    }
    assert_eq!(read(&part), data);
    drop(part);
    let bytes = owner.bytes();
    let again: Vec<SharedRef> = (0..200).map_while(|_| owner.put(&data, &Target::One(TO), 0)).collect();
    assert!(again.iter().any(|at| (at.slab, at.chunk) == (first.slab, first.chunk)), "never used again");
    assert!(owner.bytes() >= bytes);
}

#[test]
fn many_pieces_share_a_chunk_and_go_back_with_it() {
    let (owner, receiver) = memories();
    let pieces: Vec<Vec<u8>> = (0..200_u8).map(|i| vec![i; 400 + usize::from(i)]).collect();
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let buffer = Buffer::of(&pieces);
    let mut bytes = None;
    for _ in 0..100 {
        let at = owner.put_buffer(buffer, &Target::One(TO), 0).unwrap();
        let part = receiver.open(&at, buffer.len() as u64, true).unwrap();
        let whole = read(&part);
        assert!(buffer.pieces().all(|(at, piece)| whole[at..at + piece.len()] == *piece));
        drop(part);
        assert_eq!(*bytes.get_or_insert(owner.bytes()), owner.bytes(), "it is used again");
    }
}

#[test]
fn letting_go_keeps_memory_bounded() {
    let (owner, receiver) = memories();
    for round in 0..500_usize {
        let data = vec![(round % 251) as u8; 64 * KIB + round];
        let at = owner.put(&data, &Target::One(TO), 0).unwrap();
        let part = receiver.open(&at, data.len() as u64, true).unwrap();
        assert_eq!(read(&part), data);
    }
    assert!(owner.bytes() <= 16 << 20, "{} bytes for one message at a time", owner.bytes());
}

/// SHM-2.
#[test]
fn receivers_of_a_cast_do_not_see_each_others_writes() {
    let (owner, receiver) = memories();
    let target = Target::Many(7, procs(3), Placement::On(0));
    let data = vec![5; 200 * KIB];
    let at = owner.put(&data, &target, 0).unwrap();
    let parts: Vec<SharedPart> = (0..3).map(|_| receiver.open(&at, data.len() as u64, false).unwrap()).collect();
    write(&parts[0], 6);
    assert_eq!(read(&parts[1]), data);
    assert_eq!(read(&parts[0]), vec![6; 200 * KIB]);
    // The last receiver to let go frees it, not the first.
    drop(parts);
    let next = owner.put(&data, &target, 0).unwrap();
    assert_eq!(next.slab, at.slab);
    let held = receiver.open(&next, data.len() as u64, false).unwrap();
    drop(receiver.open(&next, data.len() as u64, false).unwrap());
    for _ in 0..100 {
        let other = owner.put(&[8; 200 * KIB], &Target::One(TO), 0).unwrap();
        assert!((other.slab, other.chunk) != (next.slab, next.chunk), "taken while two still hold it");
    }
    assert_eq!(read(&held), data);
}

/// SHM-3.
#[test]
fn a_message_that_is_never_opened_gives_its_memory_back() {
    let (owner, receiver) = memories();
    for side in [&owner, &receiver] {
        let at = owner.put(&[1; 100 * KIB], &Target::One(TO), 0).unwrap();
        let mut header = Header::new(Kind::Tell, TO, TO);
        header.set_sharing(Sharing { sole: true, shared: true });
        let frame = Frame::build(header, None, b"", &[Part::Shared { at, len: 100 * KIB as u64 }]);
        side.let_go(&frame);
        // A second time does no harm: it counts one use only.
        side.let_go(&frame);
    }
    for _ in 0..63 {
        let at = owner.put(&[2; 100 * KIB], &Target::One(TO), 0).unwrap();
        assert!(at.slab <= 1000, "a second slab, though the first was free");
    }
}

#[test]
fn a_late_let_go_of_an_earlier_use_touches_nothing() {
    let (owner, receiver) = memories();
    let old = owner.put(&[1; 8 << 20], &Target::One(TO), 0).unwrap();
    let stale = receiver.open(&old, 8 << 20, true).unwrap();
    // Its receiver is declared dead, and its memory used again for another.
    owner.on_death(TO, None);
    let to = ProcAddr { mesh: 7, rank: 1, host: 0 };
    let new = owner.put(&[2; 8 << 20], &Target::One(to), 0).unwrap();
    assert_eq!((new.slab, new.chunk), (old.slab, old.chunk));
    let held = receiver.open(&new, 8 << 20, true).unwrap();
    drop(stale);
    let other = owner.put(&[3; 8 << 20], &Target::One(to), 0).unwrap();
    assert_ne!(other.slab, new.slab, "the late one freed what another holds");
    assert!(read(&held).iter().all(|byte| *byte == 2));
}

#[test]
fn the_dead_lose_what_they_held_and_only_that() {
    let (owner, _) = memories();
    let target = Target::Many(7, procs(3), Placement::On(0));
    let cast = owner.put(&[1; 8 << 20], &target, 0).unwrap();
    let bytes = owner.bytes();
    for rank in [0, 2, 2, 0] {
        owner.on_death(ProcAddr { mesh: 7, rank, host: 0 }, Some(1));
    }
    let other = owner.put(&[1; 8 << 20], &Target::One(TO), 0).unwrap();
    assert_ne!(other.slab, cast.slab, "rank 1 lives, and may hold it");
    owner.on_death(ProcAddr { mesh: 8, rank: 1, host: 0 }, None);
    owner.on_death(ProcAddr { mesh: 7, rank: 1, host: 0 }, None);
    let again = owner.put(&[1; 8 << 20], &target, 0).unwrap();
    assert_eq!(again.slab, cast.slab);
    assert_eq!(owner.bytes(), 2 * bytes);
}

#[test]
fn what_was_lent_to_others_is_free_when_all_have_let_go_or_died() {
    let at_host = |rank| ProcAddr { mesh: 8, rank, host: 0 };
    let (owner, receiver) = memories();
    let len = 8 << 20;
    let part = || owner.put(&vec![1; len], &Target::One(TO), 0).unwrap();
    let first = part();
    assert!(owner.lend_to(&first, at_host(0)) && owner.lend_to(&first, at_host(1)));
    assert!(!receiver.lend_to(&first, TO), "it is not the receiver's");
    // One reads and lets go, one dies, and the last never maps it.
    drop(receiver.open(&first, len as u64, false).unwrap());
    owner.on_death(at_host(0), None);
    assert_ne!(part().slab, first.slab, "the last one holds it");
    owner.take_back(&first, at_host(1));
    assert_ne!(part().slab, first.slab, "whoever has died may have had it; whoever read it may be reading yet");
    owner.on_death(TO, None);
    assert_eq!(part().slab, first.slab);
    assert!(!owner.lend_to(&first, TO), "that use of it is over");
}

#[test]
fn a_used_up_budget_says_so_and_idle_memory_is_found_elsewhere() {
    let owner = Memory::new(4 << 20, 1);
    let receiver = Memory::new(4 << 20, 2);
    let small: Vec<SharedRef> = (0..).map_while(|_| owner.put(&[1; 64 * KIB], &Target::One(TO), 0)).collect();
    assert_eq!(small.len(), 64, "all of 4 MiB, and no more");
    assert_eq!(owner.bytes(), 4 << 20);
    assert!(owner.put(&[1; 2 << 20], &Target::One(TO), 0).is_none());
    for at in &small {
        drop(receiver.open(at, 64 * KIB as u64, true).unwrap());
    }
    // Idle chunks of another size make room.
    assert!(owner.put(&[1; 2 << 20], &Target::One(TO), 0).is_some());
    assert!(owner.bytes() <= 4 << 20);
    assert!(owner.put(&[1; 8 << 20], &Target::One(TO), 0).is_none(), "larger than the whole budget");
    assert!(owner.put(&[1; 64 * KIB], &Target::Many(7, procs(0), Placement::On(0)), 0).is_none(), "for nobody");
}

#[test]
fn trimming_gives_back_what_is_idle_beyond_what_is_worth_keeping() {
    let owner = Memory::new(usize::MAX, 1);
    let receiver = Memory::new(1 << 20, 2);
    // Sparse: the data touches only the first page of each, but they count in full.
    let chunks: Vec<SharedRef> =
        (0..5).map(|_| owner.put(&vec![0; (128 << 20) + 1], &Target::One(TO), 0).unwrap()).collect();
    let all = owner.bytes();
    owner.trim();
    assert_eq!(owner.bytes(), all, "all of it is held");
    for at in &chunks {
        receiver.let_go_of(at, 1);
    }
    owner.trim();
    assert!(owner.bytes() < all);
    assert!(owner.bytes() <= 512 << 20);
}

#[test]
fn hostile_references_are_errors() {
    let (owner, receiver) = memories();
    let at = owner.put(&[1; 100 * KIB], &Target::One(TO), 0).unwrap();
    let len = 100 * KIB as u64;
    let pid = std::process::id();
    let plain = std::fs::File::open("/proc/self/exe").unwrap();
    let plain_fd = u32::try_from(std::os::fd::AsRawFd::as_raw_fd(&plain)).unwrap();
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 1 << 20).unwrap();
    let unsealed_fd = u32::try_from(std::os::fd::AsRawFd::as_raw_fd(&unsealed)).unwrap();
    let wrong = [
        (SharedRef { pid: u32::MAX, ..at }, len),
        (SharedRef { pid: 0, ..at }, len),
        (SharedRef { fd: u32::MAX, slab: 1, ..at }, len),
        (SharedRef { fd: plain_fd, slab: 2, ..at }, len),
        (SharedRef { fd: unsealed_fd, slab: 3, ..at }, len),
        (SharedRef { slab: at.slab + 1, ..at }, len),
        (SharedRef { chunk: u32::MAX, ..at }, len),
        (SharedRef { chunk: 1020, ..at }, len),
        (SharedRef { offset: 0, ..at }, len),
        (SharedRef { offset: u64::MAX, ..at }, len),
        (SharedRef { offset: 1 << 40, ..at }, len),
        (at, u64::MAX),
        (at, 1 << 40),
    ];
    for (at, len) in wrong {
        assert_eq!(at.pid == pid, at.pid == std::process::id());
        for sole in [true, false] {
            assert!(receiver.open(&at, len, sole).is_err(), "{at:?} of {len} bytes");
        }
    }
    // A private mapping must begin at a page.
    assert!(receiver.open(&SharedRef { offset: at.offset + 1, ..at }, 10, false).is_err());
    // After all this, the real one is still there.
    assert_eq!(read(&receiver.open(&at, len, true).unwrap()), vec![1; 100 * KIB]);
}

#[test]
fn an_empty_part_needs_no_memory_of_its_own() {
    let (owner, receiver) = memories();
    let at = owner.put(&[], &Target::One(TO), 0).unwrap();
    assert!(receiver.open(&at, 0, false).unwrap().is_empty());
}

#[test]
fn many_threads_share_one_pool() {
    let (owner, receiver) = memories();
    std::thread::scope(|scope| {
        for byte in 1..=4_u8 {
            let (owner, receiver) = (&owner, &receiver);
            scope.spawn(move || {
                for round in 0..300_usize {
                    let data = vec![byte; 64 * KIB + round * 100];
                    let at = owner.put(&data, &Target::One(TO), 0).unwrap();
                    let part = receiver.open(&at, data.len() as u64, true).unwrap();
                    assert_eq!(read(&part), data, "somebody wrote into a chunk that is held");
                }
            });
        }
    });
    assert!(owner.bytes() <= 32 << 20);
}

// Unused memory is given back.

const IDLE: Duration = Duration::from_millis(1);

/// The bytes that the system has allocated for a slab, as its owner's descriptor shows them.
fn resident(at: &SharedRef) -> u64 {
    let slab = std::fs::metadata(format!("/proc/self/fd/{}", at.fd)).unwrap();
    std::os::unix::fs::MetadataExt::blocks(&slab) * 512
}

/// Takes turns until it is idle. Returns the time of the next look.
fn until_idle(memory: &Memory, idle: impl Fn() -> bool) -> Option<Instant> {
    let end = Instant::now() + SOON;
    while !idle() {
        assert!(Instant::now() < end, "it is kept");
        memory.turn();
        std::thread::yield_now();
    }
    memory.turn()
}

#[test]
fn memory_that_is_not_used_is_given_back_and_nobody_is_woken_again() {
    let (owner, receiver) = memories();
    let wakes = Arc::new(AtomicUsize::new(0));
    for memory in [&owner, &receiver] {
        let wakes = Arc::clone(&wakes);
        memory.watch(IDLE, move || {
            wakes.fetch_add(1, Ordering::SeqCst);
        });
        assert!(memory.turn().is_none(), "nothing was ever used");
    }
    for round in 1..4 {
        let parts: Vec<SharedPart> = (0..100)
            .map(|_| {
                let at = owner.put(&[round; 100 * KIB], &Target::One(TO), 0).unwrap();
                receiver.open(&at, 100 * KIB as u64, true).unwrap()
            })
            .collect();
        assert!(parts.iter().all(|part| read(part) == [round; 100 * KIB]));
        assert_eq!(wakes.load(Ordering::SeqCst), 2 * usize::from(round), "once for all that is sent");
        drop(parts);
        assert!(owner.bytes() > 10 << 20 && receiver.mapped() > 0);
        assert!(until_idle(&owner, || owner.bytes() == 0).is_none(), "there is nothing left to look for");
        assert!(until_idle(&receiver, || receiver.mapped() == 0).is_none());
    }
}

#[test]
fn what_is_held_when_its_owner_falls_idle_its_last_holder_gives_back() {
    let (owner, receiver) = memories();
    owner.watch(IDLE, || {});
    let len = 100 * KIB;
    let many = Target::Many(7, procs(2), Placement::On(0));
    let (one, cast) =
        (owner.put(&vec![1; len], &Target::One(TO), 0).unwrap(), owner.put(&vec![2; len], &many, 0).unwrap());
    assert_eq!(one.slab, cast.slab);
    let sole = receiver.open(&one, len as u64, true).unwrap();
    let [first, second] = [0; 2].map(|_| receiver.open(&cast, len as u64, false).unwrap());
    write(&first, 3);
    let before = resident(&one);
    assert!(until_idle(&owner, || owner.is_quiet()).is_some(), "it looks again, if seldom");
    assert_eq!(resident(&one), before, "all of it is held");
    drop(sole);
    let (without_one, chunk) = (resident(&one), 104 * KIB as u64);
    assert!(without_one <= before - chunk + 4096, "{before} bytes before, {without_one} after");
    drop(second);
    assert_eq!(resident(&one), without_one, "another holds it still");
    assert_eq!(read(&first), vec![3; len]);
    drop(first);
    assert!(resident(&one) <= without_one - chunk + 4096);
    // The next message finds fresh pages, which are kept again.
    let at = owner.put(&vec![4; len], &Target::One(TO), 0).unwrap();
    assert_eq!(at.slab, one.slab);
    let part = receiver.open(&at, len as u64, true).unwrap();
    assert_eq!(read(&part), vec![4; len]);
    let full = resident(&at);
    drop(part);
    assert_eq!(resident(&at), full, "its owner is at work");
    assert!(until_idle(&owner, || owner.bytes() == 0).is_none());
}

#[test]
fn what_the_dead_held_is_given_back_too() {
    let (owner, _) = memories();
    owner.watch(IDLE, || {});
    owner.put(&[1; 100 * KIB], &Target::One(TO), 0).unwrap();
    assert!(until_idle(&owner, || owner.is_quiet()).is_some());
    owner.on_death(TO, None);
    assert!(until_idle(&owner, || owner.bytes() == 0).is_none());
}

/// SHM-1 and SHM-4, with an owner that falls idle all the time.
#[test]
fn threads_send_and_let_go_while_memory_is_given_back() {
    let (owner, receiver) = memories();
    owner.watch(Duration::ZERO, || {});
    receiver.watch(Duration::ZERO, || {});
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for byte in 1..=3_u8 {
            let (owner, receiver, done) = (&owner, &receiver, &done);
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                for round in 0..400_usize {
                    let fill = byte.wrapping_mul(80).wrapping_add((round % 79) as u8);
                    let data = vec![fill; 64 * KIB + round * 10];
                    let many = round % 3 == 0;
                    let target = if many { Target::Many(7, procs(2), Placement::On(0)) } else { Target::One(TO) };
                    let at = owner.put(&data, &target, 0).unwrap();
                    for _ in 0..target.len() {
                        held.push_back((fill, receiver.open(&at, data.len() as u64, !many).unwrap()));
                    }
                    while held.len() > round % 7 {
                        let (fill, part) = held.pop_front().unwrap();
                        assert!(read(&part).iter().all(|byte| *byte == fill), "its pages are gone");
                    }
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        let (owner, receiver, done) = (&owner, &receiver, &done);
        scope.spawn(move || {
            while done.load(Ordering::SeqCst) < 3 {
                owner.turn();
                receiver.turn();
            }
        });
    });
    until_idle(&owner, || owner.bytes() == 0);
}
