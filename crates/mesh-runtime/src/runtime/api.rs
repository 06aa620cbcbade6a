//! Waiting, as the bindings ask for it: each of these hands over to the part that does it.

use super::{Patience, Runtime, TOKEN_LOOP, Waited, waiting};
use crate::calls::Call;
use crate::completion::Completion;
use crate::inbox::{Inbox, LoopWaker};
use crate::meter::Meter;
use crate::waits::{Awaited, InRoom};
use mesh_proto::ActorId;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

impl Runtime {
    /// A thread is about to wait for room in a mailbox, on behalf of an actor (0 for none).
    pub fn wait_in_room<'a>(&self, meter: &'a Meter, actor: ActorId) -> InRoom<'a> {
        meter.blocked.block(actor)
    }

    /// All waits of this process, and what its actors run.
    pub(crate) fn waits(&self) -> String {
        let (calls, promises, meters) = (&self.calls, &self.promises, &self.meters);
        let awaited = Awaited { me: self.me, calls, promises, meters, inboxes: self.inboxes.all() };
        awaited.tell(|call| self.waits_here(call))
    }

    /// Blocks until the inbox has a message or is closed.
    pub fn wait_inbox(&self, inbox: &Inbox) {
        self.waiting.for_message(self, inbox);
    }

    /// Blocks until there are notices, or the runtime is closed, in nobody's way.
    pub fn wait_notices(&self) {
        waiting::wait_apart(&self.inboxes.notices);
    }

    /// Blocks until a list has tokens, or is finished, in nobody's way.
    pub fn wait_aside(&self, list: &Completion, deadline: Option<Instant>) {
        waiting::wait_aside(list, deadline);
    }

    /// Waits for a call: to complete, or, for a stream, to have more than `seen` outcomes.
    ///
    /// With `look` it returns before it would block. Only the main thread is `interruptible`.
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

    /// As [`Runtime::wait_call`]; an alarm later than `heard` ends the wait too.
    pub fn wait_call_or_alarm(
        &self,
        call: &Call,
        seen: Option<usize>,
        deadline: Option<Instant>,
        look: bool,
        interruptible: bool,
        heard: u64,
    ) -> Waited {
        self.waiting.for_progress(self, call, seen, Patience { deadline, look, interruptible, heard: Some(heard) })
    }

    /// Waits for a completion: to be finished, or to have more than `seen` tokens. With `heard`, an alarm later than that
    /// ends the wait too; otherwise as [`Runtime::wait_call`].
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

    /// Waits until a message of `cost` bytes is let through by a meter, or the meter has ended. As with
    /// [`Runtime::wait_call`] only the main thread is `interruptible`.
    pub fn wait_meter(&self, meter: &Meter, cost: u64, deadline: Option<Instant>, interruptible: bool) -> Waited {
        self.waiting.for_room(self, meter, cost, Patience { deadline, interruptible, ..Patience::default() })
    }

    /// Waits until there are more than `seen` events, or there will be none; as [`Runtime::wait_call`] does.
    pub fn wait_events(&self, seen: u64, deadline: Option<Instant>, look: bool, interruptible: bool) -> Waited {
        let patience = Patience { deadline, look, interruptible, heard: None };
        self.waiting.for_events(self, &self.inspector.journal, seen, patience)
    }

    /// What the event loop of this process's actors does instead of sleeping on its own descriptors: waits here until
    /// `waker` has something, one of the loop's descriptors is ready (`watched` is the set that they are in), or the
    /// deadline.
    pub fn wait_loop(&self, waker: &LoopWaker, watched: BorrowedFd<'_>, deadline: Option<Instant>) {
        self.waiting.for_loop(self, TOKEN_LOOP, waker, watched, deadline);
    }

    /// Whether the calling thread is that of the event loop of this process's actors, which may not wait for them.
    pub fn on_loop_thread(&self) -> bool {
        self.waiting.event_loop.is_mine()
    }

    /// Ends all waits for calls that are under way.
    pub fn alarm(&self) {
        self.waiting.alarms.begin();
        self.calls.wake_all(&self.reactor);
        self.waiting.alarms.wake(&self.reactor);
    }

    /// Everybody has been told: who begins to wait from now on just waits.
    pub fn calm(&self) {
        self.waiting.alarms.calm();
    }

    /// What to take for heard at the beginning of a wait: no alarm that is still on.
    pub fn alarms_heard(&self) -> u64 {
        self.waiting.alarms.heard()
    }

    /// How many alarms there were.
    pub fn alarms(&self) -> u64 {
        self.waiting.alarms.count()
    }

    /// Where a signal handler is to write.
    pub fn signal_fd(&self) -> RawFd {
        self.waiting.signals.fd()
    }

    /// Where what a signal handler writes is to go on to; -1 for nowhere.
    pub fn forward_signals(&self, fd: RawFd) {
        self.waiting.signals.forward_to(fd);
    }

    /// Has `waker` told when the call progresses.
    pub fn tell_loop(&self, call: &Call, waker: &Arc<LoopWaker>, token: u64, seen: usize) {
        call.tell(&self.reactor, waker, token, seen);
    }

    /// Has `list` told when the call progresses.
    pub fn tell_list(&self, call: &Call, list: &Arc<Completion>, token: u64, seen: usize) {
        call.note(&self.reactor, list, token, seen);
    }

    /// Has `waker` told, with `token`, when the inbox has messages.
    pub fn attach_loop(&self, inbox: &Inbox, waker: &Arc<LoopWaker>, token: u64) {
        inbox.attach(&self.reactor, Arc::clone(waker), token);
    }
}
