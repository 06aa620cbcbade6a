use super::model;
use crate::shm::Holders;
use crate::sync::{AtomicU64, Ordering};
use loom::cell::UnsafeCell;
use loom::thread::spawn;
use std::sync::Arc;

/// A chunk with what is written in it, and its slab's word for an owner that sends nothing.
struct Chunk {
    word: AtomicU64,
    quiet: AtomicU64,
    data: UnsafeCell<u32>,
}

impl Chunk {
    /// One that is held by so many, in its first use.
    fn held(by: u32, quiet: bool) -> Arc<Self> {
        let chunk = Self { word: AtomicU64::new(0), quiet: AtomicU64::new(quiet.into()), data: UnsafeCell::new(7) };
        assert_eq!(chunk.holders().begin(by), 1);
        Arc::new(chunk)
    }

    fn holders(&self) -> Holders<'_> {
        Holders(&self.word)
    }

    fn write(&self, data: u32) {
        // SAFETY: loom fails the test where another reads or writes meanwhile.
        self.data.with_mut(|place| unsafe { *place = data });
    }

    fn read(&self) -> u32 {
        // SAFETY: as above.
        self.data.with(|place| unsafe { *place })
    }

    fn let_go(&self) {
        self.holders().let_go(1, &self.quiet, || self.write(0));
    }
}

/// What its owner takes again is held by nobody, whoever was the last (SHM-1).
#[test]
fn loom_an_owner_writes_only_what_nobody_reads_any_more() {
    model(3, || {
        let chunk = Chunk::held(2, false);
        let readers = [(); 2].map(|()| {
            let chunk = chunk.clone();
            spawn(move || {
                assert_eq!(chunk.read(), 7);
                chunk.let_go();
            })
        });
        if chunk.holders().are_none() {
            assert_eq!(chunk.holders().begin(1), 2);
            chunk.write(8);
            // A late word about the earlier use.
            chunk.holders().count_down(1);
            assert!(!chunk.holders().are_none());
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

/// The pages of a quiet owner's chunk are given back while nobody else has it, and the owner may use them as soon as they
/// are (SHM-4).
#[test]
fn loom_the_last_holder_gives_the_pages_back_alone() {
    model(3, || {
        let chunk = Chunk::held(2, true);
        let readers = [(); 2].map(|()| {
            let chunk = chunk.clone();
            spawn(move || {
                assert_eq!(chunk.read(), 7);
                chunk.let_go();
            })
        });
        if chunk.holders().are_none() {
            chunk.quiet.store(0, Ordering::SeqCst);
            chunk.holders().begin(1);
            chunk.write(8);
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}

/// Who is lent a chunk while its last holder lets go of it finds its bytes, or is not lent it (SHM-4).
#[test]
fn loom_what_is_lent_keeps_its_pages() {
    model(3, || {
        let chunk = Chunk::held(1, true);
        let reader = spawn({
            let chunk = chunk.clone();
            move || chunk.let_go()
        });
        if chunk.holders().lend(1) {
            assert_eq!(chunk.read(), 7, "it was lent without its bytes");
            chunk.let_go();
        }
        reader.join().unwrap();
        assert!(chunk.holders().are_none());
    });
}
