//! Who may still answer a call by its port (HLD-1).

use mesh_proto::{Deserter, EndReason, Ended, Exit, Holders, ProcAddr, Verdict};
use std::collections::BTreeSet;
use std::sync::Arc;

const CALLEE: ProcAddr = at(0, 1);

const fn at(rank: u32, host: u32) -> ProcAddr {
    ProcAddr { mesh: 7, rank, host }
}

fn ended(reason: &str) -> Arc<Ended> {
    Arc::new(Ended {
        pid: Some(1),
        exit: Exit::Signal(9),
        orderly: false,
        reason: EndReason::NotMade(reason.to_owned()),
        stderr_tail: Vec::new(),
    })
}

fn lost(holders: &Holders) -> Deserter {
    match holders.verdict() {
        Some(Verdict::Died(lost)) => lost,
        other => panic!("{other:?} where a death was due"),
    }
}

fn name(text: &str) -> Arc<str> {
    Arc::from(text)
}

#[test]
fn the_last_holders_death_ends_it_and_is_told() {
    let mut holders = Holders::new(CALLEE);
    assert!(holders.given(at(1, 2), 5, &name("worker")));
    assert!(!holders.given(at(1, 2), 5, &name("worker")), "nobody is asked about twice");
    holders.let_go(CALLEE, Holders::FIRST);
    assert!(holders.verdict().is_none());
    holders.died(at(1, 2), &ended("killed"));
    let lost = lost(&holders);
    assert_eq!((lost.addr, &*lost.name, lost.ended.reason.to_string().as_str()), (at(1, 2), "worker", "killed"));
}

#[test]
fn a_death_ends_nothing_while_somebody_else_holds_it() {
    let mut holders = Holders::new(CALLEE);
    holders.given(at(1, 2), 5, &name(""));
    holders.given(at(2, 3), 6, &name(""));
    holders.died(at(1, 2), &ended("first"));
    assert!(holders.verdict().is_none(), "the callee and another have it");
    holders.let_go(CALLEE, Holders::FIRST);
    assert!(holders.verdict().is_none(), "another has it");
    holders.host_died(3, &ended("host"));
    assert_eq!(lost(&holders).ended.reason.to_string(), "host");
}

#[test]
fn once_all_have_let_go_it_is_over() {
    let mut holders = Holders::new(CALLEE);
    holders.given(at(1, 2), 5, &name(""));
    holders.let_go(CALLEE, Holders::FIRST);
    assert!(holders.verdict().is_none());
    holders.let_go(at(1, 2), 5);
    assert!(matches!(holders.verdict(), Some(Verdict::LetGo)));
    holders.died(at(1, 2), &ended("later"));
    assert!(matches!(holders.verdict(), Some(Verdict::LetGo)), "it had let go before it died");
}

#[test]
fn one_that_has_let_go_before_its_being_given_it_was_told() {
    let mut holders = Holders::new(CALLEE);
    holders.let_go(at(1, 2), 5);
    assert!(!holders.given(at(1, 2), 5, &name("")));
    holders.died(at(1, 2), &ended("no holder"));
    assert!(holders.verdict().is_none(), "the callee has it");
    holders.let_go(CALLEE, Holders::FIRST);
    assert!(matches!(holders.verdict(), Some(Verdict::LetGo)));
}

#[test]
fn where_a_port_has_gone_astray_nothing_ends() {
    let mut holders = Holders::new(CALLEE);
    holders.given(at(1, 2), 5, &name(""));
    holders.let_go(CALLEE, Holders::FIRST);
    holders.loosen();
    holders.died(at(1, 2), &ended("killed"));
    assert!(holders.verdict().is_none());
}

/// The verdict does not depend on the order of tidings.
#[test]
fn the_order_of_tidings_does_not_count() {
    type Tiding = fn(&mut Holders);
    let tidings: [Tiding; 5] = [
        |holders| {
            holders.given(at(1, 2), 5, &name("first"));
        },
        |holders| holders.let_go(CALLEE, Holders::FIRST),
        |holders| {
            holders.given(at(2, 3), 6, &name("second"));
        },
        |holders| holders.let_go(at(1, 2), 5),
        |holders| holders.let_go(at(2, 3), 6),
    ];
    let mut seen = BTreeSet::new();
    for order in 0..5_usize.pow(5) {
        let order: Vec<usize> = (0..5).map(|place| order / 5_usize.pow(place) % 5).collect();
        if order.iter().collect::<BTreeSet<_>>().len() < 5 {
            continue;
        }
        let mut holders = Holders::new(CALLEE);
        // Until all tidings are in, somebody holds it.
        holders.given(at(3, 3), 7, &name("third"));
        order.iter().for_each(|one| tidings[*one](&mut holders));
        holders.host_died(2, &ended("nobody there"));
        assert!(holders.verdict().is_none());
        holders.died(at(3, 3), &ended("gone"));
        seen.insert(lost(&holders).addr.rank);
    }
    assert_eq!(seen, BTreeSet::from([3]));
}
