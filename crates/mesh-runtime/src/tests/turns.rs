//! How the messages of an actor with a thread and a loop are divided (TURN-1), and how a loop is told.

use super::dice::Dice;
use crate::gauge::Gauge;
use crate::inbox::{Inbox, Side};
use crate::loop_waker::LoopWaker;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::wait::Waiter;
use mesh_proto::messages::{Failure, Request};
use mesh_proto::{Frame, ProcAddr};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

const ME: ProcAddr = ProcAddr { mesh: 3, rank: 1, host: 0 };
const CALLER: ProcAddr = ProcAddr { mesh: 3, rank: 2, host: 0 };
const TOKEN: u64 = 8;

fn message(name: &[u8], call: u64) -> Message {
    Message::plain(Frame::build_plain(Request::CALL.header(5, call, 0, CALLER, ME), None, name, b""))
}

fn nudge() -> Message {
    Message::plain(Frame::build_plain(Failure { owner: 5 }.header(ME, ME), None, b"", b""))
}

fn calls(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| message.meaning().call()).collect()
}

/// An inbox whose endpoint `later` is the loop's.
struct Divided {
    reactor: Reactor,
    inbox: Inbox,
    waker: Arc<LoopWaker>,
}

impl Divided {
    fn new() -> Self {
        let (reactor, waker) = (Reactor::new().unwrap(), Arc::new(LoopWaker::new().unwrap()));
        let inbox = Inbox::new(5, Gauge::new(None));
        inbox.divide([b"later".to_vec()], Arc::clone(&waker), TOKEN);
        Self { reactor, inbox, waker }
    }

    fn push(&self, name: &[u8], call: u64) {
        assert!(self.inbox.push(&self.reactor, message(name, call)));
    }

    fn take(&self, side: Side) -> Vec<u64> {
        calls(&self.inbox.lend(&self.reactor, 256, side))
    }

    fn told(&self) -> bool {
        !self.waker.drain().is_empty()
    }
}

#[test]
fn each_executor_takes_its_own_messages_when_the_other_has_come_back() {
    let all = Divided::new();
    // The constructor runs.
    [b"now" as &[u8], b"now", b"later\0gpus=2", b"now"].into_iter().zip(1..).for_each(|(name, n)| all.push(name, n));
    assert!(!all.told() && all.take(Side::Loop).is_empty());
    assert_eq!(all.take(Side::Thread), [1, 2]);
    assert!(!all.told() && all.take(Side::Loop).is_empty() && all.inbox.is_behind_loop());
    assert!(all.take(Side::Thread).is_empty());
    assert!(all.told() && !all.inbox.is_due());
    assert_eq!(all.take(Side::Loop), [3]);
    assert!(all.take(Side::Thread).is_empty() && !all.inbox.is_due(), "the loop has not come back");
    assert!(all.take(Side::Loop).is_empty());
    assert!(all.inbox.is_due() && !all.inbox.is_behind_loop());
    assert_eq!(all.take(Side::Thread), [4]);
}

#[test]
fn a_thread_that_waits_gives_up_its_turn() {
    let all = Divided::new();
    all.push(b"later", 1);
    assert!(!all.told());
    all.inbox.expect(&all.reactor);
    assert!(all.told());
    assert_eq!(all.take(Side::Loop), [1]);
}

#[test]
fn a_failure_goes_first_once_the_turn_is_over() {
    let all = Divided::new();
    assert!(all.take(Side::Thread).is_empty());
    all.push(b"later", 1);
    all.push(b"later", 2);
    assert_eq!(calls(&all.inbox.lend(&all.reactor, 1, Side::Loop)), [1]);
    assert!(all.inbox.push_first(&all.reactor, nudge()));
    assert!(!all.inbox.is_due());
    assert!(all.take(Side::Loop).is_empty());
    assert!(all.inbox.is_due());
    assert_eq!(all.take(Side::Thread).len(), 1);
    all.told();
    assert!(all.take(Side::Thread).is_empty());
    assert!(all.told());
    assert_eq!(all.take(Side::Loop), [2]);
}

#[test]
fn names_can_be_added_and_the_division_ends() {
    let all = Divided::new();
    all.push(b".late", 1);
    all.push(b".late", 2);
    assert_eq!(calls(&all.inbox.lend(&all.reactor, 1, Side::Thread)), [1]);
    all.inbox.divide([b".late".to_vec()], Arc::clone(&all.waker), TOKEN);
    assert!(all.take(Side::Thread).is_empty());
    assert!(all.told());
    all.push(b"now", 3);
    all.inbox.leave_to_loop(&all.reactor);
    // The thread, which has come back too late, gets nothing.
    assert!(!all.inbox.is_due() && all.take(Side::Thread).is_empty());
    assert_eq!(all.take(Side::Loop), [2, 3]);
    all.push(b"now", 4);
    assert!(!all.inbox.is_due() && all.take(Side::Thread).is_empty());
    assert_eq!(all.take(Side::Loop), [4]);
}

#[test]
fn a_thread_whose_task_is_taken_back_is_woken_for_the_next() {
    let all = Divided::new();
    let task = |name: &[u8], call| {
        let header = Request::TASK.header(5, call, 0, CALLER, ME);
        assert!(all.inbox.push(&all.reactor, Message::plain(Frame::build_plain(header, None, name, b""))));
    };
    let take_back = |call| all.inbox.take_back(&all.reactor, CALLER, call).is_some();
    // It waits once for a message, however often it is woken in vain.
    all.inbox.expect(&all.reactor);
    let waiter = Waiter::current();
    let is_known = || Arc::strong_count(&waiter) > 2;
    [b"now" as &[u8], b"later", b"now"].into_iter().zip(1..).for_each(|(name, n)| task(name, n));
    assert!(take_back(1) && is_known());
    assert_eq!(all.take(Side::Loop), [2]);
    // Woken by the loop, which gives its turn back.
    assert!(all.take(Side::Loop).is_empty() && all.inbox.is_due());
    assert!(take_back(3) && is_known() && !all.inbox.is_due());
    task(b"now", 4);
    assert!(all.inbox.is_due());
    assert_eq!(all.take(Side::Thread), [4]);
}

/// TURN-1, and nobody who has something to do is forgotten.
#[test]
fn random_turns_keep_the_order() {
    for seed in 0..300 {
        let (mut dice, all) = (Dice(seed), Divided::new());
        let (mut sent, mut seen, mut told) = (0_u64, Vec::new(), false);
        // What each has taken and not handled; the thread begins with the turn.
        let mut held: [(Side, Vec<u64>, bool); 2] = [(Side::Thread, vec![], true), (Side::Loop, vec![], false)];
        while sent < 60 || seen.len() < 60 {
            told |= all.told();
            let other_has_turn = |at: usize, held: &[(Side, Vec<u64>, bool); 2]| held[1 - at].2;
            match dice.roll(4_u32) {
                0 if sent < 60 => {
                    sent += 1;
                    all.push(if dice.roll(2_u32) == 0 { b"now" } else { b"later" }, sent);
                }
                roll => {
                    let at = usize::from(roll % 2 == 0);
                    let side = held[at].0;
                    if !held[at].1.is_empty() {
                        seen.push(held[at].1.remove(0));
                    } else if held[at].2 || if side == Side::Loop { told } else { all.inbox.is_due() } {
                        let got = calls(&all.inbox.lend(&all.reactor, 1 + dice.roll(5_usize), side));
                        assert!(got.is_empty() || !other_has_turn(at, &held), "seed {seed}");
                        told &= side != Side::Loop || !got.is_empty();
                        held[at].2 = !got.is_empty();
                        held[at].1 = got;
                    } else if sent == 60 {
                        told |= all.told();
                        let idle = held.iter().all(|(_, got, turn)| got.is_empty() && !turn);
                        assert!(!idle || told || all.inbox.is_due() || seen.len() == 60, "seed {seed}: forgotten");
                    }
                }
            }
        }
        assert!(seen.is_sorted(), "seed {seed}: {seen:?}");
    }
}

fn is_rung(waker: &LoopWaker) -> bool {
    // SAFETY: the waker keeps its descriptor open.
    let fd = unsafe { BorrowedFd::borrow_raw(waker.fd()) };
    rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0
}

#[test]
fn a_loop_that_looks_before_it_sleeps_needs_no_descriptor() {
    let (reactor, waker) = (Reactor::new().unwrap(), Arc::new(LoopWaker::new().unwrap()));
    waker.push(&reactor, 1);
    assert!(is_rung(&waker));
    assert!(waker.drain() == [1] && !is_rung(&waker));
    waker.wait_here(true);
    waker.wait_here(false);
    waker.push(&reactor, 2);
    assert!(waker.any() && !is_rung(&waker));
    waker.wait_outside();
    assert!(waker.drain() == [2]);
    waker.push(&reactor, 3);
    assert!(is_rung(&waker));
}

#[test]
fn a_waker_below_another_tells_that_one_once_a_burst() {
    let (reactor, above) = (Reactor::new().unwrap(), Arc::new(LoopWaker::new().unwrap()));
    let below = LoopWaker::below(&above, 9);
    for round in 0..3 {
        below.push(&reactor, round);
        below.push(&reactor, round);
        assert_eq!((above.drain(), above.any(), below.any()), (vec![9], false, true));
        assert_eq!(below.drain(), [round, round]);
        assert!(!below.any());
    }
}
