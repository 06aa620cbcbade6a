//! The state machines against naive models, under random schedules.

use crate::support::{config, region};
use mesh_proto::{
    EndReason, Ended, Event, Exit, Gather, IdMaker, Lifecycle, Outcome, Placement, ProcAddr, Route, Router, Stage,
    Target,
};
use mesh_topology::Region;
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

fn ended(reason: &str) -> Arc<Ended> {
    Arc::new(Ended {
        pid: None,
        exit: Exit::Unknown,
        orderly: false,
        reason: EndReason::NotMade(reason.to_owned()),
        stderr_tail: Vec::new(),
    })
}

// Gathering.

#[derive(Clone, Debug)]
enum Step {
    Reply(usize, u32),
    Lost(usize),
    Down { mesh: u64, rank: u32 },
    Cancel,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_usize..30, any::<u32>()).prop_map(|(index, value)| Step::Reply(index, value)),
        1 => (0_usize..30).prop_map(Step::Lost),
        3 => (6_u64..8, 0_u32..30).prop_map(|(mesh, rank)| Step::Down { mesh, rank }),
        1 => Just(Step::Cancel),
    ]
}

/// A rank's outcome in comparable form.
fn plain(outcome: &Outcome<u32>) -> String {
    match outcome {
        Outcome::Replied(value) => format!("replied {value}"),
        Outcome::Deserted(lost) => format!("deserted {}", lost.ended.reason),
        Outcome::Lost(ended) => format!("lost {}", ended.reason),
        Outcome::Cancelled => "cancelled".to_owned(),
    }
}

proptest! {
    #![proptest_config(config(2000, 11))]

    /// GTH-1: the first outcome of a rank counts, whatever comes later.
    #[test]
    fn a_gather_is_a_list_of_first_outcomes(region in region(), steps in prop::collection::vec(step(), 0..80)) {
        let ranks: Vec<usize> = region.iter().collect();
        let mut model: Vec<Option<String>> = vec![None; ranks.len()];
        let mut gather: Gather<u32> = Gather::new(Target::Many(7, region, Placement::On(0)));
        for step in steps {
            let before = model.iter().filter(|place| place.is_none()).count();
            let (completes, place, value) = match step {
                Step::Reply(index, value) => {
                    let outcome = Outcome::Replied(value);
                    let text = plain(&outcome);
                    (gather.on_outcome(index, outcome), model.get_mut(index), text)
                }
                Step::Lost(index) => {
                    let outcome = Outcome::Lost(ended("told"));
                    let text = plain(&outcome);
                    (gather.on_outcome(index, outcome), model.get_mut(index), text)
                }
                Step::Down { mesh, rank } => {
                    let completes = gather.on_down(ProcAddr { mesh, rank, host: 0 }, &ended("died"));
                    let index = ranks.iter().position(|r| mesh == 7 && *r == rank as usize);
                    (completes, index.and_then(|index| model.get_mut(index)), "lost died".to_owned())
                }
                Step::Cancel => {
                    let completes = gather.cancel();
                    for place in &mut model {
                        place.get_or_insert_with(|| "cancelled".to_owned());
                    }
                    (completes, None, String::new())
                }
            };
            if let Some(place @ None) = place {
                *place = Some(value);
            }
            let missing = model.iter().filter(|place| place.is_none()).count();
            prop_assert_eq!(gather.missing(), missing);
            prop_assert_eq!(gather.is_complete(), missing == 0);
            // Completion is reported once: by the step that brings it about.
            prop_assert_eq!(completes, before > 0 && missing == 0);
        }
        let outcomes: Vec<String> = gather.into_outcomes().iter().map(plain).collect();
        let expected: Vec<String> = model.into_iter().map(|place| place.unwrap_or_else(|| "cancelled".to_owned())).collect();
        prop_assert_eq!(outcomes, expected);
    }
}

// A proc's life.

fn event() -> impl Strategy<Value = Event> {
    let exit = prop_oneof![
        Just(Exit::Code(0)),
        (1_i32..255).prop_map(Exit::Code),
        (1_i32..32).prop_map(Exit::Signal),
        Just(Exit::Unknown),
    ];
    prop_oneof![
        2 => (1_u32..9999).prop_map(Event::Forked),
        1 => (0_u64..200).prop_map(|ms| Event::Asked { within: Duration::from_millis(ms) }),
        2 => (1_u32..9999).prop_map(Event::Hello),
        2 => (0_u64..200).prop_map(|ms| Event::StopAsked { within: Duration::from_millis(ms) }),
        1 => Just(Event::Goodbye(EndReason::Unstated)),
        1 => Just(Event::LinkClosed(EndReason::ConnectionClosed(0))),
        1 => exit.prop_map(Event::Exited),
        1 => Just(Event::SpawnFailed(EndReason::NotMade("no".to_owned()))),
        6 => Just(Event::Tick),
        1 => Just(Event::Imported),
        2 => any::<bool>().prop_map(|progress| Event::Importing { module: "torch".to_owned(), progress }),
    ]
}

proptest! {
    #![proptest_config(config(4000, 12))]

    #[test]
    fn a_life_has_one_end(schedule in prop::collection::vec((event(), 0_u64..60), 0..40)) {
        let mut life = Lifecycle::default();
        let mut now = Duration::ZERO;
        let (mut notices, mut kills) = (0, 0);
        let (mut orderly, mut link_closed, mut pid) = (false, false, None);
        for (event, pause) in schedule {
            now += Duration::from_millis(pause);
            let over = life.stage() == Stage::Ended;
            let due = life.deadline().is_some_and(|by| by <= now);
            let starting = life.stage() == Stage::Starting;
            let killed = kills > 0;
            if !over {
                match &event {
                    Event::StopAsked { .. } | Event::Goodbye(_) => orderly = true,
                    Event::LinkClosed(_) => link_closed = true,
                    Event::Forked(p) => pid = Some(*p),
                    Event::Hello(p) => pid = pid.or(Some(*p)),
                    _ => {}
                }
            }
            let actions = life.on(event.clone(), now);
            kills += u32::from(actions.kill);
            // A kill is requested only when a deadline has passed.
            let tick = matches!(event, Event::Tick | Event::Importing { .. });
            prop_assert!(!actions.kill || due && tick);
            if over {
                prop_assert!(!actions.kill && actions.notice.is_none(), "something after the end");
            }
            if let Some(notice) = actions.notice {
                notices += 1;
                prop_assert_eq!(life.stage(), Stage::Ended);
                prop_assert_eq!(life.deadline(), None);
                prop_assert_eq!(notice.pid, pid);
                prop_assert!(!notice.orderly || orderly, "nobody asked it to stop, and it did not say goodbye");
                match event {
                    Event::Exited(exit) => {
                        prop_assert_eq!(notice.exit, exit);
                        let clean = matches!(exit, Exit::Code(0) | Exit::Unknown) || kills > 0;
                        prop_assert_eq!(notice.orderly, orderly && clean);
                    }
                    Event::SpawnFailed(ref why) => prop_assert_eq!(&notice.reason, why),
                    Event::Tick | Event::Importing { .. } => prop_assert!(
                        due && (link_closed || starting || killed),
                        "the end was told before the status's grace was over"
                    ),
                    ref other => prop_assert!(false, "{other:?} ends nothing"),
                }
            }
            // The machine never asks for a tick in the past, once it was told the time.
            if tick {
                prop_assert!(life.deadline().is_none_or(|by| by > now));
            }
        }
        prop_assert!(notices <= 1 && kills <= 1, "{notices} notices, {kills} kills");
        // LIF-1: its end is reported exactly once, however it comes about.
        if life.stage() != Stage::Ended {
            prop_assert_eq!(notices, 0);
            life.on(Event::LinkClosed(EndReason::ConnectionClosed(3)), now);
            let by = life.deadline().unwrap();
            let early = life.on(Event::Tick, by.checked_sub(Duration::from_nanos(1)).unwrap());
            prop_assert!(early.notice.is_none());
            prop_assert!(life.on(Event::Tick, by).notice.is_some());
            prop_assert!(life.on(Event::Exited(Exit::Code(0)), by).notice.is_none());
        }
    }

    /// A stop has the shortest time that anyone gave it, and one kill at its end.
    #[test]
    fn a_stop_is_enforced_in_time(stops in prop::collection::vec((0_u64..50, 1_u64..500), 1..6)) {
        let mut life = Lifecycle::default();
        let mut now = Duration::ZERO;
        life.on(Event::Forked(1), now);
        life.on(Event::Hello(1), now);
        let mut by = Duration::MAX;
        for (pause, within) in stops {
            let at = now + Duration::from_millis(pause);
            if at >= by {
                break;
            }
            now = at;
            let within = Duration::from_millis(within);
            by = by.min(now + within);
            life.on(Event::StopAsked { within }, now);
            prop_assert_eq!(life.stage(), Stage::Stopping);
            prop_assert_eq!(life.deadline(), Some(by));
        }
        prop_assert!(!life.on(Event::Tick, by.checked_sub(Duration::from_nanos(1)).unwrap()).kill);
        prop_assert!(life.on(Event::Tick, by).kill);
        let again = life.deadline().unwrap().checked_sub(Duration::from_nanos(1)).unwrap();
        prop_assert_eq!(life.on(Event::Tick, again), mesh_proto::Actions::default(), "killed twice, or told too early");
        let notice = life.on(Event::Exited(Exit::Signal(9)), by).notice.unwrap();
        prop_assert!(notice.orderly, "it was asked to stop, and killed by us: no failure");
    }
}

#[test]
fn a_proc_that_never_reports_is_killed_and_told_of() {
    let mut life = Lifecycle::default();
    life.on(Event::Asked { within: Duration::from_secs(2) }, Duration::ZERO);
    assert_eq!(life.on(Event::Tick, Duration::from_millis(1999)), mesh_proto::Actions::default());
    let late = life.on(Event::Tick, Duration::from_secs(2));
    assert!(late.kill);
    assert!(late.notice.unwrap().reason.to_string().contains("within 2 s of its spawn"));
}

#[test]
fn imports_of_a_fork_server_that_makes_progress_do_not_count() {
    let importing = |progress| Event::Importing { module: "torch".to_owned(), progress };
    let within = Duration::from_secs(2);
    let asked = || {
        let mut life = Lifecycle::default();
        life.on(Event::Asked { within }, Duration::ZERO);
        life
    };
    let mut life = asked();
    assert_eq!(life.on(importing(true), within), mesh_proto::Actions::default());
    assert_eq!(life.deadline(), Some(within * 2));
    life.on(Event::Imported, within * 3 / 2);
    assert_eq!(life.deadline(), Some(within * 5 / 2), "its time begins when it can be made");
    assert!(life.on(Event::Tick, within * 5 / 2).kill);

    let mut life = asked();
    let stuck = life.on(importing(false), within);
    assert!(stuck.kill);
    let said = stuck.notice.unwrap().reason.to_string();
    assert!(said.contains("within 2 s") && said.contains("still importing \"torch\""), "{said}");
    assert!(said.contains("MESH_SPAWN_TIMEOUT"), "{said}");

    let mut life = asked();
    for extension in 1..=mesh_proto::MOST_EXTENSIONS {
        assert_eq!(life.on(importing(true), within * extension), mesh_proto::Actions::default());
    }
    let endless = life.on(importing(true), within * (mesh_proto::MOST_EXTENSIONS + 1));
    assert!(endless.notice.unwrap().reason.to_string().contains("within 20 s"), "an endless import ends too");
}

#[test]
fn a_hello_in_time_lifts_the_deadline() {
    let mut life = Lifecycle::default();
    life.on(Event::Asked { within: Duration::from_secs(2) }, Duration::ZERO);
    life.on(Event::Hello(1), Duration::from_secs(1));
    assert_eq!(life.deadline(), None);
}

#[test]
fn a_kill_that_nobody_reports_ends_the_wait_all_the_same() {
    let mut life = Lifecycle::default();
    life.on(Event::Hello(1), Duration::ZERO);
    life.on(Event::StopAsked { within: Duration::ZERO }, Duration::ZERO);
    assert!(life.on(Event::Tick, Duration::ZERO).kill);
    let by = life.deadline().unwrap();
    assert!(life.on(Event::Tick, by).notice.is_some_and(|ended| ended.orderly));
}

#[test]
fn an_end_that_nobody_asked_for_is_a_failure() {
    for (event, exit) in
        [(Event::Exited(Exit::Code(0)), Exit::Code(0)), (Event::Exited(Exit::Signal(11)), Exit::Signal(11))]
    {
        let mut life = Lifecycle::default();
        let notice = life.on(event, Duration::ZERO).notice.unwrap();
        assert_eq!((notice.exit, notice.orderly), (exit, false));
    }
    // It was asked to stop but crashed: that is a failure too.
    let mut life = Lifecycle::default();
    life.on(Event::StopAsked { within: Duration::from_secs(1) }, Duration::ZERO);
    assert!(!life.on(Event::Exited(Exit::Signal(11)), Duration::ZERO).notice.unwrap().orderly);
}

// Routing.

#[derive(Clone, Debug)]
enum Move {
    Add { mesh: u64, links: Vec<u32> },
    Close { mesh: u64, rank: u32 },
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        2 => (1_u64..5, prop::collection::vec(any::<u32>(), 0..6)).prop_map(|(mesh, links)| Move::Add { mesh, links }),
        4 => (1_u64..5, 0_u32..7).prop_map(|(mesh, rank)| Move::Close { mesh, rank }),
    ];
    prop::collection::vec(one, 0..30)
}

proptest! {
    #![proptest_config(config(1000, 13))]

    #[test]
    fn an_agent_knows_each_proc_of_its_host(moves in moves()) {
        let mut router = Router::agent(ProcAddr::CONTROLLER);
        let mut model: std::collections::HashMap<u64, Vec<Option<u32>>> = std::collections::HashMap::new();
        for one in moves {
            match one {
                Move::Add { mesh, links } => {
                    router.add_mesh(mesh, 2, links.iter().copied());
                    model.insert(mesh, links.into_iter().map(Some).collect());
                }
                Move::Close { mesh, rank } => {
                    let link = router.close(ProcAddr { mesh, rank: rank + 2, host: 0 }, &ended("closed"));
                    // The link is returned only once.
                    let place = model.get_mut(&mesh).and_then(|doors| doors.get_mut(rank as usize));
                    prop_assert_eq!(link, place.and_then(Option::take));
                }
            }
            for mesh in 1..5 {
                prop_assert_eq!(router.local(mesh).map(|ranks| (ranks.start, ranks.len())), model.get(&mesh).map(|doors| (2, doors.len())));
                let elsewhere = matches!(router.route(ProcAddr { mesh, rank: 2, host: 3 }), Route::Remote(3));
                prop_assert!(elsewhere);
                for rank in 0..7 {
                    let expected = model.get(&mesh).and_then(|doors| doors.get(rank as usize));
                    match (router.route(ProcAddr { mesh, rank: rank + 2, host: 0 }), expected) {
                        (Route::Via(link), Some(Some(model))) => prop_assert_eq!(link, *model),
                        (Route::Gone(ended), Some(None)) => prop_assert_eq!(&ended.reason.to_string(), "closed"),
                        (Route::Unknown, None) => {}
                        (route, expected) => prop_assert!(false, "{route:?} where {expected:?} was due"),
                    }
                }
            }
            let here = matches!(router.route(ProcAddr::CONTROLLER), Route::Here);
            prop_assert!(here);
        }
    }

    #[test]
    fn a_proc_sends_everything_but_its_own_up(mesh in 1_u64..9, rank in 0_u32..9, to in (0_u64..9, 0_u32..9)) {
        let me = ProcAddr { mesh, rank, host: 0 };
        let router = Router::leaf(me, 5);
        let to = ProcAddr { mesh: to.0, rank: to.1, host: 0 };
        match router.route(to) {
            Route::Here => prop_assert_eq!(to, me),
            Route::Via(link) => prop_assert!(link == 5 && to != me),
            other => prop_assert!(false, "{other:?}"),
        }
    }
}

// Ids.

#[test]
fn makers_do_not_meet_also_across_threads() {
    let makers: Vec<IdMaker> = [1, 2, u64::MAX, 0x1234_5678_9abc_def0].map(IdMaker::new).into();
    let ids: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = makers
            .iter()
            .flat_map(|maker| [maker, maker])
            .map(|maker| scope.spawn(move || (0..20_000).map(|_| maker.next()).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let unique: HashSet<u64> = ids.iter().copied().collect();
    assert_eq!(unique.len(), ids.len());
    assert!(!unique.contains(&0), "0 means the controller, and no call");
}

#[test]
fn ended_meshes_are_remembered_but_not_for_ever() {
    let mut router = Router::agent(ProcAddr::CONTROLLER);
    let ended = Arc::new(Ended {
        pid: None,
        exit: Exit::Unknown,
        orderly: true,
        reason: mesh_proto::EndReason::NotMade("closed".to_owned()),
        stderr_tail: Vec::new(),
    });
    for mesh in 1..=5000 {
        router.add_mesh(mesh, 0, [0]);
        router.close(ProcAddr { mesh, rank: 0, host: 0 }, &ended);
    }
    assert!(matches!(router.route(ProcAddr { mesh: 5000, rank: 0, host: 0 }), Route::Gone(_)));
    assert!(matches!(router.route(ProcAddr { mesh: 1, rank: 0, host: 0 }), Route::Unknown));
    assert!((1..=5000).filter(|mesh| router.local(*mesh).is_some()).count() < 2000);
}

#[test]
fn one_outcome_settles_a_gather_once() {
    let extent = mesh_topology::Extent::new([("procs", 3)]).unwrap();
    let mut gather: Gather<u32> = Gather::new(Target::Many(7, Region::whole(&extent), Placement::On(0)));
    assert!(!gather.settle(3, Outcome::Replied(1)), "no such place");
    assert!(gather.is_due(1) && !gather.is_due(3));
    assert!(gather.settle(1, Outcome::Replied(1)));
    assert!(!gather.settle(0, Outcome::Replied(2)) && !gather.is_due(0));
    assert!(gather.is_complete());
    gather.let_go(9);
    let outcomes = gather.into_outcomes();
    assert!(matches!(outcomes[..], [Outcome::Cancelled, Outcome::Replied(1), Outcome::Cancelled]));
}

#[test]
fn a_status_that_comes_late_after_the_link_has_closed_is_still_told() {
    let ms = Duration::from_millis;
    let mut life = Lifecycle::default();
    let _ = life.on(Event::Hello(1), ms(0));
    let _ = life.on(Event::LinkClosed(EndReason::ConnectionClosed(0)), ms(10));
    // The reaper waits for a core meanwhile.
    assert!(life.on(Event::Tick, ms(410)).notice.is_none());
    let told = life.on(Event::Exited(Exit::Signal(9)), ms(411)).notice.map(|ended| ended.exit);
    assert_eq!(told, Some(Exit::Signal(9)));
}
