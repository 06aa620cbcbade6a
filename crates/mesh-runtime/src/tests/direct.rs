//! Direct links between procs of a host: what is taken before what.

use super::order::{LISTENER, listeners, next, one, soon};
use super::pair::{Host, MESH, out};
use super::{SOON, options};
use crate::{Options, Outgoing, Runtime};
use mesh_proto::control::Down;
use mesh_proto::messages::Request;
use mesh_proto::{EndReason, Ended, Kind, ProcAddr};
use std::sync::Arc;
use std::time::Instant;

fn say(from: &Runtime, rank: usize, text: &[u8]) {
    from.tell(&Outgoing { actor: LISTENER, ..out(Request::CALL, &one(rank), text, &[]) }).unwrap();
}

/// Two workers, the first of which has talked to the second until it has a direct link to it. Its messages are taken.
fn linked(options: Options) -> (Host, Arc<crate::Inbox>) {
    let host = Host::new(2, options);
    let inbox = listeners(&host).pop().unwrap();
    let from = &host.workers[0].0;
    let until = Instant::now() + SOON;
    // The second link is there once the message by way of the agent that says so was sent.
    while from.switch.link_of(ProcAddr { mesh: MESH, rank: 1, host: 0 }).is_none_or(|link| link.id == 0) {
        assert!(Instant::now() < until, "there is no direct link");
        say(from, 1, b"talk");
        assert_eq!(next(&inbox).1, b"talk");
    }
    (host, inbox)
}

/// DIR-4. Each of three senders comes first, and the sockets become ready in each order.
#[test]
fn causes_are_taken_before_effects_whoever_sends_them() {
    let host = Host::new(3, options());
    let inbox = listeners(&host).pop().unwrap();
    let to = &host.workers[2].0;
    let senders = [&host.controller, &host.workers[0].0, &host.workers[1].0];
    let is_linked = |from: &Runtime| from.switch.link_of(to.me).is_some_and(|link| link.id != 0);
    for from in &senders[1..] {
        let until = Instant::now() + SOON;
        while !is_linked(from) {
            assert!(Instant::now() < until, "there is no direct link");
            say(from, 2, b"talk");
            assert_eq!(next(&inbox).1, b"talk");
        }
        // Once this has come, the link is read.
        say(from, 2, b"talk");
        assert_eq!(next(&inbox).1, b"talk");
    }
    for turn in 0..60 {
        let order = [turn % 3, (turn + 1 + turn / 3 % 2) % 3, (turn + 2 - turn / 3 % 2) % 3];
        let stalled = to.reactor.stall();
        // The socket of the last is ready first.
        order.iter().rev().for_each(|at| say(senders[*at], 2, b"early"));
        (0..9_u8).for_each(|n| say(senders[order[usize::from(n) % 3]], 2, &[n]));
        drop(stalled);
        let heard: Vec<Vec<u8>> = (0..12).map(|_| next(&inbox).1).collect();
        assert_eq!(heard[..3], [b"early"; 3].map(|word| word.to_vec()));
        assert_eq!(heard[3..], (0..9).map(|n| vec![n]).collect::<Vec<_>>());
    }
    drop(inbox);
    host.close();
}

#[test]
fn what_a_proc_wrote_before_its_end_is_taken_before_the_notice() {
    let (host, inbox) = linked(options());
    let (from, to) = (host.workers[0].0.me, &host.workers[1].0);
    let notices = to.system_inbox();
    let stalled = to.reactor.stall();
    // So that the link to the agent is ready first.
    say(&host.controller, 1, &[100]);
    (0..100_u8).for_each(|n| say(&host.workers[0].0, 1, &[n]));
    let ended = Ended::unmade(EndReason::ConnectionClosed(0));
    host.controller.dispatch(Down::notice(from, &ended).frame(ProcAddr::CONTROLLER, to.me), None);
    drop(stalled);
    soon(|| notices.take(9).into_iter().find(|notice| notice.header().kind == Kind::Down));
    let heard: Vec<u8> = inbox.take(200).iter().map(|message| message.open().unwrap().0[0]).collect();
    assert_eq!(heard, [100].into_iter().chain(0..100).collect::<Vec<_>>());
    // The link has gone with it.
    assert_eq!(to.counts().links, 1);
    drop(inbox);
    host.close();
}

#[test]
fn links_give_way_to_others_and_nothing_is_lost_meanwhile() {
    let host = Host::new(4, Options { direct_links: 1, ..options() });
    let inboxes = listeners(&host);
    let from = &host.workers[0].0;
    let (mut sent, until) = ([0_u32; 4], Instant::now() + SOON);
    for turn in 0..4 {
        let rank = 1 + turn % 3;
        let addr = ProcAddr { mesh: MESH, rank, host: 0 };
        while from.switch.link_of(addr).is_none_or(|link| link.id == 0) {
            assert!(Instant::now() < until, "there is no direct link to {rank}");
            let word = sent[rank as usize];
            say(from, rank as usize, &word.to_le_bytes());
            assert_eq!(next(&inboxes[rank as usize]).1, word.to_le_bytes());
            sent[rank as usize] += 1;
        }
        assert!(from.counts().links <= 3, "one to the agent, one, and one that ends");
    }
    let links = || host.workers.iter().map(|(worker, _)| worker.counts().links).sum::<usize>();
    soon(|| (links() == 4 + 2).then_some(()));
    drop(inboxes);
    host.close();
}

#[test]
fn a_proc_that_wants_none_gets_none() {
    let host = Host::new(2, Options { direct_links: 0, ..options() });
    let inbox = listeners(&host).pop().unwrap();
    for _ in 0..200 {
        say(&host.workers[0].0, 1, b"talk");
        assert_eq!(next(&inbox).1, b"talk");
    }
    assert!(host.workers.iter().all(|(worker, _)| worker.counts().links == 1));
    drop(inbox);
    host.close();
}
