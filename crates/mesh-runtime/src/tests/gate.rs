//! What a sender is told to do about a full mailbox.

use super::{options, soon};
use crate::completion::Fate;
use crate::gate::{Admission, Bid, Doubt, Gate, Receivers, Verdict};
use crate::runtime::{Later, Said};
use crate::{Runtime, Waited, Way};
use mesh_proto::{Credit, INITIAL_WINDOW, ProcAddr, Target};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ACTOR: u64 = 5;
/// An unknown process: it takes nothing, and returns nothing.
const SILENT: ProcAddr = ProcAddr { mesh: 99, rank: 0, host: 0 };
const COST: u64 = INITIAL_WINDOW;

struct Setting {
    runtime: Arc<Runtime>,
    target: Arc<Target>,
    gate: Gate,
}

impl Setting {
    fn new(to: ProcAddr, receivers: Receivers) -> Self {
        let runtime = Runtime::controller(options()).unwrap();
        Self { runtime, target: Arc::new(Target::One(to)), gate: Gate::new(ACTOR, receivers) }
    }

    /// A setting with a message under way that fills the mailbox.
    fn full(to: ProcAddr, receivers: Receivers) -> Self {
        let setting = Self::new(to, receivers);
        assert_eq!(setting.gate.pass(setting.bid()), Some(true));
        setting
    }

    fn bid(&self) -> Bid<'_> {
        let (runtime, target) = (&*self.runtime, &self.target);
        Bid { runtime, target, cost: COST, block: true, until: None, own: false }
    }

    fn ask(&self, bid: Bid<'_>, coroutine: bool) -> Verdict<'_> {
        self.gate.ask(bid, coroutine).unwrap()
    }

    fn outstanding(&self) -> u64 {
        self.runtime.meter(self.target.place(0).unwrap(), ACTOR).outstanding()
    }

    /// The mailbox has handled everything sent to it.
    fn make_room(&self) {
        let credit = Credit { handled: self.outstanding(), ..Credit::LAST };
        let credit = Credit { last: false, ..credit };
        let at = self.target.place(0).unwrap();
        self.runtime.meters.on_credit(at, ACTOR, credit);
    }

    /// A coroutine's message waits for room. Nothing is sent: there is nobody to take it.
    fn defer(&self) -> crate::Deferral {
        let Verdict::Later(later) = self.ask(self.bid(), true) else { panic!("there was room") };
        self.runtime.dispatch_later(Vec::new(), &self.target, ACTOR, later)
    }

    fn close(self) {
        self.runtime.close(Duration::ZERO);
    }
}

fn doubt(verdict: &Verdict<'_>) -> Option<Doubt> {
    match verdict {
        Verdict::Full(full) => full.doubt,
        other => panic!("{other:?} where the mailbox was full"),
    }
}

#[test]
fn a_message_that_fits_is_counted() {
    let setting = Setting::new(SILENT, Receivers::Actors);
    assert_eq!(setting.gate.pass(setting.bid()), Some(true));
    assert_eq!(setting.outstanding(), COST);
    assert_eq!(setting.gate.pass(setting.bid()), None);
    assert_eq!(setting.outstanding(), COST, "what does not pass is not counted");
    setting.make_room();
    assert!(matches!(setting.ask(setting.bid(), false), Verdict::Passes(true)));
    setting.close();
}

#[test]
fn a_thread_waits_for_room_at_another_process() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let Verdict::Full(full) = setting.ask(setting.bid(), false) else { panic!("there was room") };
    assert_eq!((full.index, full.level, full.doubt, full.is_behind), (0, (COST, INITIAL_WINDOW), None, false));
    setting.close();
}

#[test]
fn a_sender_that_would_not_wait_or_would_wait_for_itself_is_told() {
    let unwilling = Setting::full(SILENT, Receivers::Actors);
    let bid = Bid { block: false, ..unwilling.bid() };
    assert_eq!(doubt(&unwilling.ask(bid, false)), Some(Doubt::Unwilling));
    assert_eq!(doubt(&unwilling.ask(bid, true)), Some(Doubt::Unwilling), "a coroutine neither");
    unwilling.close();
    for (receivers, own, expected) in [
        (Receivers::Actors, false, Doubt::OwnProcess),
        (Receivers::Channel, false, Doubt::OwnChannel),
        (Receivers::Channel, true, Doubt::OwnProcess),
        (Receivers::Stream, false, Doubt::OwnProcess),
    ] {
        let setting = Setting::full(ProcAddr::CONTROLLER, receivers);
        assert_eq!(doubt(&setting.ask(Bid { own, ..setting.bid() }, false)), Some(expected));
        setting.close();
    }
}

#[test]
fn a_coroutine_sends_later_as_long_as_its_process_has_room_for_that() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let until = soon();
    let budget = options().link_budget as u64;
    let mut reserved = 0;
    let crowded = loop {
        match setting.ask(Bid { until, ..setting.bid() }, true) {
            Verdict::Later(later) => {
                assert_eq!((later.cost, later.until), (COST, until));
                assert_eq!(later.meters.map(|meters| meters.len()), Some(1));
                reserved += COST;
            }
            Verdict::Crowded { full, waiting, budget } => break (full.index, waiting, budget),
            other => panic!("{other:?} for a coroutine"),
        }
    };
    assert_eq!(crowded, (0, reserved, budget));
    assert!(matches!(setting.ask(Bid { own: true, ..setting.bid() }, true), Verdict::Later(_)));
    setting.close();
}

#[test]
fn a_thread_has_its_turn_behind_what_a_coroutine_has_sent() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let first = setting.defer();
    assert_eq!(setting.gate.pass(setting.bid()), None);
    let Verdict::Full(full) = setting.ask(setting.bid(), false) else { panic!("it overtakes") };
    assert!(full.is_behind, "BKL-1");
    let turn = setting.gate.turn(setting.bid()).unwrap();
    assert_eq!(turn.wait(true, false), Waited::NotYet);
    setting.make_room();
    let done = setting.runtime.wait_completion(&first.done, None, soon(), false, false, None);
    assert_eq!((done, first.done.fate()), (Waited::Ready, Some(Fate::Status(1))));
    setting.make_room();
    assert_eq!(turn.wait(false, false), Waited::Ready);
    assert_eq!(turn.leave(false), Some(true));
    assert_eq!(setting.outstanding(), COST);
    setting.close();
}

#[test]
fn a_thread_that_leaves_before_its_turn_counts_nothing() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let first = setting.defer();
    let bid = Bid { until: Some(Instant::now()), ..setting.bid() };
    let turn = setting.gate.turn(bid).unwrap();
    assert_eq!(turn.wait(false, false), Waited::NotYet);
    assert_eq!(turn.leave(false), None);
    assert!(setting.runtime.take_back(&first));
    setting.make_room();
    assert_eq!(setting.outstanding(), 0);
    setting.close();
}

#[test]
fn a_thread_that_is_interrupted_in_its_turn_gives_back_what_was_counted() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let first = setting.defer();
    let turn = setting.gate.turn(setting.bid()).unwrap();
    assert!(setting.runtime.take_back(&first));
    setting.make_room();
    assert_eq!(turn.wait(false, false), Waited::Ready);
    assert_eq!(setting.outstanding(), COST);
    assert_eq!(turn.leave(true), Some(true));
    assert_eq!(setting.outstanding(), 0);
    setting.close();
}

#[test]
fn a_closed_runtime_lets_nobody_wait() {
    let setting = Setting::full(SILENT, Receivers::Actors);
    let first = setting.defer();
    let turn = setting.gate.turn(setting.bid()).unwrap();
    setting.runtime.close(Duration::ZERO);
    assert_eq!(first.done.fate(), Some(Fate::Broken));
    assert_eq!(turn.wait(false, false), Waited::Ready);
    assert_eq!(turn.leave(false), Some(false), "not counted: sending it fails");
    assert!(setting.gate.turn(setting.bid()).is_err());
}

#[test]
fn how_a_call_has_failed_waits_for_no_room_and_overtakes_nothing() {
    let runtime = Runtime::controller(options()).unwrap();
    let target = Arc::new(Target::One(SILENT));
    let (value, error) = (Said { error: false, place: None }, Said { error: true, place: None });
    let way = Way::Response { call: 7, actor: ACTOR, index: 0, stream: true };
    let outlet = runtime.outlet(SILENT, way, false);
    let gate = Gate::of_port(&outlet);
    assert!(matches!(outlet.admission(&target, &error, 10, false), Admission::Free));
    let Admission::Bid(bid) = outlet.admission(&target, &value, 2 * COST as usize, false) else {
        panic!("values of a stream are counted");
    };
    assert_eq!(gate.pass(bid), Some(true), "an empty mailbox takes anything");
    let Verdict::Later(later) = gate.ask(bid, true).unwrap() else { panic!("there was room") };
    let waits = runtime.dispatch_later(Vec::new(), &target, gate.mailbox(), later);
    assert!(matches!(outlet.admission(&target, &error, 10, false), Admission::Later(Later { meters: None, .. })));
    assert!(runtime.take_back(&waits));
    let single = runtime.outlet(SILENT, Way::Response { call: 8, actor: ACTOR, index: 0, stream: false }, false);
    assert!(matches!(single.admission(&target, &value, 10, false), Admission::Free), "one answer is not counted");
    runtime.close(Duration::ZERO);
}
