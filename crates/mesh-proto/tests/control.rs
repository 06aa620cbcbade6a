//! Control frames: one side reads what the other writes, and nothing that arrives makes a reader panic.

use crate::support::{addr, config, entry};
use bytes::Bytes;
use mesh_proto::control::{
    Attachment, Closed, Down, Fetch, Goodbye, Held, Hello, Holding, HostDown, HostLost, HostStanding, Inspect,
    Introduction, Lines, PortAddr, Question, Report, Revoked, SpawnProcs, Step, StopProc, StopProcs, Terms, Traits,
    Undeliverable, Visit, Watch, Whereabouts, ranks_of,
};
use mesh_proto::hosts::Fate;
use mesh_proto::logs::LogOptions;
use mesh_proto::messages::Returned;
use mesh_proto::{
    Carried, EndKind, EndReason, Ended, Exit, Frame, Header, HostEnd, Kind, Placement, PortEnd, ProcAddr, Target,
    Undelivered,
};
use mesh_topology::{Extent, Region};
use proptest::prelude::*;
use std::time::Duration;

fn text() -> impl Strategy<Value = String> {
    any::<String>()
}

fn fate() -> impl Strategy<Value = Fate> {
    (0_u32..12).prop_map(Fate::of)
}

fn host_end() -> impl Strategy<Value = HostEnd> {
    (fate(), text(), text()).prop_map(|(fate, label, why)| HostEnd { fate, label, why })
}

fn time() -> impl Strategy<Value = Duration> {
    any::<u64>().prop_map(Duration::from_micros)
}

fn reason() -> impl Strategy<Value = EndReason> {
    prop_oneof![
        Just(EndReason::Unstated),
        text().prop_map(EndReason::NotMade),
        (time(), text()).prop_map(|(within, module)| EndReason::Late(within, module)),
        any::<u32>().prop_map(EndReason::ForkServerEnded),
        text().prop_map(EndReason::Bootstrap),
        Just(EndReason::Unreaped),
        any::<u64>().prop_map(EndReason::ConnectionClosed),
        any::<i32>().prop_map(EndReason::ConnectionBroke),
        text().prop_map(EndReason::Protocol),
        Just(EndReason::LongAgo),
        Just(EndReason::NeverKnown),
        addr().prop_map(EndReason::NoSuchProc),
        Just(EndReason::Shutdown),
        host_end().prop_map(EndReason::Host),
        (200_u8..).prop_map(EndReason::Unknown),
    ]
}

fn ended() -> impl Strategy<Value = Ended> {
    let exit = prop_oneof![
        any::<i32>().prop_map(Exit::Code),
        any::<i32>().prop_map(Exit::Signal),
        Just(Exit::OutOfMemory),
        Just(Exit::Unknown)
    ];
    let tail = prop::collection::vec(text(), 0..4);
    (prop::option::of(1_u32..), exit, any::<bool>(), reason(), tail)
        .prop_map(|(pid, exit, orderly, reason, stderr_tail)| Ended { pid, exit, orderly, reason, stderr_tail })
}

fn undelivered() -> impl Strategy<Value = Undelivered> {
    prop_oneof![
        Just(Undelivered::NoActor),
        Just(Undelivered::NeverSpawned),
        Just(Undelivered::ActorStopped),
        reason().prop_map(Undelivered::Ended),
        Just(Undelivered::PortDropped),
        Just(Undelivered::PortHandedOn),
        Just(Undelivered::UnknownQuestion),
        Just(Undelivered::NoThread),
        Just(Undelivered::NoExtensions),
        any::<u64>().prop_map(Undelivered::NoRoom),
        Just(Undelivered::NotBegun),
        (200_u8..).prop_map(Undelivered::Unknown),
    ]
}

fn port_end() -> impl Strategy<Value = PortEnd> {
    prop_oneof![
        Just(PortEnd::Closed),
        Just(PortEnd::ClosedBefore),
        Just(PortEnd::ReceiverEnded),
        Just(PortEnd::CallerGone),
        Just(PortEnd::Used),
        Just(PortEnd::Answered),
        (200_u8..).prop_map(PortEnd::Unknown),
    ]
}

fn report() -> impl Strategy<Value = Report> {
    prop_oneof![
        Just(Report::Well),
        Just(Report::Suspect),
        (fate(), text()).prop_map(|(fate, why)| Report::Dead { fate, why })
    ]
}

fn holding() -> impl Strategy<Value = Holding> {
    let to = prop::collection::vec(addr(), 0..4);
    prop_oneof![
        Just(Holding::Loose),
        (any::<u64>(), to, text()).prop_map(|(ticket, to, name)| Holding::Given { ticket, to, name }),
        prop::collection::vec(any::<u64>(), 0..4).prop_map(Holding::LetGo),
        (any::<u64>(), prop::collection::vec(addr(), 0..4)).prop_map(|(ticket, to)| Holding::Unsent { ticket, to }),
        (addr(), any::<u64>(), any::<u64>()).prop_map(|(owner, id, ticket)| Holding::Read(Carried {
            owner,
            id,
            ticket
        })),
    ]
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..60).prop_map(Bytes::from)
}

fn lines() -> impl Strategy<Value = Lines> {
    prop_oneof![
        bytes().prop_map(Lines::Found),
        Just(Lines::More),
        any::<u64>().prop_map(Lines::Flush),
        (any::<u64>(), any::<u64>()).prop_map(|(mesh, ticket)| Lines::Report(mesh, ticket)),
        (any::<u64>(), 0_u8..4, any::<u32>(), any::<u32>()).prop_map(|(mesh, flags, ms, level)| {
            Lines::Set(mesh, LogOptions::with(flags, Duration::from_millis(ms.into()), level))
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![Just(Step::Begin), bytes().prop_map(Step::Said), any::<u32>().prop_map(Step::Taken), Just(Step::End),]
}

fn inspect() -> impl Strategy<Value = Inspect> {
    let questions = [
        Question::State,
        Question::Stacks,
        Question::Dump,
        Question::Threads,
        Question::Tree,
        Question::Usage,
        Question::Shares,
    ];
    prop_oneof![
        prop::sample::select(questions.to_vec()).prop_map(Inspect::Ask),
        any::<bool>().prop_map(Inspect::Watch),
        (bytes(), any::<bool>()).prop_map(|(text, failure)| Inspect::Event { text, failure }),
        (any::<u64>(), step()).prop_map(|(number, step)| Inspect::Visit(Visit { number, step })),
    ]
}

proptest! {
    #![proptest_config(config(200, 11))]

    #[test]
    fn orders_arrive_as_they_were_sent(
        from in addr(), to in addr(), numbers in any::<(u64, u64, u32, bool)>(), within in time(), plan in bytes(),
        config in bytes(), title in text(), argv in prop::collection::vec(bytes(), 0..3),
        env in prop::collection::vec((bytes(), bytes()), 0..3), ms in any::<u32>(),
    ) {
        let (mesh, call, per_host, exec) = numbers;
        let agents = Target::One(to);
        let spawn = SpawnProcs { mesh, call, per_host, exec, within, argv, env, plan, config, title };
        let frame = spawn.frame(from, &agents);
        prop_assert_eq!(ranks_of(&frame, 7), Some(0..per_host.min(7)));
        prop_assert_eq!(SpawnProcs::read(&frame), Some(spawn));
        let ranks = Region::whole(&Extent::new([("gpus", 4)]).unwrap());
        let stop = StopProcs { mesh, call, first: per_host, per_host, within, ranks };
        prop_assert_eq!(StopProcs::read(&stop.frame(from, &agents)), Some(stop));
        let stop = StopProc { within: Duration::from_millis(ms.into()) };
        prop_assert_eq!(StopProc::read(&stop.frame(from, to).header), stop);
        let watch = Watch::of(from);
        prop_assert_eq!(Watch::read(&watch.frame(from, to).header), watch);
        let fetch = Fetch { id: mesh, call };
        let read = Fetch::read(&fetch.frame(from, to).header);
        prop_assert_eq!(read, Some(fetch).filter(|_| call != 0));
        let hello = Hello { pid: ms };
        prop_assert_eq!(Hello::read(&hello.frame(from, to).header), hello);
    }

    #[test]
    fn lines_and_looks_arrive_as_they_were_sent(
        from in addr(), to in addr(), lines in lines(), inspect in inspect(), call in any::<(u64, u32)>(),
        news in holding(),
    ) {
        prop_assert_eq!(Lines::read(&lines.frame(from, to, None)), Some(lines));
        prop_assert_eq!(Inspect::read(&inspect.frame(from, to, None)), Some(inspect));
        let held = Held { call: call.0, place: call.1, news };
        prop_assert_eq!(Held::read(&held.frame(from, to)), Some(held));
    }

    #[test]
    fn ends_of_procs_arrive_as_they_were_sent(
        from in addr(), to in addr(), ended in ended(), reason in reason(), place in any::<(u64, u32, bool, u64)>(),
    ) {
        let goodbye = Goodbye { reason };
        prop_assert_eq!(Goodbye::read(&goodbye.frame(from, to)), Some(goodbye));
        let (mesh, rank, answer, calls) = place;
        let down = Down { who: ProcAddr { mesh, rank, host: from.host }, ended, answer, calls };
        prop_assert_eq!(Down::read(&down.frame(from, to)), Some(down));
    }

    #[test]
    fn refusals_arrive_as_they_were_sent(
        from in addr(), to in addr(), why in undelivered(), end in port_end(), ids in (1_u64.., any::<u32>(), any::<u64>(), any::<bool>()),
    ) {
        let (call, place, actor, response) = ids;
        let back = Undeliverable { call, place, actor, why };
        let frame = back.frame(from, to);
        let returned = Returned { actor, call, place, port_ended: back.why.is_end_of_port() };
        prop_assert_eq!(Returned::read(&frame.header), Ok(returned));
        prop_assert_eq!(Undeliverable::read(&frame), Some(back));
        let closed = Closed { port: PortAddr { owner: from, id: actor, place, response }, why: end };
        prop_assert_eq!(Closed::read(&closed.frame(to, from)), Some(closed));
    }

    #[test]
    fn what_is_told_of_hosts_arrives_as_it_was_sent(
        from in addr(), to in addr(), host in any::<u32>(), end in host_end(), report in report(), live in any::<bool>(),
        address in prop::option::of(text()), list in prop::collection::vec(any::<u8>(), 0..50),
    ) {
        let down = HostDown { host, end };
        prop_assert_eq!(HostDown::read(&down.frame(from, to, None)), Some(down));
        let lost = HostLost { host, report };
        prop_assert_eq!(HostLost::read(&lost.frame(from)), Some(lost));
        let standing = HostStanding { host, live };
        prop_assert_eq!(HostStanding::read(&standing.frame(from, to, None)), Some(standing));
        let whereabouts = Whereabouts { host, address };
        prop_assert_eq!(Whereabouts::read(&whereabouts.frame(from, to)), Some(whereabouts));
        let revoked = Revoked { list: list.into() };
        prop_assert_eq!(Revoked::read(&revoked.frame(from, to, None)), Some(revoked));
    }

    #[test]
    fn an_attachment_survives_the_way_and_a_piece_of_one_is_none(
        numbers in any::<(u64, u32, u32, u32, bool)>(), window in time(), patience in time(),
        below in prop::collection::vec((any::<u32>(), text()), 0..4), name in text(), pid in any::<u64>(),
    ) {
        let (call, base, count, fan_out, dialed) = numbers;
        let hold = window;
        let told = Attachment { call, base, count, fan_out, window, patience, hold, dialed, below: below.clone() };
        let raw = told.encode();
        prop_assert!((0..raw.len()).all(|cut| Attachment::decode(&raw[..cut]).is_none()));
        prop_assert_eq!(Attachment::decode(&raw), Some(told));
        let labels = below.iter().map(|(host, _)| (format!("l{host}"), name.clone())).collect();
        let resources = below.iter().map(|(host, _)| (format!("r{host}"), f64::from(*host) / 3.0)).collect();
        let traits = Traits::new(labels, resources).unwrap_or_default();
        let said = Introduction { name, pid, cpus: pid, traits };
        let raw = said.encode();
        prop_assert!((0..raw.len()).all(|cut| Introduction::decode(&raw[..cut]).is_none()));
        prop_assert_eq!(Introduction::decode(&raw), Some(said));
        let (mine, theirs) = (Duration::from_micros(pid >> 8), Terms { window: Duration::from_micros(pid >> 24) });
        prop_assert_eq!(Terms::decode(&theirs.encode()), Some(theirs));
        // Both ends agree on the same window, whoever asks, and no silence is tolerated for ever.
        let agreed = Terms::agree(mine.min(Duration::from_secs(86_400)), Some(theirs));
        prop_assert_eq!(agreed, Terms::agree(theirs.window.min(Duration::from_secs(86_400)), Some(Terms { window: mine })));
    }

    #[test]
    fn no_body_makes_a_reader_panic(body in prop::collection::vec(prop_oneof![any::<u8>(), 0_u8..20], 0..200)) {
        let me = ProcAddr::CONTROLLER;
        entry::look_into(&Frame::build_plain(Header::new(Kind::Down, me, me), None, b"", &body));
        entry::look_into(&Frame::build_plain(Header::new(Kind::Down, me, me), None, &body, b""));
    }
}

#[test]
fn each_agent_finds_its_ranks_by_its_place_among_those_that_were_told() {
    let agents = Target::Many(0, Region::whole(&Extent::new([("hosts", 3)]).unwrap()), Placement::Agents);
    let ranks = Region::whole(&Extent::new([("gpus", 12)]).unwrap());
    let order = StopProcs { mesh: 7, call: 1, first: 0, per_host: 4, within: Duration::ZERO, ranks };
    let order = order.frame(ProcAddr::CONTROLLER, &agents);
    let third = order.for_one(ProcAddr::agent(2), 2);
    assert_eq!(ranks_of(&third, 100), Some(8..12));
    assert_eq!(ranks_of(&order.for_one(ProcAddr::agent(2), u32::MAX), 100), None, "beyond all ranks");
    let hello = Hello { pid: 1 }.frame(ProcAddr::CONTROLLER, ProcAddr::CONTROLLER);
    assert_eq!(ranks_of(&hello, 100), None, "no order");
}

#[test]
fn a_code_of_a_newer_peer_is_a_reason_that_is_not_known() {
    let me = ProcAddr::CONTROLLER;
    let newer = Frame::build_plain(Header::new(Kind::Goodbye, me, me), None, b"", &[199, 1, 2, 3]);
    let Goodbye { reason } = Goodbye::read(&newer).unwrap();
    assert_eq!(reason, EndReason::Unknown(199));
    assert_eq!(reason.to_string(), "for a reason that this version of Mesh does not know (code 199)");
    assert_eq!(Ended::unmade(reason).kind(), EndKind::Unknown);
    let header = Returned { actor: 3, call: 1, place: 0, port_ended: false }.header(me, me);
    let newer = Frame::build_plain(header, None, b"", &[199]);
    assert_eq!(Undeliverable::read(&newer).unwrap().why, Undelivered::Unknown(199));
}

#[test]
fn the_kind_of_an_end_follows_from_its_status_and_its_reason() {
    let end = |exit, reason| Ended { pid: Some(7), exit, ..Ended::unmade(reason) };
    let of_host = |fate| EndReason::Host(HostEnd { fate, ..HostEnd::default() });
    for (ended, kind) in [
        (end(Exit::Code(78), EndReason::ConnectionClosed(0)), EndKind::Exited),
        (end(Exit::Code(78), EndReason::Bootstrap("raised".to_owned())), EndKind::BootstrapFailed),
        (end(Exit::Signal(9), EndReason::ConnectionClosed(0)), EndKind::Killed),
        (end(Exit::OutOfMemory, EndReason::Unstated), EndKind::OutOfMemory),
        (end(Exit::Unknown, EndReason::ConnectionBroke(104)), EndKind::ConnectionLost),
        (end(Exit::Unknown, EndReason::ForkServerEnded(3)), EndKind::ForkServerDied),
        (end(Exit::Unknown, EndReason::Late(Duration::ZERO, String::new())), EndKind::SpawnTimeout),
        (end(Exit::Unknown, EndReason::NotMade("no".to_owned())), EndKind::SpawnFailed),
        (end(Exit::Unknown, of_host(Fate::Silent)), EndKind::HostDead),
        (end(Exit::Unknown, of_host(Fate::Unreachable)), EndKind::HostUnreachable),
        (end(Exit::Unknown, of_host(Fate::NotAuthenticated)), EndKind::HostNotAuthenticated),
        (end(Exit::Unknown, of_host(Fate::Absent)), EndKind::HostAbsent),
    ] {
        assert_eq!(ended.kind(), kind, "{ended:?}");
        assert!(!ended.never_ran());
    }
    let late = Ended::unmade(EndReason::Late(Duration::from_secs(2), String::new()));
    assert!(late.never_ran() && !Ended { orderly: true, ..late }.never_ran());
    assert!(!Ended::unmade(EndReason::LongAgo).never_ran());
}

#[test]
fn ends_of_hosts_say_what_became_of_them() {
    let end = |fate| HostEnd { fate, label: "b7, tcp://b7:1".to_owned(), why: "x is dead: y".to_owned() };
    assert_eq!(end(Fate::Expelled).to_string(), "its host (b7, tcp://b7:1) is dead: x is dead: y");
    assert_eq!(end(Fate::Released).to_string(), "its host (b7, tcp://b7:1) was let go: x is dead: y");
    assert_eq!(HostEnd::absent("who?".to_owned()).to_string(), "who?");
    assert!(end(Fate::Released).ended().orderly && !end(Fate::Left).ended().orderly);
}

#[test]
fn what_is_said_of_a_host_has_bounds() {
    let label = |name: &str, value: &str| Traits::new(vec![(name.to_owned(), value.to_owned())], vec![]);
    let resource = |amount: f64| Traits::new(vec![], vec![("gpus".to_owned(), amount)]);
    assert!(label("zone", "").is_some() && label(&"n".repeat(Traits::LONGEST_NAME), "").is_some());
    assert!(label("", "a").is_none() && label(&"n".repeat(Traits::LONGEST_NAME + 1), "").is_none());
    assert!(label("zone", &"a".repeat(Traits::LONGEST_VALUE)).is_some());
    assert!(label("zone", &"a".repeat(Traits::LONGEST_VALUE + 1)).is_none());
    assert!(resource(0.0).is_some() && resource(f64::MAX).is_some());
    assert!(resource(-1.0).is_none() && resource(f64::NAN).is_none() && resource(f64::INFINITY).is_none());
    let many = |n: usize| (0..n).map(|n| (format!("l{n}"), String::new())).collect::<Vec<_>>();
    assert!(Traits::new(many(Traits::MOST), vec![]).is_some() && Traits::new(many(Traits::MOST + 1), vec![]).is_none());
}

#[test]
fn a_host_that_claims_a_million_labels_is_not_heard_out() {
    let most = Traits::new((0..Traits::MOST).map(|n| (format!("l{n:02}"), String::new())).collect(), vec![]).unwrap();
    let raw = Introduction { traits: most, ..Introduction::default() }.encode();
    // After an empty name and two numbers comes the number of labels.
    let count = 8 + 8 + 8;
    let mut forged = raw.to_vec();
    forged[count..count + 8].copy_from_slice(&1_000_000_u64.to_le_bytes());
    let label = forged[count + 8..count + 8 + 8 + 3 + 8].to_vec();
    forged.truncate(count + 8);
    (0..1_000_000).for_each(|_| forged.extend_from_slice(&label));
    assert!(Introduction::decode(&raw).is_some());
    assert!(Introduction::decode(&forged).is_none());
}
