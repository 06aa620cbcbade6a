//! How the runtime connects flow control: meters, mailboxes, and the frames about them.

use super::Runtime;
use crate::meter::{CreditPost, Meter};
use crate::ports::STREAM;
use mesh_proto::messages::Meaning;
use mesh_proto::{ActorId, Credit, Flow, Header, ProcAddr, Progress, SPAWNS};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl CreditPost for Runtime {
    fn send_credit(&self, mailbox: ActorId, sender: ProcAddr, credit: Credit) {
        // A forked copy that drops its copies of messages must not speak for the original.
        if self.is_forked() {
            return;
        }
        if sender == self.me {
            self.meters.on_credit(self.me, mailbox, credit);
        } else {
            self.dispatch(credit.frame(mailbox, self.me, sender), None);
        }
    }
}

impl Runtime {
    /// The meter of a mailbox: what this process has under way to it.
    pub fn meter(&self, addr: ProcAddr, mailbox: ActorId) -> Arc<Meter> {
        let (meter, ask) = self.meters.of(addr, mailbox);
        for idle in ask {
            self.dispatch(Credit::question(idle.mailbox(), self.me, idle.addr()), None);
        }
        meter
    }

    /// Processes have ended: nothing for them waits any more.
    pub(crate) fn answers_end(&self, ended: impl Fn(ProcAddr) -> bool) {
        self.answering.end(&ended);
        self.spawning.end(&ended);
    }

    /// Blocks until no reply and no spawn waits, for at most `limit`.
    pub(crate) fn drain_answers(&self, limit: Duration) {
        let end = Instant::now() + limit;
        self.answering.drain(end);
        self.spawning.drain(end);
    }

    /// Lets a message of `cost` bytes through to all of these mailboxes, or to none. True if the message is counted,
    /// and must be sent as such ([`crate::Terms::charged`]).
    ///
    /// # Errors
    /// The index of a meter that is full.
    pub fn admit_all(&self, meters: &[Arc<Meter>], cost: u64) -> Result<bool, usize> {
        self.meters.admit_all(meters, cost)
    }

    /// Gives back what these have counted for a message that is not sent after all.
    pub fn refund_all(&self, meters: &[Arc<Meter>], cost: u64) {
        self.meters.refund_all(meters, cost);
    }

    /// Tells the sender of a counted message that its mailbox is gone, so that the message will never be handled.
    pub(crate) fn refuse(&self, header: &Header) {
        if !header.is_charged() {
            return;
        }
        let mailbox = match Meaning::of(header) {
            Ok(Meaning::Reply(reply)) => reply.call | STREAM,
            Ok(Meaning::Post(post)) => post.port,
            Ok(said) => said.actor(),
            Err(_) => return,
        };
        if header.src == self.me {
            self.meters.on_credit(header.dst, mailbox, Credit::LAST);
        } else {
            self.dispatch(Credit::LAST.frame(mailbox, header.dst, header.src), None);
        }
    }

    /// A process asks or reports how much of something was read or handled.
    pub(super) fn on_credit(&self, flow: Flow, src: ProcAddr) {
        match flow {
            Flow::Asks(progress) => {
                // What came before the question was read.
                self.dispatch(progress.answer(self.me, src), None);
            }
            Flow::HasRead(Progress { what: SPAWNS, count }) => self.spawning.on_read(self, src, count),
            Flow::HasRead(Progress { count, .. }) => self.answering.on_read(self, src, count),
            Flow::ReaderEnded(_) => self.answers_end(|addr| addr == src),
            Flow::Credit { mailbox, credit } => self.meters.on_credit(src, mailbox, credit),
            Flow::Question { mailbox } => self.on_question(mailbox, src),
        }
    }

    /// A sender asks how much of what it sent to a mailbox was handled.
    fn on_question(&self, mailbox: ActorId, src: ProcAddr) {
        if mailbox == 0 {
            self.inboxes.own().mailbox().on_question(src);
        } else if let Some(inbox) = self.inbox(mailbox) {
            inbox.mailbox().on_question(src);
        } else if let Some(inlet) = self.ports.inlet(mailbox) {
            inlet.account.on_question(src);
        } else if let Some(account) = self.calls.known_account(mailbox & !STREAM) {
            account.on_question(src);
        } else {
            self.dispatch(Credit::LAST.frame(mailbox, self.me, src), None);
        }
    }
}
