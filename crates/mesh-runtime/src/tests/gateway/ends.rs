//! Hosts that leave in order, and ends at any moment.

use super::member::{Job, Member, Site, is_up, options};
use super::{Arc, Trio};
use crate::call::Outcome;
use crate::error::RuntimeError;
use crate::gateway::{ReleaseTerms, agents};
use crate::tests::SOON;
use mesh_proto::hosts::{Fate, HostSet, Parting};
use mesh_proto::{EndReason, Ended, Target};
use mesh_topology::Region;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn region(first: u32, count: u32) -> Region {
    let Target::Many(_, region, _) = agents(first, count) else { panic!("a region") };
    region
}

fn terms(limit: Duration) -> ReleaseTerms {
    ReleaseTerms { within: limit, limit, why: "it is no longer needed" }
}

/// REL-1
#[test]
fn a_host_that_is_let_go_ends_its_processes_first() {
    let trio = Trio::plain(2);
    let [first, second] = &trio.sites;
    first.member.procs.store(1, Ordering::SeqCst);
    let call = trio.controller.gateway.release(&region(1, 1), Vec::new(), terms(SOON)).unwrap();
    first.member.until("the order", |heard| heard.vacates);
    assert!(!call.is_done() && first.member.gateway.leaving().is_some());
    first.member.tell(0, 9, 10);
    let mut ended = Ended { orderly: true, ..Ended::unmade(EndReason::Unstated) };
    first.member.procs.store(0, Ordering::SeqCst);
    first.member.gateway.note_leaving(&mut ended);
    assert!(matches!(&ended.reason, EndReason::Host(end) if end.fate == Fate::Released), "{ended:?}");
    let outcomes = trio.controller.outcomes(&call);
    assert!(matches!(&outcomes[..], [Outcome::Lost(_)]), "{outcomes:?}");
    assert_eq!(
        trio.controller.heard(|heard| (heard.died.clone(), heard.from(1))),
        (vec![(1, Fate::Released)], vec![9])
    );
    first.member.until("its end", |heard| heard.ended.len() == 1);
    second.member.until("the end of the other", |heard| heard.lost == [1]);
    second.member.tell(0, 1, 10);
    trio.controller.until("a message", |heard| heard.from(2) == [1]);
    assert!(second.member.heard(|heard| heard.ended.is_empty()));
}

/// REL-1
#[test]
fn a_host_that_does_not_answer_is_let_go_all_the_same() {
    let trio = Trio::plain(2);
    trio.sites[0].member.procs.store(1, Ordering::SeqCst);
    let call = trio.controller.gateway.release(&region(1, 2), Vec::new(), terms(Duration::from_millis(1))).unwrap();
    assert_eq!(trio.controller.outcomes(&call).len(), 2);
    let mut died = trio.controller.heard(|heard| heard.died.clone());
    died.sort_unstable_by_key(|(host, _)| *host);
    assert_eq!(died, [(1, Fate::Released), (2, Fate::Released)]);
    assert_eq!(trio.controller.gateway.live_hosts(), []);
    // Once more, although they are gone already.
    let again = trio.controller.gateway.release(&region(1, 2), Vec::new(), terms(SOON)).unwrap();
    assert_eq!(trio.controller.outcomes(&again).len(), 2);
    trio.sites[0].member.procs.store(0, Ordering::SeqCst);
}

#[test]
fn a_host_that_ends_in_order_says_so() {
    let trio = Trio::plain(2);
    trio.sites[0].member.gateway.end_job(Parting::Stopped, "its agent was stopped");
    assert_eq!(trio.sites[0].member.heard(|heard| heard.ended.clone()), ["its agent was stopped"]);
    trio.controller.until("its end", |heard| heard.lost == [1]);
    assert_eq!(trio.controller.heard(|heard| heard.died.clone()), [(1, Fate::Left)]);
    trio.sites[0].member.gateway.end_job(Parting::Stopped, "once more");
    assert_eq!(trio.sites[0].member.heard(|heard| heard.ended.len()), 1, "it has ended once");
}

#[test]
fn the_end_of_the_controller_ends_the_job_everywhere() {
    for fan_out in [1, 2] {
        let trio = Trio::plain(fan_out);
        trio.controller.close();
        for site in &trio.sites {
            site.member.until("the end of the job", |heard| heard.ended.len() == 1);
            assert!(site.member.heard(|heard| heard.died.is_empty()));
        }
        let identity = Arc::clone(&trio.job.controller);
        assert!(trio.controller.gateway.attach(&[None], move || Ok(identity), options(2)).is_err());
        assert!(trio.controller.gateway.release(&region(1, 1), Vec::new(), terms(SOON)).is_err());
    }
}

/// The controller may have been open when a host was attached, and closed just afterwards.
#[test]
fn nothing_is_attached_to_a_gateway_that_is_closed() {
    let job = Job::new();
    let (controller, site) = (Member::controller(), Site::new(&job.host, 1));
    controller.gateway.close(Duration::ZERO);
    let identity = || {
        let identity = Arc::clone(&job.controller);
        move || Ok(identity)
    };
    let attached = controller.gateway.attach(&[Some(site.address())], identity(), options(2));
    assert!(matches!(attached, Err(RuntimeError::Closed)), "{attached:?}");
    let attached = controller.gateway.attach_dialers("127.0.0.1:0", 1, identity(), options(2));
    assert!(matches!(attached, Err(RuntimeError::Closed)), "{attached:?}");
    assert!(!controller.gateway.is_active() && controller.gateway.peers().is_empty());
    controller.close();
}

/// Nobody waits for ever, whenever the controller, or a host, closes.
#[test]
fn nobody_waits_forever_when_a_member_closes() {
    for moment in 0..20_u32 {
        let job = Job::new();
        let controller = Member::controller();
        let sites = [1, 2].map(|host| Site::new(&job.host, host));
        let addresses: Vec<_> = sites.iter().map(|site| Some(site.address())).collect();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let closes = |step: u32| {
                if step != moment / 2 {
                    return;
                }
                let (controller, site) = (&controller, &sites[0]);
                scope.spawn(move || if moment % 2 == 0 { controller.close() } else { site.close() });
            };
            closes(0);
            let identity = Arc::clone(&job.controller);
            let Ok((_, call)) =
                controller.gateway.attach(&addresses, move || Ok(identity), options(1 + moment % 3 % 2))
            else {
                return;
            };
            closes(1);
            scope.spawn(|| controller.gateway.wait_for_room(&HostSet::one(1), 0, Instant::now() + SOON));
            let waits = Arc::clone(&call);
            let waiting = scope.spawn({
                let controller = &controller;
                move || controller.outcomes(&waits)
            });
            for step in 2..8 {
                for host in [1, 2] {
                    controller.tell(host, step, 30_000);
                }
                closes(step);
            }
            let ups = waiting.join().unwrap().iter().filter(|outcome| is_up(outcome)).count();
            assert!(ups <= 2);
            closes(8);
            let told = controller.gateway.release(&region(1, 2), Vec::new(), terms(SOON));
            closes(9);
            if let Ok(call) = told {
                assert_eq!(controller.outcomes(&call).len(), 2);
            }
        });
        assert!(begun.elapsed() < SOON, "somebody has waited for the time limit: moment {moment}");
        controller.close();
        assert!(controller.is_closed());
    }
}
