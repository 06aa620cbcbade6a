//! Messages that wait in this process until their receivers have room, while their senders continue.
//!
//! A sender that may not block puts its message here (`mesh_proto::Backlog`, BKL-1, BKL-2). The I/O thread sends it
//! once the meters of its mailboxes let it through and the queues on the way are within budget. Whatever any thread
//! sends to the same mailboxes later waits behind it. A thread that may block waits here for its turn, and then sends
//! by itself.
//!
//! BKL-3: a waiting message is examined again whenever the reason for its waiting may be gone. It marks the full meter,
//! under that meter's lock, and the next change of a marked meter wakes the I/O thread.
//!
//! The lock is held while a message is sent, so a sender that finds nothing ahead of its own message is right. It is
//! taken before all other locks, and by no thread that holds one. Whatever is left to do for a sent message is done
//! without it, because ports in that message may have to send something that must wait here.

use crate::completion::{Completion, Fate};
use crate::dispatch::Dispatch;
use crate::locks::lock;
use crate::meter::{Meter, Meters};
use crate::reactor::Reactor;
use crate::shm::Memory;
use crate::standing::Standing;
use mesh_proto::{ActorId, Backlog, CallId, Frame, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When to look again at a message that waits for a queue on its way: nothing reports when that has room.
const QUEUE_PAUSE: Duration = Duration::from_millis(10);

/// A port of a call in a waiting message.
pub(crate) trait Enclosed {
    /// The message was sent to `to`, which people call `who`.
    fn sent(&self, to: &Target, who: &str);
    /// The message was not sent.
    fn unsent(&self);
}

/// What a message needs to be sent later.
#[derive(Debug)]
pub struct Later<E> {
    /// The meters of its mailboxes; none for a message that is not counted.
    pub meters: Option<Arc<[Arc<Meter>]>>,
    /// What it costs there, and what was reserved for it.
    pub cost: u64,
    /// When nobody wants the answer any more.
    pub until: Option<Instant>,
    /// The ports of calls in it.
    pub ports: Vec<E>,
    /// What people call its receivers, if there are such ports.
    pub who: String,
}

impl<E> Default for Later<E> {
    fn default() -> Self {
        Self { meters: None, cost: 0, until: None, ports: Vec::new(), who: String::new() }
    }
}

/// A message that waits for its turn. Finished with [`crate::Fate::Status`] once it has had it: 1 if meters count it.
#[derive(Clone, Debug)]
pub struct Deferral {
    /// None for a reply, which only its caller can give up.
    number: Option<u64>,
    /// Finished when it no longer waits.
    pub done: Arc<Completion>,
}

impl Deferral {
    /// A reply that waits for its caller.
    #[must_use]
    pub fn of_reply(done: Arc<Completion>) -> Self {
        Self { number: None, done }
    }
}

/// The way out for waiting messages.
pub(crate) trait Ways: Dispatch {
    /// The ports of calls that messages carry.
    type Enclosed: Enclosed;

    /// Whether the queues on the way to all of these are within budget.
    fn is_clear(&self, target: &Target) -> bool;
}

/// A waiting message, or a thread's turn.
#[derive(Debug)]
pub(crate) struct Delayed<E> {
    pub(crate) target: Arc<Target>,
    pub(crate) later: Later<E>,
    /// One per piece of joined receivers; none for a waiting thread, which sends by itself.
    pub(crate) frames: Vec<Frame>,
    /// 0 if nobody waits for an answer.
    pub(crate) call: CallId,
    pub(crate) done: Option<Arc<Completion>>,
}

#[derive(Debug)]
struct State<E> {
    backlog: Backlog<Delayed<E>>,
    calls: HashMap<CallId, u64>,
    /// First everywhere, but waiting for the queues on their way.
    on_queues: Vec<u64>,
    left: Vec<Left<E>>,
}

/// What is left to do for a message that no longer waits.
#[derive(Debug)]
struct Left<E> {
    target: Arc<Target>,
    later: Later<E>,
    done: Option<Arc<Completion>>,
    fate: Fate,
}

impl<E: Enclosed> Left<E> {
    fn finish(&self) {
        for port in &self.later.ports {
            match self.fate {
                Fate::Status(_) => port.sent(&self.target, &self.later.who),
                _ => port.unsent(),
            }
        }
        if let Some(done) = &self.done {
            done.finish(self.fate);
        }
    }
}

/// Why a message cannot be sent yet.
enum Stuck {
    OnMeter,
    OnQueue,
}

/// Everything that waits in a process. See the module.
#[derive(Debug)]
pub(crate) struct Deferred<E> {
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    memory: Arc<Memory>,
    meters: Arc<Meters>,
    /// How many wait. While none does, the lock need not be taken.
    count: AtomicUsize,
    state: Mutex<State<E>>,
}

impl<E: Enclosed> Deferred<E> {
    /// For at most `budget` waiting bytes.
    pub(crate) fn new(
        budget: usize,
        reactor: &Arc<Reactor>,
        standing: &Arc<Standing>,
        memory: &Arc<Memory>,
        meters: &Arc<Meters>,
    ) -> Self {
        let backlog = Backlog::new(budget as u64);
        let state = State { backlog, calls: HashMap::new(), on_queues: Vec::new(), left: Vec::new() };
        Self {
            reactor: Arc::clone(reactor),
            standing: Arc::clone(standing),
            memory: Arc::clone(memory),
            meters: Arc::clone(meters),
            count: AtomicUsize::new(0),
            state: Mutex::new(state),
        }
    }

    /// Whether anything waits.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How many messages wait, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.backlog.len(), state.backlog.bytes())
    }

    /// The first of the receivers for which messages wait.
    pub(crate) fn behind(&self, target: &Target, mailbox: ActorId) -> Option<usize> {
        if !self.any() || self.standing.is_forked() {
            return None;
        }
        lock(&self.state).backlog.blocks(target.mailboxes(mailbox))
    }

    /// Whether a call waits for its turn.
    pub(crate) fn has_call(&self, call: CallId) -> bool {
        self.any() && !self.standing.is_forked() && lock(&self.state).calls.contains_key(&call)
    }

    /// Reserves room for a message of `cost` bytes; with `surely` even if there is none.
    ///
    /// # Errors
    /// How many bytes wait, and how many may, if there is no room.
    pub(crate) fn reserve(&self, cost: u64, surely: bool) -> Result<(), (u64, u64)> {
        let backlog = &mut lock(&self.state).backlog;
        if backlog.reserve(cost, surely) { Ok(()) } else { Err((backlog.bytes(), backlog.budget())) }
    }

    /// Releases an unneeded reservation.
    pub(crate) fn release(&self, cost: u64) {
        lock(&self.state).backlog.release(cost);
    }

    fn note(&self, state: &State<E>) {
        self.count.store(state.backlog.len(), Ordering::SeqCst);
    }

    /// Changes what waits; then, without the lock, does what is left to do.
    fn change<T>(&self, change: impl FnOnce(&mut State<E>) -> T) -> T {
        let mut state = lock(&self.state);
        let out = change(&mut state);
        self.note(&state);
        let left = std::mem::take(&mut state.left);
        drop(state);
        left.iter().for_each(Left::finish);
        out
    }

    /// Sends frames once there is room in these mailboxes. Requires a reservation, unless they are not counted.
    pub(crate) fn send(
        &self,
        ways: &impl Ways<Enclosed = E>,
        frames: Vec<Frame>,
        target: &Arc<Target>,
        mailbox: ActorId,
        later: Later<E>,
    ) -> Deferral {
        let done = Completion::new(&self.reactor, &self.standing);
        let told = Some(Arc::clone(&done));
        let delayed = Delayed { target: Arc::clone(target), later, frames, call: 0, done: told };
        Deferral { number: Some(self.add(ways, mailbox, delayed)), done }
    }

    /// Makes something wait. Returns its number.
    pub(crate) fn add(&self, ways: &impl Ways<Enclosed = E>, mailbox: ActorId, delayed: Delayed<E>) -> u64 {
        let to = delayed.target.mailboxes(mailbox).collect();
        // A waiting thread keeps its message itself.
        let held = if delayed.frames.is_empty() { 0 } else { delayed.later.cost };
        let call = delayed.call;
        let number = self.change(|state| {
            let number = state.backlog.push(to, held, delayed);
            if call != 0 {
                state.calls.insert(call, number);
            }
            // Before its first attempt: from here on other senders must see it.
            self.note(state);
            // There may be room by now. If not, a meter is marked from here on.
            self.send_ready(ways, state, vec![number]);
            // A closing thread may have passed over it.
            if self.standing.is_closed() {
                self.drop_all(state);
            }
            number
        });
        if self.any() {
            self.reactor.ring_io();
        }
        number
    }

    /// Gives up a message or a turn. False if it has had its turn, or was dropped.
    pub(crate) fn take_back(&self, ways: &impl Ways<Enclosed = E>, deferral: &Deferral) -> bool {
        self.take_out(ways, |_| deferral.number)
    }

    /// Gives up a call.
    pub(crate) fn take_back_call(&self, ways: &impl Ways<Enclosed = E>, call: CallId) -> bool {
        self.any() && self.take_out(ways, |state| state.calls.get(&call).copied())
    }

    fn take_out(&self, ways: &impl Ways<Enclosed = E>, find: impl FnOnce(&State<E>) -> Option<u64>) -> bool {
        if self.standing.is_forked() {
            return false;
        }
        self.change(|state| {
            let mut freed = Vec::new();
            let Some(delayed) = find(state).and_then(|number| state.backlog.remove(number, &mut freed)) else {
                return false;
            };
            self.forget(state, delayed, Fate::Cancelled);
            self.send_ready(ways, state, freed);
            true
        })
    }

    /// Gives up a message that is not sent after all.
    fn forget(&self, state: &mut State<E>, delayed: Delayed<E>, fate: Fate) {
        let Delayed { target, later, frames, call, done } = delayed;
        state.calls.remove(&call);
        for frame in frames.iter().filter(|frame| frame.header.is_owed()) {
            self.memory.let_go(frame);
        }
        state.left.push(Left { target, later, done, fate });
    }

    /// Sends what changed meters let through, on the I/O thread's turn. Returns when it wants another one.
    pub(crate) fn turn(&self, ways: &impl Ways<Enclosed = E>) -> Option<Instant> {
        let changed = self.meters.take_changed();
        if !self.any() {
            return None;
        }
        let on_queues = self.change(|state| {
            let mut ready: Vec<u64> = changed.into_iter().filter_map(|place| state.backlog.first(place)).collect();
            ready.append(&mut state.on_queues);
            self.send_ready(ways, state, ready);
            state.on_queues.len()
        });
        (on_queues > 0).then(|| Instant::now() + QUEUE_PAUSE)
    }

    /// Sends those of these that may go, and then those behind them.
    fn send_ready(&self, ways: &impl Ways<Enclosed = E>, state: &mut State<E>, mut ready: Vec<u64>) {
        while let Some(number) = ready.pop() {
            let Some(delayed) = state.backlog.ready(number) else { continue };
            match self.let_through(ways, delayed) {
                Err(Stuck::OnMeter) => {}
                Err(Stuck::OnQueue) => state.on_queues.push(number),
                Ok(counted) => {
                    if let Some(delayed) = state.backlog.remove(number, &mut ready) {
                        send_now(ways, state, delayed, counted);
                    }
                }
            }
        }
    }

    fn let_through(&self, ways: &impl Ways<Enclosed = E>, delayed: &Delayed<E>) -> Result<bool, Stuck> {
        if !ways.is_clear(&delayed.target) {
            return Err(Stuck::OnQueue);
        }
        let Some(meters) = &delayed.later.meters else { return Ok(false) };
        loop {
            match self.meters.admit_all(meters, delayed.later.cost) {
                Ok(counted) => return Ok(counted),
                Err(full) if meters[full].mark(delayed.later.cost) => return Err(Stuck::OnMeter),
                Err(_) => {}
            }
        }
    }

    /// The runtime closes: drops what waits.
    pub(crate) fn close(&self) {
        self.change(|state| self.drop_all(state));
    }

    fn drop_all(&self, state: &mut State<E>) {
        for delayed in state.backlog.clear() {
            self.forget(state, delayed, Fate::Broken);
        }
        state.on_queues.clear();
    }
}

fn send_now<E: Enclosed>(ways: &impl Ways<Enclosed = E>, state: &mut State<E>, delayed: Delayed<E>, counted: bool) {
    let Delayed { target, later, frames, call, done } = delayed;
    state.calls.remove(&call);
    for mut frame in frames {
        frame.header.set_charged(counted);
        frame.header.set_deadline_ms(later.until.map_or(0, millis));
        ways.dispatch(frame);
    }
    state.left.push(Left { target, later, done, fate: Fate::Status(i32::from(counted)) });
}

/// A deadline as messages carry it: rounded up, and never 0, which means none.
pub(crate) fn millis(until: Instant) -> u32 {
    let left = until.saturating_duration_since(Instant::now());
    u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}
