//! Who may send how much to whom: meters of what is sent from here, and what others ask and tell of theirs.

use super::Runtime;
use crate::meter::{CreditPost, Meter};
use crate::ports::STREAM;
use mesh_proto::messages::Meaning;
use mesh_proto::{ActorId, Admission, Credit, Flow, Header, ProcAddr};
use std::sync::Arc;

impl CreditPost for Runtime {
    fn send_credit(&self, mailbox: ActorId, sender: ProcAddr, credit: Credit) {
        // A forked copy that drops what it has a copy of says nothing for the original.
        if self.is_forked() {
            return;
        }
        if sender == self.me {
            self.meters.on_credit(&self.reactor, self.me, mailbox, credit);
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

    /// Lets a message of `cost` bytes through to all of these mailboxes, or to none: then the one that is full is
    /// returned. True if the message is counted, and so has to be sent as such ([`crate::Terms::charged`]).
    ///
    /// # Errors
    /// The index of a meter that is full.
    pub fn admit_all(&self, meters: &[Arc<Meter>], cost: u64) -> Result<bool, usize> {
        let mut counted = false;
        for (index, meter) in meters.iter().enumerate() {
            match meter.admit(cost) {
                Admission::Counted => counted = true,
                Admission::Free => {}
                Admission::Full => {
                    // Two senders that each kept what they had, and waited for what the other has, would wait for ever.
                    self.refund_all(&meters[..index], cost);
                    return Err(index);
                }
            }
        }
        Ok(counted)
    }

    /// A message that was counted by these is not sent after all.
    pub fn refund_all(&self, meters: &[Arc<Meter>], cost: u64) {
        for meter in meters {
            self.meters.refund(&self.reactor, meter, cost);
        }
    }

    /// A message that its sender counts will never be handled: the mailbox that it was for is gone.
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
            self.meters.on_credit(&self.reactor, header.dst, mailbox, Credit::LAST);
        } else {
            self.dispatch(Credit::LAST.frame(mailbox, header.dst, header.src), None);
        }
    }

    /// What processes tell each other of how much they have read.
    pub(super) fn on_credit(&self, flow: Flow, src: ProcAddr) {
        match flow {
            Flow::Asks(progress) => {
                // What came before it has been read.
                self.dispatch(progress.answer(self.me, src), None);
            }
            Flow::HasRead(progress) => self.on_progress(progress, src),
            Flow::ReaderEnded(_) => self.answers_end(|addr| addr == src),
            Flow::Credit { mailbox, credit } => self.meters.on_credit(&self.reactor, src, mailbox, credit),
            Flow::Question { mailbox } => self.on_question(mailbox, src),
        }
    }

    /// A sender asks how much of what it has sent to a mailbox was handled.
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
