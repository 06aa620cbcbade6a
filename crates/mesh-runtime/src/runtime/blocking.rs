//! Blocking until something arrives: [`Waiting`](super::waiting::Waiting) knows how, and the runtime takes what arrives
//! meanwhile.

use super::alarms::Alarms;
use super::event_loop::{EventLoop, EventLoops};
use super::signals::Signals;
use super::waiting::Awaited;
use super::{Patience, Runtime, TOKEN_LOOPS, Waited};
use crate::call::Call;
use crate::completion::Completion;
use crate::inbox::Inbox;
use crate::loop_waker::LoopWaker;
use crate::meter::Meter;
use crate::reactor::Reactor;
use crate::waits::Waiting as Blocked;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A thread's wait for a call or a completion. It takes several steps if signals and alarms interrupt it; each alarm
/// interrupts it once.
#[derive(Debug)]
#[must_use]
pub struct Wait<'a, T> {
    runtime: &'a Runtime,
    awaited: &'a T,
    seen: Option<usize>,
    deadline: Option<Instant>,
    /// The last alarm that this thread was told of, if it is told of any.
    heard: Option<AtomicU64>,
    _blocked: Blocked<'a>,
}

impl<T: Awaited> Wait<'_, T> {
    /// Waits until the awaited thing is there, something else ends the wait or the deadline passes. With `look` it
    /// returns instead of blocking. Only the main thread is `interruptible`.
    pub fn step(&self, look: bool, interruptible: bool) -> Waited {
        let Self { runtime, awaited, seen, deadline, heard, .. } = self;
        let alarms = runtime.waiting.alarms.count();
        let since = heard.as_ref().map(|heard| heard.load(Ordering::Relaxed));
        let patience = Patience { deadline: *deadline, look, interruptible, heard: since };
        let waited = awaited.wait(&runtime.waiting, *runtime, *seen, patience);
        if waited == Waited::Alarm
            && let Some(heard) = heard
        {
            // Not an alarm that came since: it ends the next step at once.
            heard.store(alarms, Ordering::Relaxed);
        }
        waited
    }
}

impl Runtime {
    /// Begins the calling thread's wait for a call or a completion: until it is done, or has more than `seen` outcomes
    /// or tokens. With `heed`, alarms end the wait.
    pub fn wait_for<'a, T: Awaited>(
        &'a self,
        awaited: &'a T,
        seen: Option<usize>,
        deadline: Option<Instant>,
        heed: bool,
    ) -> Wait<'a, T> {
        let blocked = awaited.block();
        let heard = heed.then(|| AtomicU64::new(self.waiting.alarms.heard()));
        Wait { runtime: self, awaited, seen, deadline, heard, _blocked: blocked }
    }

    /// Waits for a call: until it is complete or, for a stream, has more than `seen` outcomes.
    ///
    /// With `look` it returns instead of blocking. Only the main thread is `interruptible`.
    pub fn wait_call(
        &self,
        call: &Call,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
    ) -> Waited {
        self.waiting.for_progress(self, call, seen, Patience { deadline, look, interruptible, heard: None })
    }

    /// Waits for a completion: until it is finished, or has more than `seen` tokens. With `heard`, a later alarm ends
    /// the wait too; otherwise like [`Runtime::wait_call`].
    pub fn wait_completion(
        &self,
        completion: &Completion,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
        heard: Option<u64>,
    ) -> Waited {
        self.waiting.for_completion(self, completion, seen, Patience { deadline, look, interruptible, heard })
    }

    /// Waits until a meter lets a message of `cost` bytes through, or has ended; like [`Runtime::wait_call`].
    pub fn wait_meter(&self, meter: &Meter, cost: u64, deadline: Option<Instant>, interruptible: bool) -> Waited {
        self.waiting.for_room(self, meter, cost, Patience { deadline, interruptible, ..Patience::default() })
    }

    /// Waits until there are more than `seen` events, or no more will come; like [`Runtime::wait_call`].
    pub fn wait_events(&self, seen: u64, deadline: Option<Instant>, look: bool, interruptible: bool) -> Waited {
        let patience = Patience { deadline, look, interruptible, heard: None };
        self.waiting.for_events(self, &self.inspector.journal, seen, patience)
    }

    /// Blocks until the inbox has a message or is closed.
    pub fn wait_inbox(&self, inbox: &Inbox) {
        self.waiting.for_message(self, inbox);
    }

    /// Another event loop, of this process's actors or of asyncio's.
    pub fn add_event_loop(&self, runs_actors: bool) -> Arc<EventLoop> {
        self.waiting.event_loops.add(TOKEN_LOOPS, runs_actors)
    }

    /// Waits, in an event loop that has nothing else to do, until `waker` has something. Ends without that if one of the loop's
    /// descriptors is ready, which are in the set `watched`. With `look` it returns instead of blocking. Only the main thread is
    /// `interruptible`.
    pub fn visit_loop(
        &self,
        event_loop: &EventLoop,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
    ) -> Waited {
        let patience = Patience { deadline, look, interruptible, heard: None };
        self.waiting.for_visitor(self, event_loop, waker, watched, patience)
    }

    /// Replaces the sleep of an event loop of this process's actors on its own descriptors: waits until `waker` has
    /// something, one of the loop's descriptors is ready (`watched` is the set that they are in), or the deadline.
    pub fn wait_loop(
        &self,
        event_loop: &EventLoop,
        waker: &LoopWaker,
        watched: BorrowedFd<'_>,
        deadline: Option<Instant>,
    ) {
        self.waiting.for_loop(self, event_loop, waker, watched, deadline);
    }

    /// Ends all waits of this process that heed alarms.
    pub fn alarm(&self) {
        self.waiting.alarms.begin();
        self.calls.wake_all(&self.reactor);
        self.waiting.alarms.wake(&self.reactor);
    }

    /// The alarms of this process.
    pub fn alarms(&self) -> &Alarms {
        &self.waiting.alarms
    }

    /// How signals reach the main thread while it waits.
    pub fn signals(&self) -> &Signals {
        &self.waiting.signals
    }

    /// The event loops of this process's actors.
    pub fn event_loops(&self) -> &EventLoops {
        &self.waiting.event_loops
    }

    /// What wakes the threads of this process.
    pub fn reactor(&self) -> &Arc<Reactor> {
        &self.reactor
    }
}
