//! Messages: one side reads what the other writes, and any other header is refused (MSG-1).

use crate::support::{addr, config, entry, frame, header, raw};
use mesh_proto::messages::{
    Answer, Asked, Call, Cancel, Cancelled, Extend, Failure, Gathered, Meaning, Name, Partial, Post, ProcUp, Reply,
    Request, Returned, Spawn, SpawnPart, StopActor, Task, Tell, Unlooked, Unseen, merged_call,
};
use mesh_proto::{Credit, Flow, Frame, Header, Kind, ProcAddr, Progress, REPLIES, SPAWNS, Sharing};
use proptest::prelude::*;

fn answer() -> impl Strategy<Value = Answer> {
    prop::sample::select(vec![Answer::Value, Answer::Combined, Answer::More, Answer::Raised, Answer::Dead])
}

fn flow() -> impl Strategy<Value = Flow> {
    let credit = (0..REPLIES, any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(mailbox, handled, units, last)| {
        Flow::Credit { mailbox, credit: Credit { handled, window: u64::from(units) * 1024, last } }
    });
    let progress =
        (prop_oneof![Just(REPLIES), Just(SPAWNS)], any::<u64>()).prop_map(|(what, count)| Progress { what, count });
    prop_oneof![
        credit,
        (0..REPLIES).prop_map(|mailbox| Flow::Question { mailbox }),
        progress.clone().prop_map(Flow::Asks),
        progress.clone().prop_map(Flow::HasRead),
        progress.prop_map(Flow::ReaderEnded),
    ]
}

/// Anything that a message can say.
fn meaning() -> impl Strategy<Value = Meaning> {
    let what = prop::sample::select(vec![
        Cancelled::Call,
        Cancelled::Combined,
        Cancelled::Gathering,
        Cancelled::Unbegun,
        Cancelled::Task,
    ]);
    let ids = (1_u64.., 1_u64.., any::<u32>(), any::<bool>());
    (ids, any::<u64>(), answer(), what, flow()).prop_flat_map(
        |((actor, call, place, yes), any_call, answer, what, flow)| {
            let all = vec![
                Meaning::Spawn(Spawn { actor, call: any_call, place, part: SpawnPart::Whole }),
                Meaning::Spawn(Spawn { actor, call: 0, place, part: SpawnPart::Announced }),
                Meaning::Spawn(Spawn { actor, call: any_call, place, part: SpawnPart::Arguments }),
                Meaning::Call(Call { actor, call, place, stream: yes, task: None }),
                Meaning::Call(Call { actor, call, place, stream: yes, task: Some(Task::Next) }),
                Meaning::Call(Call { actor, call, place, stream: yes, task: Some(Task::Ahead) }),
                Meaning::Tell(Tell { actor, place }),
                Meaning::Reply(Reply { actor, call, place, answer }),
                Meaning::Undeliverable(Returned { actor, call, place, port_ended: yes }),
                Meaning::StopActor(StopActor { actor, call: any_call, place }),
                Meaning::Cancel(Cancel { actor, call, place, what }),
                Meaning::Gathered(Gathered { actor, call }),
                Meaning::Post(Post { port: actor, error: yes, rank: place }),
                Meaning::Credit(flow),
                Meaning::Failure(Failure { owner: any_call }),
                Meaning::Partial(Partial { actor, call, place }),
                Meaning::Extend(Extend { call: any_call, place }),
            ];
            prop::sample::select(all)
        },
    )
}

proptest! {
    #![proptest_config(config(3_000, 91))]

    #[test]
    fn a_message_says_what_it_was_made_to_say(
        said in meaning(), from in addr(), to in addr(), sole in any::<bool>(), charged in any::<bool>(), ms in any::<u32>(),
    ) {
        let mut header = said.header(from, to).unwrap();
        // The frame's own flags change nothing.
        header.set_sharing(Sharing { sole, shared: !sole });
        header.set_charged(charged);
        header.set_abroad();
        header.set_printed();
        header.set_quiet(charged);
        header.set_deadline_ms(ms);
        let header = Header::decode(&header.encode()).unwrap();
        prop_assert_eq!(Meaning::of(&header), Ok(said));
        prop_assert_eq!((header.src, header.dst), (from, to));
        prop_assert_eq!(header.sharing(), Sharing { sole, shared: !sole });
        prop_assert_eq!((header.is_charged(), header.is_abroad(), header.is_quiet()), (charged, true, charged));
        prop_assert_eq!(header.deadline().is_some(), ms != 0);
        // An answer to it finds its call.
        if let Some(asked) = Asked::of(&header) {
            prop_assert_eq!((asked.by, asked.actor, asked.call, asked.place), (from, said.actor(), said.call(), said.place()));
        }
        prop_assert!(merged_call(&header).is_none_or(|call| call == said.call() && call != 0));
    }

    #[test]
    fn of_any_header_a_message_is_made_that_says_the_same_again_or_none(header in header()) {
        match Meaning::of(&header) {
            Ok(said) => if let Some(mut again) = said.header(header.src, header.dst) {
                again.set_sharing(header.sharing());
                again.set_charged(header.is_charged());
                if header.carries_refs() {
                    again.set_carries_refs();
                }
                if header.is_abroad() {
                    again.set_abroad();
                }
                again.set_distant(header.is_distant());
                if header.has_printed() {
                    again.set_printed();
                }
                again.set_quiet(header.is_quiet());
                again.set_deadline_ms(header.deadline().map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap()));
                // All fields but the place, in kinds that have none.
                let mut bytes = header.encode();
                if matches!(said, Meaning::Gathered(_) | Meaning::Failure(_)) {
                    bytes[60..64].fill(0);
                }
                prop_assert_eq!(again.encode(), bytes);
            },
            Err(error) => {
                prop_assert_eq!(error.kind, header.kind);
                prop_assert_eq!(error.to_string(), format!("a frame of kind {:?} {}", header.kind, error.what));
            }
        }
    }

    #[test]
    fn any_frame_can_be_looked_into(frame in frame()) {
        entry::look_into(&frame);
    }

    #[test]
    fn a_name_says_what_it_was_made_to_say(
        what in prop::collection::vec(1_u8.., 0..20), shape in prop::collection::vec(1_u8.., 0..20),
        context in prop::option::of(prop::collection::vec(1_u8.., 0..20)), any in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let name = Name { what: &what, shape: &shape, context: context.as_deref() };
        let bytes = name.to_bytes();
        prop_assert_eq!(Name::read(&bytes), name);
        prop_assert_eq!(Name::what(&bytes), &what[..]);
        // Any bytes are a name.
        let read = Name::read(&any);
        prop_assert_eq!(read.what, Name::what(&any));
    }

    #[test]
    fn the_caller_of_a_share_is_the_one_that_was_named(caller in addr(), any in prop::collection::vec(any::<u8>(), 0..40)) {
        prop_assert_eq!(Partial::caller_in(Partial::name(caller).as_bytes()), Some(caller));
        if let Some(read) = Partial::caller_in(&any) {
            prop_assert_eq!(Partial::caller_in(Partial::name(read).as_bytes()), Some(read));
        }
    }

    #[test]
    fn the_shape_of_a_value_s_sender_is_the_one_that_was_named(shape in prop::collection::vec(1_u8.., 0..40)) {
        let name = Post::name(&shape);
        prop_assert_eq!(name.len(), Post::name_len(&shape));
        prop_assert_eq!(Post::shape_in(&name), Some(&shape[..]));
    }

    #[test]
    fn a_proc_that_is_up_is_the_one_that_said_so(proc in addr(), call in 1_u64.., pid in any::<u32>(), to in addr()) {
        let up = ProcUp { proc: ProcAddr { mesh: proc.mesh.max(1), ..proc }, call, pid };
        let frame = up.frame(to);
        prop_assert_eq!(ProcUp::read(&frame), Some(up));
        // In another proc's name, or without a process id, it is an answer like any other.
        let mut other = frame.clone();
        other.header.src.rank ^= 1;
        prop_assert_eq!(ProcUp::read(&other), None);
        prop_assert_eq!(ProcUp::read(&Frame::build(frame.header, None, b"", &[])), None);
    }
}

const ME: ProcAddr = ProcAddr::CONTROLLER;

#[test]
fn headers_that_nobody_makes_are_refused() {
    let call = Call { actor: 5, call: 7, place: 1, stream: false, task: None }.header(ME, ME);
    let reply = Reply { actor: 5, call: 7, place: 1, answer: Answer::Value }.header(ME, ME);
    let tell = Tell { actor: 5, place: 1 }.header(ME, ME);
    let cancel = Cancel { actor: 5, call: 7, place: 1, what: Cancelled::Call }.header(ME, ME);
    let (error, dead, more, end, stream, last, question) = (1, 4, 1 << 8, 1 << 9, 1 << 10, 1 << 14, 1 << 13);
    // Flags, actor, call and place, and the refusal.
    for (header, numbers, why) in [
        (call, (0, 5, 0, 1), "names no call"),
        (call, (stream | error, 5, 7, 1), "has a flag that means nothing there"),
        (call, (question, 5, 7, 1), "has a flag that means nothing there"),
        (tell, (0, 5, 7, 1), "names a call that nobody waits for"),
        (tell, (stream, 5, 0, 1), "has a flag that means nothing there"),
        (reply, (0, 5, 0, 1), "names no call"),
        (reply, (more | error, 5, 7, 1), "is several answers in one"),
        (reply, (dead, 5, 7, 1), "is several answers in one"),
        (reply, (end, 5, 7, 1), "has a flag that means nothing there"),
        (cancel, (end, 5, 7, 1), "gives up nothing"),
        (cancel, (0, 5, 0, 1), "names no call"),
        (Header::new(Kind::Spawn, ME, ME), (0, 0, 7, 1), "names no actor"),
        (Header::new(Kind::Post, ME, ME), (0, 0, 0, 1), "names no port"),
        (Header::new(Kind::Post, ME, ME), (0, 5, 7, 1), "names a call that nobody waits for"),
        (Header::new(Kind::Extend, ME, ME), (0, 5, 7, 1), "is for an actor"),
        (Header::new(Kind::Partial, ME, ME), (0, 5, 0, 1), "names no call"),
        (Header::new(Kind::Gathered, ME, ME), (0, 5, 0, 1), "names no call"),
        (Header::new(Kind::Undeliverable, ME, ME), (0, 5, 0, 1), "names no call"),
        (Header::new(Kind::Failure, ME, ME), (0, 5, 7, 0), "names a call that nobody waits for"),
        (Header::new(Kind::Credit, ME, ME), (question | last, 5, 0, 0), "has a flag that means nothing there"),
        (Header::new(Kind::Credit, ME, ME), (question, 5, 9, 0), "asks and answers in one"),
    ] {
        let header = raw(header, (numbers.0, numbers.1, numbers.2, numbers.3, 0));
        let error = Meaning::of(&header).unwrap_err();
        assert_eq!((error.kind, error.what), (header.kind, why));
        assert_eq!(error.to_string(), format!("a frame of kind {:?} {why}", header.kind));
    }
}

#[test]
fn a_frame_whose_name_is_none_of_its_kind_is_refused() {
    let share = Partial { actor: 5, call: 7, place: 1 }.header(ME, ME);
    for name in [&b""[..], b"1.2", b"1.2.3.4", b"1.2.x", b"-1.2.3", b"1.2.4294967296", b"\xff\0"] {
        assert!(Meaning::read(&Frame::build_plain(share, None, name, b"")).is_err(), "{name:?}");
    }
    let named = Partial::name(ProcAddr { mesh: 9, rank: 8, host: 7 });
    assert!(Meaning::read(&Frame::build_plain(share, None, named.as_bytes(), b"")).is_ok());
    let value = Post { port: 5, error: false, rank: 3 }.header(ME, ME);
    assert!(Meaning::read(&Frame::build_plain(value, None, b"rank\0gpus=2", b"")).is_err());
    for name in [Vec::new(), Post::name(b"gpus=2"), Post::name(b"")] {
        assert!(Meaning::read(&Frame::build_plain(value, None, &name, b"")).is_ok(), "{name:?}");
    }
}

#[test]
fn what_programs_send_is_of_the_kind_that_they_ask_for() {
    let kind = |request: Request, call| request.header(5, call, 2, ME, ME).kind;
    assert_eq!((kind(Request::CALL, 7), kind(Request::CALL, 0)), (Kind::Call, Kind::Tell));
    assert_eq!(kind(Request::Call { stream: true, task: None }, 0), Kind::Tell);
    assert_eq!(kind(Request::TASK, 0), Kind::Tell);
    let streamed = Call::read(&Request::Call { stream: true, task: None }.header(5, 7, 2, ME, ME)).unwrap();
    assert_eq!(streamed, Call { actor: 5, call: 7, place: 2, stream: true, task: None });
    let ahead = Call::read(&Request::TASK_AHEAD.header(5, 7, 2, ME, ME)).unwrap();
    assert_eq!(ahead, Call { actor: 5, call: 7, place: 2, stream: false, task: Some(Task::Ahead) });
    for (request, kind_of_it) in [
        (Request::Spawn, Kind::Spawn),
        (Request::StopActor, Kind::StopActor),
        (Request::Failure, Kind::Failure),
        (Request::Inspect, Kind::Inspect),
        (Request::Extend, Kind::Extend),
    ] {
        assert_eq!((kind(request, 0), kind(request, 7), request.is_call()), (kind_of_it, kind_of_it, false));
        assert!(Meaning::of(&request.header(5, 0, 2, ME, ME)).is_ok());
    }
}

#[test]
fn what_a_process_tells_itself_does_not_travel() {
    for what in [Unlooked::Raised, Unlooked::Returned, Unlooked::PortEnded] {
        let unseen = Unseen { others: 3, what };
        let frame = unseen.frame(ME, Name { shape: b"trainer", ..Name::of(b"step") }, b"why");
        assert_eq!(Meaning::of(&frame.header), Ok(Meaning::Unseen(unseen)));
        assert_eq!(Meaning::of(&frame.header).unwrap().header(ME, ME), None);
        assert!(Header::decode(&frame.header.encode()).is_err(), "no link takes it");
    }
}
