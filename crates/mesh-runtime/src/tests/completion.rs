//! Completions: one outcome whoever races, with or without a runtime; lists, alarms and forked copies.

use super::{options, soon};
use crate::loop_waker::LoopWaker;
use crate::{Completion, Fate, Finisher, Runtime, Waited};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

fn runtime() -> Arc<Runtime> {
    Runtime::controller(options()).unwrap()
}

#[test]
fn every_fate_comes_out_as_it_went_in() {
    let runtime = runtime();
    let fates = [Fate::Value, Fate::Error, Fate::Cancelled, Fate::Broken];
    let fates = fates.into_iter().chain([0, 1, -1, i32::MAX, i32::MIN].map(Fate::Status));
    for fate in fates {
        let completion = runtime.completion();
        assert_eq!(completion.fate(), None);
        assert!(completion.finish(fate));
        assert_eq!(completion.fate(), Some(fate));
        assert!(!completion.finish(Fate::Value));
        assert_eq!(completion.fate(), Some(fate));
    }
    runtime.close(Duration::ZERO);
}

#[test]
fn one_wins_and_all_who_wait_are_woken() {
    let runtime = runtime();
    for _ in 0..200 {
        let completion = runtime.completion();
        let won = AtomicUsize::new(0);
        let start = Barrier::new(6);
        std::thread::scope(|scope| {
            for status in 0..3 {
                let (completion, won, start) = (&completion, &won, &start);
                scope.spawn(move || {
                    start.wait();
                    won.fetch_add(usize::from(completion.finish(Fate::Status(status))), Ordering::SeqCst);
                });
            }
            for _ in 0..3 {
                let (runtime, completion, start) = (&runtime, &completion, &start);
                scope.spawn(move || {
                    start.wait();
                    let waited = runtime.wait_completion(completion, None, soon(), false, false, None);
                    assert_eq!(waited, Waited::Ready);
                });
            }
        });
        assert_eq!(won.load(Ordering::SeqCst), 1);
    }
    runtime.close(Duration::ZERO);
}

#[test]
fn a_list_has_the_numbers_of_all_in_order_and_wakes_who_waits() {
    let runtime = runtime();
    let list = runtime.completion();
    let members: Vec<_> = (0..100).map(|_| runtime.completion()).collect();
    assert!(members[7].finish(Fate::Value));
    for (token, member) in members.iter().enumerate() {
        member.note(&list, token as u64, usize::MAX);
    }
    assert_eq!(list.token(0), Some(7));
    members[3].forget(&list);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for member in members.iter().rev() {
                member.finish(Fate::Value);
            }
        });
        for seen in 1..99 {
            let waited = runtime.wait_completion(&list, Some(seen), soon(), false, false, None);
            assert_eq!(waited, Waited::Ready);
        }
    });
    let told: Vec<_> = (0..).map_while(|n| list.token(n)).collect();
    let expected: Vec<_> = std::iter::once(7).chain((0..100).rev().filter(|n| ![3, 7].contains(n))).collect();
    assert_eq!(told, expected);
    assert!(!list.is_done());
    runtime.close(Duration::ZERO);
}

#[test]
fn a_loop_is_told_once() {
    let runtime = runtime();
    let waker = Arc::new(LoopWaker::new().unwrap());
    let completion = runtime.completion();
    completion.tell(&waker, 5, usize::MAX);
    assert!(!waker.any());
    completion.finish(Fate::Value);
    assert_eq!(waker.drain(), [5]);
    completion.tell(&waker, 6, usize::MAX);
    assert_eq!(waker.drain(), [6]);
    runtime.close(Duration::ZERO);
}

#[test]
fn the_last_finisher_breaks_what_is_not_finished() {
    let runtime = runtime();
    let (broken, kept) = (runtime.completion(), runtime.completion());
    let first = Finisher::new(&broken);
    let second = Arc::clone(&first);
    drop(first);
    assert!(!broken.is_done());
    drop(second);
    assert_eq!(broken.fate(), Some(Fate::Broken));
    let finisher = Finisher::new(&kept);
    assert!(finisher.finish(Fate::Status(0)));
    drop(finisher);
    assert_eq!(kept.fate(), Some(Fate::Status(0)));
    runtime.close(Duration::ZERO);
}

#[test]
fn it_is_finished_after_its_runtime_has_gone() {
    let runtime = runtime();
    let completion = runtime.completion();
    let finisher = Finisher::new(&completion);
    runtime.close(Duration::ZERO);
    drop(runtime);
    assert!(finisher.finish(Fate::Status(3)));
    assert_eq!(completion.fate(), Some(Fate::Status(3)));
}

#[test]
fn an_alarm_ends_the_wait() {
    let runtime = runtime();
    let completion = runtime.completion();
    let heard = runtime.alarms().heard();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| runtime.wait_completion(&completion, None, soon(), false, false, Some(heard)));
        runtime.alarm();
        assert_eq!(waiting.join().unwrap(), Waited::Alarm);
    });
    runtime.close(Duration::ZERO);
}

#[test]
fn a_forked_copy_finishes_nothing() {
    let runtime = runtime();
    let completion = runtime.completion();
    let finisher = Finisher::new(&completion);
    runtime.mark_forked();
    assert!(finisher.is_copy());
    assert!(!finisher.finish(Fate::Value));
    drop(finisher);
    assert_eq!(completion.fate(), None);
}

fn write_to(fd: &impl AsFd, bytes: &[u8]) {
    assert_eq!(rustix::io::write(fd, bytes), Ok(bytes.len()));
}

fn finished(runtime: &Runtime, completion: &Completion) -> Option<Fate> {
    assert_eq!(runtime.wait_completion(completion, None, soon(), false, false, None), Waited::Ready);
    completion.fate()
}

#[test]
fn a_status_in_pieces_comes_by_a_descriptor_and_later_bytes_are_dropped() {
    let runtime = runtime();
    let completion = runtime.completion();
    let finisher = Finisher::new(&completion);
    let fd = runtime.finish_by_descriptor(&finisher).unwrap();
    drop(finisher);
    let bytes = (-5_i32).to_ne_bytes();
    write_to(&fd, &bytes[..1]);
    write_to(&fd, &bytes[1..3]);
    assert_eq!(completion.fate(), None);
    write_to(&fd, &bytes[3..]);
    assert_eq!(finished(&runtime, &completion), Some(Fate::Status(-5)));
    // The reading end is still open.
    write_to(&fd, &[7; 64]);
    runtime.close(Duration::ZERO);
    assert_eq!(rustix::io::write(&fd, &[7]), Err(rustix::io::Errno::PIPE));
}

#[test]
fn a_descriptor_closed_too_early_breaks_the_promise() {
    let runtime = runtime();
    for sent in 0..4 {
        let completion = runtime.completion();
        let finisher = Finisher::new(&completion);
        let fd = runtime.finish_by_descriptor(&finisher).unwrap();
        write_to(&fd, &[0; 4][..sent]);
        drop(fd);
        // Even though another finisher exists.
        assert_eq!(finished(&runtime, &completion), Some(Fate::Broken));
        drop(finisher);
    }
    runtime.close(Duration::ZERO);
}

#[test]
fn the_end_of_the_runtime_reads_what_was_written_and_breaks_the_rest() {
    let runtime = runtime();
    let (said, silent) = (runtime.completion(), runtime.completion());
    let fds = [&said, &silent].map(|one| runtime.finish_by_descriptor(&Finisher::new(one)).unwrap());
    write_to(&fds[0], &9_i32.to_ne_bytes());
    runtime.close(Duration::ZERO);
    assert_eq!(said.fate(), Some(Fate::Status(9)));
    assert_eq!(silent.fate(), Some(Fate::Broken));
    assert!(runtime.finish_by_descriptor(&Finisher::new(&runtime.completion())).is_err());
}

#[test]
fn a_list_taken_from_begins_anew() {
    let runtime = runtime();
    let list = runtime.completion();
    for token in [3, 4] {
        let member = runtime.completion();
        member.note(&list, token, usize::MAX);
        member.finish(Fate::Value);
    }
    assert_eq!((list.take(), list.take()), (vec![3, 4], vec![]));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| list.wait_aside(soon()));
        let member = runtime.completion();
        member.finish(Fate::Value);
        member.note(&list, 5, usize::MAX);
        waiting.join().unwrap();
    });
    assert_eq!(list.take(), [5]);
    runtime.close(Duration::ZERO);
}
