//! Hosts that can only dial out.

use super::Arc;
use super::member::{Job, Member, Site, is_up, options};
use super::road::Road;
use crate::call::Outcome;
use crate::greeting::{hear, say};
use crate::tests::SOON;
use crate::tls::{Dialed, Pace, dial};
use mesh_proto::hosts::{Join, PacketDecoder, Refusal, Refuse};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Listens for `count` hosts. Returns the address once it does, and the call.
fn listen(controller: &Arc<Member>, job: &Job, count: u32) -> (String, Arc<crate::Call>) {
    // A free port; if somebody takes it meanwhile, the call fails and says so.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let identity = Arc::clone(&job.controller);
    let (_, call) = controller.gateway.attach_dialers(&address, count, move || Ok(identity), options(2)).unwrap();
    (address, call)
}

#[test]
fn hosts_that_dial_join_in_order_and_come_back() {
    let job = Job::new();
    let controller = Member::controller();
    let (address, call) = listen(&controller, &job, 2);
    let until = Instant::now() + SOON;
    while std::net::TcpStream::connect(&address).is_err() {
        assert!(Instant::now() < until && !call.is_done(), "nobody listens at {address}");
        std::thread::yield_now();
    }
    let road = Road::to(&address);
    let sites = [1, 2].map(|host| Site::silent(&job.host, host));
    assert!(sites[0].offer(&road.address()) && sites[1].offer(&address));
    assert!(controller.outcomes(&call).iter().all(is_up));
    assert!(!Site::silent(&job.host, 3).offer(&address), "no more hosts are wanted");
    for number in 0..100 {
        if number % 30 == 15 {
            road.cut();
        }
        controller.tell(1, number, 1000);
        sites[0].member.tell(0, number, 1000);
        sites[1].member.tell(1, number, 1000);
    }
    let all: Vec<u32> = (0..100).collect();
    sites[0].member.until("messages", |heard| heard.told.len() == 200);
    controller.until("messages", |heard| heard.from(1).len() == 100);
    assert_eq!(sites[0].member.heard(|heard| (heard.from(0), heard.from(2))), (all.clone(), all.clone()));
    assert_eq!(controller.heard(|heard| (heard.from(1), heard.died.len())), (all, 0));
    // A member of another job, and an observer.
    let (_, more) = {
        let identity = Arc::clone(&job.controller);
        controller.gateway.attach_dialers(&address, 1, move || Ok(identity), options(2)).unwrap()
    };
    for identity in [&job.observer, &job.host] {
        let pace = Pace { timeout: SOON, again: Duration::from_millis(500), over: None };
        let Dialed { mut stream, .. } = dial(&address, identity, None, pace).unwrap();
        let other = controller.gateway.job() + 1_000_000;
        let join = Join { job: other, from: 0, to: 0, incarnation: 1, expected: 0, body: bytes::Bytes::new() };
        say(&mut stream, &join.packet(), Instant::now() + SOON).unwrap();
        let packet = hear(&mut stream, &mut PacketDecoder::default(), Instant::now() + SOON).unwrap();
        assert_eq!(Refuse::read(&packet).unwrap().code, Refusal::NoSuchJob);
    }
    controller.close();
    // Nobody came.
    assert!(matches!(controller.outcomes(&more)[..], [Outcome::Lost(_)]));
    sites[0].member.until("the end of the job", |heard| heard.ended.len() == 1);
}

#[test]
fn an_address_that_cannot_be_had_fails_the_call() {
    let job = Job::new();
    let controller = Member::controller();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let identity = Arc::clone(&job.controller);
    let address = taken.local_addr().unwrap().to_string();
    let (_, call) = controller.gateway.attach_dialers(&address, 2, move || Ok(identity), options(2)).unwrap();
    let outcomes = controller.outcomes(&call);
    assert!(outcomes.len() == 2 && outcomes.iter().all(|one| matches!(one, Outcome::Lost(_))), "{outcomes:?}");
    controller.close();
}
