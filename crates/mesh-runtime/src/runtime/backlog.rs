//! Messages that wait in this process for the room of their receivers, while whoever has sent them goes on.
//!
//! Whoever may not block has its message put here. The I/O thread sends it once the meters of its mailboxes let it
//! through and the queues on its way are within budget; what is sent to the same mailboxes later waits behind it, from
//! whichever thread it comes (BKL-1). A thread that may block waits here for its turn, and then sends by itself.
//!
//! BKL-3: a message that waits is looked at again whenever what has kept it back may have changed: it marks the meter
//! that is full, under that meter's lock, and the next change of a marked meter rings the I/O thread.
//!
//! The lock of the backlog is held while a message is sent, so that whoever finds nothing before its own message is
//! right. It is taken before all other locks, and by nobody who holds one. What is left of a message is seen to without it:
//! ports that were in one may have something to say that has to wait here.

use super::{Outgoing, Packed, Runtime, lock};
use crate::calls::Call;
use crate::completion::{Completion, Fate};
use crate::error::RuntimeError;
use crate::meter::Meter;
use mesh_proto::{ActorId, Backlog, CallId, Frame, Place, Target};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How soon a message is looked at again that waits for the queue on its way, of which nobody tells.
const LINK_PAUSE: Duration = Duration::from_millis(10);

/// With what a message is sent later.
#[derive(Debug, Default)]
pub struct Later {
    /// The meters of its mailboxes; none of a message that is not counted.
    pub meters: Option<Arc<[Arc<Meter>]>>,
    /// What it counts there, and has been reserved for it.
    pub cost: u64,
    /// When nobody wants the answer any more.
    pub until: Option<Instant>,
    /// The ports of calls that are in it.
    pub ports: Vec<Packed>,
    /// What people call its receivers, if there are such ports.
    pub who: String,
}

/// What somebody does who sends later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calling {
    /// A reply of each receiver is waited for.
    Each,
    /// As many as come.
    Stream,
    /// One, which the receivers combine.
    Reduced,
}

/// Something that waits for its turn. It is finished with [`Fate::Status`] once it has had it: 1 if what was waited for
/// is counted by meters.
#[derive(Clone, Debug)]
pub struct Deferral {
    /// None of a reply, which nobody but its caller gives up.
    number: Option<u64>,
    /// Finished when it waits no more.
    pub done: Arc<Completion>,
}

impl Deferral {
    /// A reply that waits for its caller.
    #[must_use]
    pub fn of_reply(done: Arc<Completion>) -> Self {
        Self { number: None, done }
    }
}

#[derive(Debug)]
struct Waiting {
    target: Arc<Target>,
    later: Later,
    /// One for each piece of joined receivers; none where a thread waits, and sends by itself.
    frames: Vec<Frame>,
    call: CallId,
    done: Option<Arc<Completion>>,
}

#[derive(Debug)]
struct State {
    backlog: Backlog<Waiting>,
    calls: HashMap<CallId, u64>,
    /// They are first everywhere, and wait for the queues on their way.
    on_links: Vec<u64>,
    left: Vec<Left>,
}

/// What is left to be done of a message that waits no more.
#[derive(Debug)]
struct Left {
    target: Arc<Target>,
    later: Later,
    done: Option<Arc<Completion>>,
    fate: Fate,
}

impl Left {
    fn see_to(&self) {
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

/// All that waits in a process.
#[derive(Debug)]
pub(crate) struct Deferred {
    /// How many wait: nobody is to take a lock as long as none does.
    count: AtomicUsize,
    state: Mutex<State>,
}

/// What keeps a message back.
enum Stuck {
    OnMeter,
    OnLink,
}

impl Deferred {
    pub(crate) fn new(budget: usize) -> Self {
        let backlog = Backlog::new(budget as u64);
        let state = State { backlog, calls: HashMap::new(), on_links: Vec::new(), left: Vec::new() };
        Self { count: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// How many messages wait, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.backlog.len(), state.backlog.bytes())
    }

    fn note(&self, state: &State) {
        self.count.store(state.backlog.len(), Ordering::SeqCst);
    }

    /// Changes what waits; then, without the lock, sees to what is left.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = lock(&self.state);
        let out = change(&mut state);
        self.note(&state);
        let left = std::mem::take(&mut state.left);
        drop(state);
        left.iter().for_each(Left::see_to);
        out
    }
}

fn places(target: &Target, actor: ActorId) -> impl Iterator<Item = Place> + '_ {
    target.mailboxes(actor)
}

impl Runtime {
    /// Whether any message waits here.
    pub fn defers(&self) -> bool {
        self.deferred.count.load(Ordering::SeqCst) > 0
    }

    /// The first of the receivers for whom messages wait here: what is sent to them now has to wait behind those.
    pub fn behind(&self, target: &Target, actor: ActorId) -> Option<usize> {
        if !self.defers() || self.is_forked() {
            return None;
        }
        lock(&self.deferred.state).backlog.blocks(places(target, actor))
    }

    /// Reserves room here for a message of `cost` bytes that is to be sent later; even if there is none, where `surely`.
    ///
    /// # Errors
    /// How many bytes wait here, and how many may, where there is no room.
    pub fn reserve(&self, cost: u64, surely: bool) -> Result<(), (u64, u64)> {
        let backlog = &mut lock(&self.deferred.state).backlog;
        if backlog.reserve(cost, surely) { Ok(()) } else { Err((backlog.bytes(), backlog.budget())) }
    }

    /// What was reserved is not needed.
    pub fn unreserve(&self, cost: u64) {
        lock(&self.deferred.state).backlog.release(cost);
    }

    /// As [`Runtime::call_on`], once there is room. There has to be a reservation for the message, unless it is not counted.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_later(
        &self,
        out: &Outgoing<'_>,
        target: &Arc<Target>,
        how: Calling,
        later: Later,
    ) -> Result<Arc<Call>, RuntimeError> {
        let opened = self.usable().and_then(|()| self.open(out.target.clone(), how == Calling::Stream));
        let call = match opened {
            Ok(call) => call,
            Err(error) => return Err(self.not_deferred(&later, error)),
        };
        if how == Calling::Reduced {
            call.mark_reduced(out.target.clone(), out.actor);
        }
        let frames = self.compose_all(&out.streamed(how == Calling::Stream), call.id);
        let waiting = Waiting { target: Arc::clone(target), later, frames, call: call.id, done: None };
        self.put_off(out.actor, waiting);
        Ok(call)
    }

    /// As [`Runtime::tell_on`], once there is room; otherwise as [`Runtime::call_later`].
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell_later(&self, out: &Outgoing<'_>, target: &Arc<Target>, later: Later) -> Result<Deferral, RuntimeError> {
        if let Err(error) = self.usable() {
            return Err(self.not_deferred(&later, error));
        }
        Ok(self.dispatch_later(self.compose_all(out, 0), target, out.actor, later))
    }

    /// Sends frames once there is room in these mailboxes.
    pub(crate) fn dispatch_later(
        &self,
        frames: Vec<Frame>,
        target: &Arc<Target>,
        mailbox: ActorId,
        later: Later,
    ) -> Deferral {
        let done = self.completion();
        let told = Some(Arc::clone(&done));
        let waiting = Waiting { target: Arc::clone(target), later, frames, call: 0, done: told };
        Deferral { number: Some(self.put_off(mailbox, waiting)), done }
    }

    fn not_deferred(&self, later: &Later, error: RuntimeError) -> RuntimeError {
        self.unreserve(later.cost);
        error
    }

    /// Has a thread wait for its turn: until nothing is before it, the queues on the way are within budget, and a message
    /// of `cost` bytes is let through by the meters, if there are any.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn turn(
        &self,
        target: &Arc<Target>,
        actor: ActorId,
        meters: Option<Arc<[Arc<Meter>]>>,
        cost: u64,
    ) -> Result<Deferral, RuntimeError> {
        self.usable()?;
        let done = self.completion();
        let later = Later { meters, cost, ..Later::default() };
        let told = Some(Arc::clone(&done));
        let waiting = Waiting { target: Arc::clone(target), later, frames: Vec::new(), call: 0, done: told };
        Ok(Deferral { number: Some(self.put_off(actor, waiting)), done })
    }

    fn put_off(&self, actor: ActorId, waiting: Waiting) -> u64 {
        let to: Box<[Place]> = places(&waiting.target, actor).collect();
        // Its own memory is the sender's where that waits itself.
        let held = if waiting.frames.is_empty() { 0 } else { waiting.later.cost };
        let call = waiting.call;
        let number = self.deferred.change(|state| {
            let number = state.backlog.push(to, held, waiting);
            if call != 0 {
                state.calls.insert(call, number);
            }
            // Before it is looked at, as others are to see it from here on.
            self.deferred.note(state);
            // There may be room by now. From here on somebody tells of it.
            self.send_ready(state, vec![number]);
            // Whoever closes may have passed over it.
            if self.is_closed() {
                self.drop_all(state);
            }
            number
        });
        if self.defers() {
            self.reactor.ring_io();
        }
        number
    }

    /// Whoever sends gives it up; false if it is on its way, or was refused.
    pub fn take_back(&self, deferral: &Deferral) -> bool {
        self.take_out(|_| deferral.number)
    }

    /// Whether a call waits here for its turn.
    pub fn waits_here(&self, call: CallId) -> bool {
        self.defers() && !self.is_forked() && lock(&self.deferred.state).calls.contains_key(&call)
    }

    /// The same by the number of the call.
    pub(crate) fn take_back_call(&self, call: CallId) -> bool {
        self.defers() && self.take_out(|state| state.calls.get(&call).copied())
    }

    fn take_out(&self, find: impl FnOnce(&State) -> Option<u64>) -> bool {
        if self.is_forked() {
            return false;
        }
        self.deferred.change(|state| {
            let mut freed = Vec::new();
            let Some(waiting) = find(state).and_then(|number| state.backlog.remove(number, &mut freed)) else {
                return false;
            };
            self.forget(state, waiting, Fate::Cancelled);
            self.send_ready(state, freed);
            true
        })
    }

    /// A message is not sent after all.
    fn forget(&self, state: &mut State, waiting: Waiting, fate: Fate) {
        let Waiting { target, later, frames, call, done } = waiting;
        state.calls.remove(&call);
        for frame in frames.iter().filter(|frame| frame.header.is_owed()) {
            self.memory.let_go(frame);
        }
        state.left.push(Left { target, later, done, fate });
    }

    /// Meters have changed that somebody waits for: the I/O thread's turn. Says when it wants another one.
    pub(super) fn backlog_turn(&self) -> Option<Instant> {
        let changed = self.meters.take_changed();
        if !self.defers() {
            return None;
        }
        let on_links = self.deferred.change(|state| {
            let mut ready: Vec<u64> = changed.into_iter().filter_map(|place| state.backlog.first(place)).collect();
            ready.append(&mut state.on_links);
            self.send_ready(state, ready);
            state.on_links.len()
        });
        (on_links > 0).then(|| Instant::now() + LINK_PAUSE)
    }

    /// Sends those of these that nothing keeps back, and then those that they have kept back.
    fn send_ready(&self, state: &mut State, mut ready: Vec<u64>) {
        while let Some(number) = ready.pop() {
            let Some(waiting) = state.backlog.ready(number) else { continue };
            match self.let_through(waiting) {
                Err(Stuck::OnMeter) => {}
                Err(Stuck::OnLink) => state.on_links.push(number),
                Ok(counted) => {
                    if let Some(waiting) = state.backlog.remove(number, &mut ready) {
                        self.send_now(state, waiting, counted);
                    }
                }
            }
        }
    }

    fn let_through(&self, waiting: &Waiting) -> Result<bool, Stuck> {
        if self.admit(&waiting.target).is_err() {
            return Err(Stuck::OnLink);
        }
        let Some(meters) = &waiting.later.meters else { return Ok(false) };
        loop {
            match self.admit_all(meters, waiting.later.cost) {
                Ok(counted) => return Ok(counted),
                Err(full) if meters[full].mark(waiting.later.cost) => return Err(Stuck::OnMeter),
                Err(_) => {}
            }
        }
    }

    fn send_now(&self, state: &mut State, waiting: Waiting, counted: bool) {
        let Waiting { target, later, frames, call, done } = waiting;
        state.calls.remove(&call);
        for mut frame in frames {
            frame.header.set_charged(counted);
            frame.header.set_deadline_ms(later.until.map_or(0, millis));
            self.dispatch(frame, None);
        }
        state.left.push(Left { target, later, done, fate: Fate::Status(i32::from(counted)) });
    }

    /// The runtime closes: nothing is sent any more.
    pub(super) fn close_backlog(&self) {
        self.deferred.change(|state| self.drop_all(state));
    }

    fn drop_all(&self, state: &mut State) {
        for waiting in state.backlog.clear() {
            self.forget(state, waiting, Fate::Broken);
        }
        state.on_links.clear();
    }
}

/// A deadline as messages carry it: rounded up, and never 0, which means none.
pub(crate) fn millis(until: Instant) -> u32 {
    let left = until.saturating_duration_since(Instant::now());
    u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}
