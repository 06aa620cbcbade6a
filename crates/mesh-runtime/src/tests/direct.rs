//! Direct links between procs of a host: what is taken before what.

use super::order::{LISTENER, listeners, next, one, soon};
use super::pair::{Host, MESH, out};
use super::{SOON, options};
use crate::link::socket_number;
use crate::link_page::{End, LinkPage};
use crate::{Options, Outgoing, Runtime};
use mesh_proto::control::{Direct, Down};
use mesh_proto::messages::Request;
use mesh_proto::{EndReason, Ended, Kind, LinkId, Placement, ProcAddr, Target};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

fn at(rank: u32) -> ProcAddr {
    ProcAddr { mesh: MESH, rank, host: 0 }
}

fn has_link(from: &Runtime, to: u32) -> bool {
    // The link to the agent is the first.
    from.switch.link_of(at(to)).is_some_and(|link| link.id != 0)
}

/// Has a worker talk to another until it has a direct link to it.
fn link(host: &Host, inboxes: &[Arc<crate::Inbox>], from: usize, to: u32) {
    let until = Instant::now() + SOON;
    while !has_link(&host.workers[from].0, to) {
        assert!(Instant::now() < until, "there is no direct link");
        say(&host.workers[from].0, to as usize, b"talk");
        assert_eq!(next(&inboxes[to as usize]).1, b"talk");
    }
}

/// What has come until the last of these words.
fn until(inbox: &crate::Inbox, last: &[u8]) -> Vec<Vec<u8>> {
    let mut heard = Vec::new();
    while heard.last().is_none_or(|word: &Vec<u8>| word != last) {
        heard.push(next(inbox).1);
    }
    heard
}

fn say(from: &Runtime, rank: usize, text: &[u8]) {
    from.tell(&Outgoing { actor: LISTENER, ..out(Request::CALL, &one(rank), text, &[]) }).unwrap();
}

/// Two workers, the first of which has a direct link to the second.
fn linked(options: Options) -> (Host, Arc<crate::Inbox>) {
    let host = Host::new(2, options);
    let mut inboxes = listeners(&host);
    link(&host, &inboxes, 0, 1);
    (host, inboxes.remove(1))
}

/// The page comes with the first link, and that may be lost where descriptors are short.
#[test]
fn a_proc_that_has_missed_its_page_gets_it_with_the_next_link() {
    let host = Host::new(2, options());
    let inboxes = listeners(&host);
    for rank in 0..2 {
        let lost = host.controller.switch.link_of(at(rank)).map(|link| link.offer_page());
        assert!(matches!(lost, Some(Ok(Some(_)))));
    }
    link(&host, &inboxes, 0, 1);
    // Once the agent has heard from it, there is nothing to offer.
    let offered = || host.controller.switch.link_of(at(0)).map(|link| link.offer_page());
    soon(|| matches!(offered(), Some(Ok(None))).then_some(()));
    drop(inboxes);
    host.close();
}

#[test]
fn what_goes_by_a_link_needs_no_agent() {
    let (host, inbox) = linked(options());
    say(&host.workers[0].0, 1, b"talk");
    assert_eq!(next(&inbox).1, b"talk");
    let stalled = host.controller.reactor.stall();
    (0..100_u8).for_each(|n| say(&host.workers[0].0, 1, &[n]));
    assert_eq!(until(&inbox, &[99]), (0..100).map(|n| vec![n]).collect::<Vec<_>>());
    drop(stalled);
    drop(inbox);
    host.close();
}

/// DIR-4: a cause that the agent has not handed on yet.
#[test]
fn nothing_goes_by_a_link_past_what_the_agent_has_not_handed_on() {
    let host = Host::new(3, options());
    let inboxes = listeners(&host);
    link(&host, &inboxes, 0, 1);
    link(&host, &inboxes, 1, 2);
    for _ in 0..20 {
        let stalled = host.controller.reactor.stall();
        say(&host.workers[0].0, 2, b"cause");
        say(&host.workers[0].0, 1, b"go");
        assert!(inboxes[1].take(1).is_empty(), "the agent has handed on nothing");
        drop(stalled);
        assert_eq!(until(&inboxes[1], b"go").len(), 1);
        say(&host.workers[1].0, 2, b"effect");
        assert_eq!(until(&inboxes[2], b"effect"), [b"cause".to_vec(), b"effect".to_vec()]);
    }
    drop(inboxes);
    host.close();
}

/// DIR-4: a cause that still waits at the agent, or at another proc, since the receiver's socket was full.
#[test]
fn what_waits_for_room_is_not_overtaken() {
    let host = Host::new(3, options());
    let inboxes = listeners(&host);
    link(&host, &inboxes, 0, 2);
    link(&host, &inboxes, 1, 2);
    let large = vec![7; 3_000_000];
    for cause in [&host.controller, &host.workers[0].0] {
        let stalled = host.workers[2].0.reactor.stall();
        say(cause, 2, &large);
        let waits = cause.switch.link_of(at(2)).is_some_and(|link| link.queued() > 0);
        assert!(waits, "a socket holds less");
        say(&host.workers[1].0, 2, b"effect");
        drop(stalled);
        assert_eq!(until(&inboxes[2], b"effect"), [large.clone(), b"effect".to_vec()]);
    }
    drop(inboxes);
    host.close();
}

/// DIR-4: a sender that has accepted a message and then stands still.
#[test]
fn a_link_whose_other_end_stands_still_holds_nobody_up_for_long() {
    let host = Host::new(3, options());
    let inboxes = listeners(&host);
    link(&host, &inboxes, 0, 2);
    link(&host, &inboxes, 1, 2);
    let still = &host.workers[0].0;
    let hold = still.switch.link_of(at(2)).map(|link| link.hold(&still.reactor));
    say(still, 2, b"late");
    (0..100_u8).for_each(|n| say(&host.workers[1].0, 2, &[n]));
    assert_eq!(until(&inboxes[2], &[99]), (0..100).map(|n| vec![n]).collect::<Vec<_>>());
    // From now on it is not waited for, until it is there.
    (100..200_u8).for_each(|n| say(&host.workers[1].0, 2, &[n]));
    assert_eq!(until(&inboxes[2], &[199]).len(), 100);
    drop(hold);
    assert_eq!(next(&inboxes[2]).1, b"late");
    say(still, 2, b"here");
    say(&host.workers[1].0, 2, b"there");
    assert_eq!(until(&inboxes[2], b"there"), [b"here".to_vec(), b"there".to_vec()]);
    drop(inboxes);
    host.close();
}

/// A link that stood still is waited for again once that is here which it had accepted by then, though its other end has
/// always accepted more when the receiver looks.
#[test]
fn a_link_that_stood_still_is_waited_for_again_while_more_comes_by_it() {
    let host = Host::new(3, options());
    let inboxes = listeners(&host);
    link(&host, &inboxes, 0, 2);
    link(&host, &inboxes, 1, 2);
    let (still, to) = (&host.workers[0].0, &host.workers[2].0);
    let way = still.switch.link_of(at(2)).unwrap();
    let hold = way.hold(&still.reactor);
    say(still, 2, b"late");
    say(&host.workers[1].0, 2, b"early");
    assert_eq!(until(&inboxes[2], b"early").len(), 1);
    let stalled = to.reactor.stall();
    drop(hold);
    let hold = way.hold(&still.reactor);
    say(still, 2, b"cause");
    say(&host.workers[1].0, 2, b"effect");
    drop(stalled);
    assert_eq!(next(&inboxes[2]).1, b"late");
    drop(hold);
    assert_eq!(until(&inboxes[2], b"effect"), [b"cause".to_vec(), b"effect".to_vec()]);
    drop((way, inboxes));
    host.close();
}

/// DIR-4. Each of three senders comes first, and the sockets become ready in each order.
#[test]
fn causes_are_taken_before_effects_whoever_sends_them() {
    let host = Host::new(3, options());
    let mut inboxes = listeners(&host);
    link(&host, &inboxes, 0, 2);
    link(&host, &inboxes, 1, 2);
    let inbox = inboxes.remove(2);
    let to = &host.workers[2].0;
    let senders = [&host.controller, &host.workers[0].0, &host.workers[1].0];
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

/// DIR-4. With its first link a proc begins to read in order: so it takes what has come behind the offer of that.
#[test]
fn what_comes_right_behind_the_first_offer_is_taken_in_order_too() {
    const ID: LinkId = 1000;
    let host = Host::new(3, options());
    let inboxes = listeners(&host);
    link(&host, &inboxes, 0, 2);
    let (agent, from, to) = (&host.controller, &host.workers[0].0, &host.workers[1].0);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let (page, own) = (LinkPage::create().unwrap(), LinkPage::create().unwrap());
    let stalled = to.reactor.stall();
    // As an agent makes a link. The second end's readiness is said for it, as it reads nothing yet.
    let ways = [from, to].map(|proc| agent.switch.link_of(proc.me).unwrap());
    ways[1].set_page(LinkPage::open(&own, End::First).unwrap());
    let ends = [(to.me, ours, vec![page.try_clone().unwrap()]), (from.me, theirs, vec![page, own])];
    for (way, (peer, end, pages)) in ways.iter().zip(ends) {
        let offer = Direct::Offer(ID, peer, socket_number(end.as_fd()).unwrap());
        way.send_with(&agent.reactor, &offer.frame(agent.me, way.peer), [end].into_iter().chain(pages).collect());
    }
    agent.dispatch(Direct::Ready(ID).frame(to.me, from.me), None);
    soon(|| has_link(from, 1).then_some(()));
    say(from, 1, b"cause");
    say(agent, 1, b"effect");
    drop(stalled);
    assert_eq!(until(&inboxes[1], b"effect"), [b"cause".to_vec(), b"effect".to_vec()]);
    drop((ways, inboxes));
    host.close();
}

/// A cast of the controller, whose other threads read meanwhile what its receivers send: also if there are no links.
#[test]
fn nobody_sees_an_effect_of_a_cast_of_the_controller_before_it() {
    const RANKS: u32 = 8;
    let host = Host::new(RANKS, Options { direct_links: 0, ..options() });
    let inboxes = listeners(&host);
    let all = Target::Many(MESH, super::procs(RANKS as usize), Placement::On(0));
    let last = RANKS as usize - 1;
    for _ in 0..500 {
        let heard = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                assert_eq!(next(&inboxes[0]).1, b"cast");
                say(&host.workers[0].0, last, b"effect");
            });
            host.controller.tell(&Outgoing { actor: LISTENER, ..out(Request::CALL, &all, b"cast", &[]) }).unwrap();
            first.join().unwrap();
            [next(&inboxes[last]).1, next(&inboxes[last]).1]
        });
        assert_eq!(heard, [b"cast".to_vec(), b"effect".to_vec()]);
        inboxes[1..last].iter().for_each(|inbox| assert_eq!(next(inbox).1, b"cast"));
    }
    drop(inboxes);
    host.close();
}

/// DIR-4: a cast by direct links, whose first receivers answer while its sender still writes to the others.
#[test]
fn nobody_sees_an_effect_of_a_cast_by_direct_links_before_it() {
    const RANKS: usize = 5;
    let host = Host::new(5, options());
    let inboxes = listeners(&host);
    (1..5).for_each(|rank| link(&host, &inboxes, 0, rank));
    (1..4).for_each(|rank| link(&host, &inboxes, rank, 4));
    let from = &host.workers[0].0;
    let all = Target::Many(MESH, super::procs(RANKS), Placement::On(0));
    for _ in 0..300 {
        let heard = std::thread::scope(|scope| {
            for (inbox, (worker, _)) in inboxes.iter().zip(&host.workers).skip(1).take(3) {
                scope.spawn(move || {
                    assert_eq!(next(inbox).1, b"cast");
                    say(worker, 4, b"effect");
                });
            }
            from.tell(&Outgoing { actor: LISTENER, ..out(Request::CALL, &all, b"cast", &[]) }).unwrap();
            (0..4).map(|_| next(&inboxes[4]).1).collect::<Vec<_>>()
        });
        assert_eq!(heard, [&b"cast"[..], b"effect", b"effect", b"effect"]);
        assert_eq!(next(&inboxes[0]).1, b"cast");
    }
    drop(inboxes);
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
        while !has_link(from, rank) {
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
