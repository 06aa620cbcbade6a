//! What waits in this process until those whom it is for read again: replies, and the arguments of spawns.
//!
//! What may go is sent by who gives it. The rest is kept, and sent by whoever reads the receiver's answer. The lock is
//! held while it is sent, so that nothing later overtakes it (ANS-2); it is taken before the locks of links and of the
//! router, and by nobody who holds one of those but the reading end of a link. Questions go without it.
//!
//! SPW-1: an actor is announced at once, without its arguments, so that its inbox is there: whatever is sent to it later,
//! by whomever, waits there. Its arguments follow when its process reads. Should they never come, since the spawner has
//! ended, the agent's stop of what that has left behind closes the inbox.

use super::{Outgoing, Runtime, Terms, lock};
use crate::calls::Call;
use crate::completion::{Completion, Fate};
use crate::error::RuntimeError;
use mesh_proto::messages::{Meaning, Spawn, SpawnPart, StopActor};
use mesh_proto::{
    ActorId, Answer, Answers, CallId, Flow, Frame, HostNo, Kept, Kind, ProcAddr, Progress, REPLIES, SPAWNS,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Something that waits, and who is told when it does so no longer.
#[derive(Debug)]
struct Held {
    frame: Frame,
    done: Option<Arc<Completion>>,
}

/// The replies of this process to others, or what it spawns at others.
#[derive(Debug)]
pub(crate) struct Answering {
    what: ActorId,
    /// How many wait: mostly none does, and then nobody is to take the lock for their sake.
    count: AtomicUsize,
    state: Mutex<Answers<Held>>,
    /// None waits any more.
    empty: Condvar,
}

impl Answering {
    pub(crate) fn new(what: ActorId, budget: usize) -> Self {
        Self { what, count: AtomicUsize::new(0), state: Mutex::new(Answers::new(budget as u64)), empty: Condvar::new() }
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How many replies wait, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.len(), state.bytes())
    }

    fn note(&self, state: &MutexGuard<'_, Answers<Held>>) {
        self.count.store(state.len(), Ordering::SeqCst);
        if state.is_empty() {
            self.empty.notify_all();
        }
    }
}

impl Runtime {
    /// Sends a reply, or keeps it until its caller's process reads. Returns what is finished when a reply that is kept
    /// waits no more, where its giver is to do nothing before (ANS-3), and whether the reply is out of this process's hands.
    pub(super) fn answer(&self, frame: Frame, due: Option<Instant>, waits: bool) -> (Option<Arc<Completion>>, bool) {
        let caller = frame.header.dst;
        if caller == self.me {
            self.dispatch(frame, None);
            return (None, true);
        }
        let cost = frame.cost();
        let mut state = lock(&self.answering.state);
        match state.admit(caller, cost) {
            Answer::Go(question) => {
                drop(state);
                let queued = self.dispatch(frame, None);
                self.ask(REPLIES, caller, question);
                (None, queued == 0)
            }
            Answer::Wait => (self.keep(&self.answering, state, (frame, cost), due, waits), false),
        }
    }

    #[cold]
    fn keep(
        &self,
        line: &Answering,
        mut state: MutexGuard<'_, Answers<Held>>,
        (frame, cost): (Frame, u64),
        due: Option<Instant>,
        waits: bool,
    ) -> Option<Arc<Completion>> {
        if self.is_closed() {
            drop(state);
            self.memory.let_go(&frame);
            return None;
        }
        let (caller, call) = (frame.header.dst, Meaning::of(&frame.header).map_or(0, |said| said.call()));
        let done = waits.then(|| self.completion());
        let due = due.map(|due| due.saturating_duration_since(self.started));
        let item = Held { frame, done: done.clone() };
        let (first, over) = state.keep(caller, Kept { cost, call, due, item });
        line.note(&state);
        drop(state);
        if first && !(self.me.is_agent() && caller.host == self.me.host) {
            // Nothing else tells this process of the end of one that has called it.
            self.watch_owners(vec![caller]);
        }
        if due.is_some() {
            self.reactor.ring_io();
        }
        done.filter(|_| over)
    }

    fn ask(&self, what: ActorId, caller: ProcAddr, question: Option<u64>) {
        if let Some(count) = question {
            self.dispatch(Progress { what, count }.question(self.me, caller), None);
        }
    }

    /// Changes what waits, and sends what goes because of that.
    fn change_answers(
        &self,
        line: &Answering,
        caller: ProcAddr,
        change: impl FnOnce(&mut Answers<Held>, &mut Vec<Held>) -> (Vec<Held>, Option<u64>),
    ) {
        let mut state = lock(&line.state);
        let mut go = Vec::new();
        let (gone, question) = change(&mut state, &mut go);
        let mut told = Vec::new();
        for reply in go {
            self.dispatch(reply.frame, None);
            told.extend(reply.done);
        }
        line.note(&state);
        drop(state);
        self.ask(line.what, caller, question);
        for done in told {
            done.finish(Fate::Status(0));
        }
        self.drop_answers(gone);
    }

    fn drop_answers(&self, gone: Vec<Held>) {
        for reply in gone {
            if reply.frame.header.is_owed() {
                self.memory.let_go(&reply.frame);
            }
            if let Some(done) = reply.done {
                done.finish(Fate::Broken);
            }
        }
    }

    /// A process has read so much of what this one has sent to it.
    pub(super) fn on_progress(&self, progress: Progress, from: ProcAddr) {
        let line = if progress.what == SPAWNS { &self.spawning } else { &self.answering };
        self.change_answers(line, from, |state, go| (Vec::new(), state.on_read(from, progress.count, go)));
    }

    /// A question that cannot reach whom it is for.
    pub(super) fn unread(&self, frame: &Frame) -> bool {
        let Ok(Meaning::Credit(Flow::Asks(progress))) = Meaning::of(&frame.header) else { return false };
        self.dispatch(progress.last(frame.header.dst, frame.header.src), None);
        true
    }

    /// A caller waits for its call no more.
    pub(super) fn answer_unwanted(&self, caller: ProcAddr, call: CallId) {
        if self.answering.any() {
            self.change_answers(&self.answering, caller, |state, go| state.cancel(caller, call, go));
        }
    }

    /// A process has ended, and with it its calls.
    pub(crate) fn answers_end(&self, ended: impl Fn(ProcAddr) -> bool) {
        for line in [&self.answering, &self.spawning] {
            let mut state = lock(&line.state);
            let gone = state.on_ends(&ended);
            line.note(&state);
            drop(state);
            self.drop_answers(gone);
        }
    }

    /// A whole host has ended.
    pub(crate) fn answers_end_with(&self, host: HostNo) {
        self.answers_end(|addr| addr.host == host);
    }

    /// Drops what nobody wants any more: the I/O thread's turn. Says when it wants another one.
    pub(super) fn answers_turn(&self) -> Option<Instant> {
        if !self.answering.any() {
            return None;
        }
        let (gone, callers) = lock(&self.answering.state).expire(self.started.elapsed());
        self.drop_answers(gone);
        for caller in callers {
            self.change_answers(&self.answering, caller, |state, go| (Vec::new(), state.settle(caller, go)));
        }
        lock(&self.answering.state).next_due().map(|due| self.started + due)
    }

    /// Waits until nothing waits, for at most `limit`: those whom it is for read meanwhile, or do not.
    pub(crate) fn drain_answers(&self, limit: Duration) {
        let end = Instant::now() + limit;
        for line in [&self.answering, &self.spawning] {
            let state = lock(&line.state);
            let left = end.saturating_duration_since(Instant::now());
            let waited = line.empty.wait_timeout_while(state, left, |state| !state.is_empty());
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// The runtime closes: nothing is sent any more.
    pub(super) fn close_answers(&self) {
        self.answers_end(|_| true);
    }

    // Spawns.

    /// Says whether so much waits to be spawned at processes that do not read that nobody is to add to it; how much, and
    /// what may wait.
    pub fn spawns_wait(&self) -> Option<(u64, u64)> {
        let (_, bytes) = self.spawning.size();
        let budget = self.options.link_budget as u64;
        (self.spawning.any() && bytes > budget).then_some((bytes, budget))
    }

    /// As [`Runtime::call_on`], for a spawn. Returns what is finished when its arguments wait no more, where too much
    /// waits.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_spawn(&self, out: &Outgoing<'_>, terms: Terms) -> Result<Spawned, RuntimeError> {
        self.usable()?;
        let cost = out.cost();
        let mut questions = Vec::new();
        let mut late = Vec::new();
        let mut state = lock(&self.spawning.state);
        for addr in out.target.procs().filter(|addr| *addr != self.me) {
            match state.admit(addr, cost) {
                Answer::Go(None) => {}
                Answer::Go(Some(count)) => questions.push((addr, count)),
                Answer::Wait => late.push(addr),
            }
        }
        drop(state);
        let (call, queued, held) = if late.is_empty() {
            let (call, queued) = self.call_on(out, false, terms)?;
            (call, queued, None)
        } else {
            let call = self.open(out.target.clone(), false)?;
            let held = self.announce(out, &call, terms, &late);
            (call, 0, held)
        };
        for (addr, count) in questions {
            self.ask(SPAWNS, addr, Some(count));
        }
        Ok((call, queued, held))
    }

    /// Sends a spawn to each of its receivers by itself; to those that do not read, its announcement (SPW-1).
    #[cold]
    fn announce(&self, out: &Outgoing<'_>, call: &Call, terms: Terms, late: &[ProcAddr]) -> Option<Arc<Completion>> {
        let pieces = out.target.pieces();
        let mut held = None;
        for (frame, piece) in self.compose_all(out, call.id).into_iter().zip(pieces.iter()) {
            let frame = terms.mark(frame);
            let Ok(first) = Spawn::read(&frame.header) else { continue };
            for (nth, addr) in (0..).zip(piece.target.procs()) {
                let place = first.place + nth;
                let mut frame = frame.for_one(addr, nth);
                if !late.contains(&addr) {
                    self.dispatch(frame, None);
                    continue;
                }
                let announced = Spawn { call: 0, place, part: SpawnPart::Announced, ..first };
                self.dispatch(Frame::build_plain(announced.header(self.me, addr), None, frame.name(), b""), None);
                Spawn { place, part: SpawnPart::Arguments, ..first }.mark(&mut frame.header);
                let mut state = lock(&self.spawning.state);
                let cost = out.cost();
                match state.admit(addr, cost) {
                    // It has read meanwhile.
                    Answer::Go(question) => {
                        drop(state);
                        self.dispatch(frame, None);
                        self.ask(SPAWNS, addr, question);
                    }
                    Answer::Wait => held = self.keep(&self.spawning, state, (frame, cost), None, true).or(held),
                }
            }
        }
        held
    }

    /// An actor is announced here, whose arguments follow.
    pub(super) fn note_announced(&self, actor: ActorId, spawner: ProcAddr) {
        lock(&self.announced).insert(actor, spawner);
    }

    /// The arguments of an announced actor have come.
    pub(super) fn note_arguments(&self, actor: ActorId) {
        lock(&self.announced).remove(&actor);
    }

    /// An agent stops what a process has left behind that has ended: arguments that have not come by now never will.
    pub(super) fn stop_announced(&self, stop: StopActor, from: ProcAddr) {
        if stop.call != 0 || !from.is_agent() {
            return;
        }
        let mut announced = lock(&self.announced);
        if announced.get(&stop.actor).is_some_and(|spawner| *spawner != from) {
            announced.remove(&stop.actor);
            drop(announced);
            if let Some(inbox) = self.inbox(stop.actor) {
                self.close_inbox(&inbox);
            }
        }
    }
}

/// The call of a spawn, how many bytes wait on the way to its slowest receiver, and what is finished when its arguments
/// wait no more, where too much waits.
pub type Spawned = (Arc<Call>, usize, Option<Arc<Completion>>);

/// Whether whoever answers such a message is to wait before it takes another one. What a process is told of the lives of
/// actors, and of its own, is answered in a few words.
pub(super) fn holds_back(asked: Kind) -> bool {
    matches!(asked, Kind::Call | Kind::Extend)
}
