//! Replies that wait in this process until their callers' processes read again.
//!
//! A reply that may go is sent by who gives it. Others are kept, and sent by whoever reads the caller's answer. The lock is
//! held while they are sent, so that a later reply does not overtake them (ANS-2); it is taken before the locks of links
//! and of the router, and by nobody who holds one of those but the reading end of a link. Questions go without it.

use super::{Runtime, lock};
use crate::completion::{Completion, Fate};
use mesh_proto::{Answer, Answers, CallId, Frame, HostNo, Kept, Kind, ProcAddr, Progress, REPLIES, flags};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A reply that waits, and who is told when it does so no longer.
#[derive(Debug)]
struct Reply {
    frame: Frame,
    done: Option<Arc<Completion>>,
}

/// The replies of this process to others.
#[derive(Debug)]
pub(crate) struct Answering {
    /// How many wait: mostly none does, and then nobody is to take the lock for their sake.
    count: AtomicUsize,
    state: Mutex<Answers<Reply>>,
    /// None waits any more.
    empty: Condvar,
}

impl Answering {
    pub(crate) fn new(budget: usize) -> Self {
        Self { count: AtomicUsize::new(0), state: Mutex::new(Answers::new(budget as u64)), empty: Condvar::new() }
    }

    fn any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// How many replies wait, and their bytes.
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = lock(&self.state);
        (state.len(), state.bytes())
    }

    fn note(&self, state: &MutexGuard<'_, Answers<Reply>>) {
        self.count.store(state.len(), Ordering::SeqCst);
        if state.is_empty() {
            self.empty.notify_all();
        }
    }
}

impl Runtime {
    /// Sends a reply, or keeps it until its caller's process reads. Returns what is finished when a reply that is kept
    /// waits no more, where its giver is to do nothing before (ANS-3).
    pub(super) fn answer(&self, frame: Frame, due: Option<Instant>, waits: bool) -> Option<Arc<Completion>> {
        let caller = frame.header.dst;
        if caller == self.me {
            self.dispatch(frame, None);
            return None;
        }
        let cost = frame.cost();
        let mut state = lock(&self.answering.state);
        match state.admit(caller, cost) {
            Answer::Go(question) => {
                drop(state);
                self.dispatch(frame, None);
                self.ask(caller, question);
                None
            }
            Answer::Wait => self.keep(state, frame, cost, due, waits),
        }
    }

    #[cold]
    fn keep(
        &self,
        mut state: MutexGuard<'_, Answers<Reply>>,
        frame: Frame,
        cost: u64,
        due: Option<Instant>,
        waits: bool,
    ) -> Option<Arc<Completion>> {
        if self.is_closed() {
            drop(state);
            self.memory.let_go(&frame);
            return None;
        }
        let (caller, call) = (frame.header.dst, frame.header.call);
        let done = waits.then(|| self.this()).flatten().map(|this| Completion::new(&this));
        let due = due.map(|due| due.saturating_duration_since(self.started));
        let item = Reply { frame, done: done.clone() };
        let (first, over) = state.keep(caller, Kept { cost, call, due, item });
        self.answering.note(&state);
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

    fn ask(&self, caller: ProcAddr, question: Option<u64>) {
        if let Some(count) = question {
            self.dispatch(Progress { what: REPLIES, count }.question(self.me, caller), None);
        }
    }

    /// Changes what waits, and sends what goes because of that.
    fn change_answers(
        &self,
        caller: ProcAddr,
        change: impl FnOnce(&mut Answers<Reply>, &mut Vec<Reply>) -> (Vec<Reply>, Option<u64>),
    ) {
        let mut state = lock(&self.answering.state);
        let mut go = Vec::new();
        let (gone, question) = change(&mut state, &mut go);
        let mut told = Vec::new();
        for reply in go {
            self.dispatch(reply.frame, None);
            told.extend(reply.done);
        }
        self.answering.note(&state);
        drop(state);
        self.ask(caller, question);
        for done in told {
            done.finish(Fate::Status(0));
        }
        self.drop_answers(gone);
    }

    fn drop_answers(&self, gone: Vec<Reply>) {
        for reply in gone {
            if reply.frame.header.flags & flags::SHARED != 0 {
                self.memory.let_go(&reply.frame);
            }
            if let Some(done) = reply.done {
                done.finish(Fate::Broken);
            }
        }
    }

    /// A question about what was sent here, or the answer to one of this process's.
    pub(super) fn on_progress(&self, progress: Progress, from: ProcAddr, bits: u16) {
        if bits & flags::QUESTION != 0 {
            // What came before it has been read.
            self.dispatch(progress.answer(self.me, from), None);
        } else if bits & flags::LAST != 0 {
            self.answers_end(|addr| addr == from);
        } else {
            self.change_answers(from, |state, go| (Vec::new(), state.on_read(from, progress.count, go)));
        }
    }

    /// A question that cannot reach whom it is for.
    pub(super) fn unread(&self, frame: &Frame) -> bool {
        let header = frame.header;
        let Some(progress) = Progress::read(&header).filter(|_| header.flags & flags::QUESTION != 0) else {
            return false;
        };
        self.dispatch(progress.last(header.dst, header.src), None);
        true
    }

    /// A caller waits for its call no more.
    pub(super) fn answer_unwanted(&self, caller: ProcAddr, call: CallId) {
        if self.answering.any() {
            self.change_answers(caller, |state, go| state.cancel(caller, call, go));
        }
    }

    /// A process has ended, and with it its calls.
    pub(crate) fn answers_end(&self, ended: impl Fn(ProcAddr) -> bool) {
        let mut state = lock(&self.answering.state);
        let gone = state.on_ends(ended);
        self.answering.note(&state);
        drop(state);
        self.drop_answers(gone);
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
            self.change_answers(caller, |state, go| (Vec::new(), state.settle(caller, go)));
        }
        lock(&self.answering.state).next_due().map(|due| self.started + due)
    }

    /// Waits until no reply waits, for at most `limit`: their callers read meanwhile, or do not.
    pub(super) fn drain_answers(&self, limit: Duration) {
        let state = lock(&self.answering.state);
        let waited = self.answering.empty.wait_timeout_while(state, limit, |state| !state.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The runtime closes: nothing is sent any more.
    pub(super) fn close_answers(&self) {
        let mut state = lock(&self.answering.state);
        let gone = state.clear();
        self.answering.note(&state);
        drop(state);
        self.drop_answers(gone);
    }
}

/// Whether whoever answers such a message is to wait before it takes another one. What a process is told of the lives of
/// actors, and of its own, is answered in a few words.
pub(super) fn holds_back(asked: Kind) -> bool {
    matches!(asked, Kind::Call | Kind::Extend)
}
