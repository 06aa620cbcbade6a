//! Frames that wait in this process until their receivers read again: replies, and the arguments of spawns.
//!
//! `mesh_proto::Answers` decides what waits (ANS-1 to ANS-4). What may go at once is sent by the thread that has it.
//! The rest is kept, and sent by the thread that learns how far the receiver has read. That thread holds the lock while
//! it sends, so no later frame overtakes the kept ones (ANS-2).
//!
//! The lock is taken before those of links and of the router. No thread takes it while it holds one of these, except
//! the reading end of a link. Questions are sent without it.

use crate::completion::{Completion, Fate};
use crate::dispatch::Dispatch;
use crate::locks::lock;
use crate::reactor::Reactor;
use crate::shm::Memory;
use crate::standing::Standing;
use mesh_proto::control::Watch;
use mesh_proto::messages::Meaning;
use mesh_proto::{ActorId, Answer, Answers, CallId, Frame, Kept, Kind, ProcAddr, Progress};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A frame that waits, and what to finish when it no longer does.
#[derive(Debug)]
struct Held {
    frame: Frame,
    done: Option<Arc<Completion>>,
}

/// The result of sending a frame.
#[derive(Debug)]
pub(crate) struct Sent {
    /// Whether the frame has left this process.
    pub(crate) is_out: bool,
    /// If more waits than may: finished when this frame no longer waits. Its sender must send nothing before (ANS-3).
    pub(crate) full: Option<Arc<Completion>>,
}

/// The result of [`Answering::admit`].
#[derive(Debug)]
pub(crate) struct Admitted {
    /// The receivers for which the frame must wait.
    pub(crate) late: Vec<ProcAddr>,
    /// Questions to send after it, by [`Answering::ask`].
    pub(crate) questions: Vec<(ProcAddr, u64)>,
}

/// The replies of this process, or the arguments of its spawns. See the module.
#[derive(Debug)]
pub(crate) struct Answering {
    me: ProcAddr,
    what: ActorId,
    started: Instant,
    budget: u64,
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    memory: Arc<Memory>,
    /// How many wait. Usually none, and then the lock need not be taken.
    count: AtomicUsize,
    state: Mutex<Answers<Held>>,
    /// Notified when nothing waits any more.
    empty: Condvar,
}

impl Answering {
    /// `what` is [`mesh_proto::REPLIES`] or [`mesh_proto::SPAWNS`].
    pub(crate) fn new(
        (me, what, budget): (ProcAddr, ActorId, usize),
        reactor: &Arc<Reactor>,
        standing: &Arc<Standing>,
        memory: &Arc<Memory>,
    ) -> Self {
        Self {
            me,
            what,
            started: Instant::now(),
            budget: budget as u64,
            reactor: Arc::clone(reactor),
            standing: Arc::clone(standing),
            memory: Arc::clone(memory),
            count: AtomicUsize::new(0),
            state: Mutex::new(Answers::new(budget as u64)),
            empty: Condvar::new(),
        }
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How many frames wait, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.len(), state.bytes())
    }

    /// How many bytes wait, and how many may, if that is exceeded.
    pub(crate) fn excess(&self) -> Option<(u64, u64)> {
        if !self.any() {
            return None;
        }
        let bytes = lock(&self.state).bytes();
        (bytes > self.budget).then_some((bytes, self.budget))
    }

    fn note(&self, state: &MutexGuard<'_, Answers<Held>>) {
        self.count.store(state.len(), Ordering::SeqCst);
        if state.is_empty() {
            self.empty.notify_all();
        }
    }

    // Sending.

    /// Sends a frame, or keeps it until its receiver reads; nobody wants it after `due`. `waits` says whether its
    /// sender can wait ([`Sent::full`]).
    pub(crate) fn send(&self, way: &impl Dispatch, frame: Frame, due: Option<Instant>, waits: bool) -> Sent {
        let to = frame.header.dst;
        if to == self.me {
            way.dispatch(frame);
            return Sent { is_out: true, full: None };
        }
        let cost = frame.cost();
        let mut state = lock(&self.state);
        match state.admit(to, cost) {
            Answer::Go(question) => {
                drop(state);
                let queued = way.dispatch(frame);
                self.ask(way, question.map(|count| (to, count)));
                Sent { is_out: queued == 0, full: None }
            }
            Answer::Wait => Sent { is_out: false, full: self.keep(way, state, (frame, cost), due, waits) },
        }
    }

    #[cold]
    fn keep(
        &self,
        way: &impl Dispatch,
        mut state: MutexGuard<'_, Answers<Held>>,
        (frame, cost): (Frame, u64),
        due: Option<Instant>,
        waits: bool,
    ) -> Option<Arc<Completion>> {
        // Under the lock: a closing thread takes it afterwards, and drops what is kept by then.
        if self.standing.is_closed() {
            drop(state);
            self.memory.let_go(&frame);
            return None;
        }
        let (to, call) = (frame.header.dst, Meaning::of(&frame.header).map_or(0, |said| said.call()));
        let done = waits.then(|| Completion::new(&self.reactor, &self.standing));
        let due = due.map(|due| due.saturating_duration_since(self.started));
        let item = Held { frame, done: done.clone() };
        let (first, over) = state.keep(to, Kept { cost, call, due, item });
        self.note(&state);
        drop(state);
        if first && !(self.me.is_agent() && to.host == self.me.host) {
            // Nothing else would tell this process of the receiver's end.
            way.dispatch(Watch::of(to).frame(self.me, ProcAddr::agent(to.host)));
        }
        if due.is_some() {
            self.reactor.ring_io();
        }
        done.filter(|_| over)
    }

    /// Counts a frame of `cost` bytes for each of these receivers to which it may be sent now. Its sender sends it to
    /// them, and asks the questions after it.
    pub(crate) fn admit(&self, to: impl Iterator<Item = ProcAddr>, cost: u64) -> Admitted {
        let mut admitted = Admitted { late: Vec::new(), questions: Vec::new() };
        let mut state = lock(&self.state);
        for addr in to.filter(|addr| *addr != self.me) {
            match state.admit(addr, cost) {
                Answer::Go(question) => admitted.questions.extend(question.map(|count| (addr, count))),
                Answer::Wait => admitted.late.push(addr),
            }
        }
        admitted
    }

    /// Asks receivers how far they have read.
    pub(crate) fn ask(&self, way: &impl Dispatch, questions: impl IntoIterator<Item = (ProcAddr, u64)>) {
        for (to, count) in questions {
            way.dispatch(Progress { what: self.what, count }.question(self.me, to));
        }
    }

    // What ends the wait.

    /// Changes what waits, and sends what may go because of that.
    fn change(
        &self,
        way: &impl Dispatch,
        to: ProcAddr,
        change: impl FnOnce(&mut Answers<Held>, &mut Vec<Held>) -> (Vec<Held>, Option<u64>),
    ) {
        let mut state = lock(&self.state);
        let mut go = Vec::new();
        let (gone, question) = change(&mut state, &mut go);
        let mut sent = Vec::new();
        for held in go {
            way.dispatch(held.frame);
            sent.extend(held.done);
        }
        self.note(&state);
        drop(state);
        self.ask(way, question.map(|count| (to, count)));
        for done in sent {
            done.finish(Fate::Status(0));
        }
        self.drop_all(gone);
    }

    fn drop_all(&self, gone: Vec<Held>) {
        for held in gone {
            if held.frame.header.is_owed() {
                self.memory.let_go(&held.frame);
            }
            if let Some(done) = held.done {
                done.finish(Fate::Broken);
            }
        }
    }

    /// A receiver has read this many of the bytes sent to it.
    pub(crate) fn on_read(&self, way: &impl Dispatch, from: ProcAddr, count: u64) {
        self.change(way, from, |state, go| (Vec::new(), state.on_read(from, count, go)));
    }

    /// A caller no longer waits for its call.
    pub(crate) fn cancel(&self, way: &impl Dispatch, caller: ProcAddr, call: CallId) {
        if self.any() {
            self.change(way, caller, |state, go| state.cancel(caller, call, go));
        }
    }

    /// Receivers have ended.
    pub(crate) fn end(&self, ended: impl Fn(ProcAddr) -> bool) {
        let mut state = lock(&self.state);
        let gone = state.on_ends(ended);
        self.note(&state);
        drop(state);
        self.drop_all(gone);
    }

    /// Drops expired frames, on the I/O thread's turn. Returns when it wants another one.
    pub(crate) fn turn(&self, way: &impl Dispatch) -> Option<Instant> {
        if !self.any() {
            return None;
        }
        let mut state = lock(&self.state);
        let (gone, receivers) = state.expire(self.started.elapsed());
        self.note(&state);
        drop(state);
        self.drop_all(gone);
        for to in receivers {
            self.change(way, to, |state, go| (Vec::new(), state.settle(to, go)));
        }
        lock(&self.state).next_due().map(|due| self.started + due)
    }

    /// Blocks until nothing waits, at most until `end`.
    pub(crate) fn drain(&self, end: Instant) {
        let state = lock(&self.state);
        let left = end.saturating_duration_since(Instant::now());
        let waited = self.empty.wait_timeout_while(state, left, |state| !state.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The runtime closes: drops what waits.
    pub(crate) fn close(&self) {
        self.end(|_| true);
    }
}

/// Whether a thread that answers such a message waits if too many replies do. What a process is told of the lives of
/// actors, and of its own, is answered in a few bytes.
pub(super) fn holds_back(asked: Kind) -> bool {
    matches!(asked, Kind::Call | Kind::Extend)
}
