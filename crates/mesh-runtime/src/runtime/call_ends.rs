//! Calls that nobody can look at any more, and calls with one combined reply.

use super::{Body, Runtime};
use crate::call::Call;
use crate::completion::Completion;
use crate::message::Message;
use mesh_proto::messages::{Answer, Asked, Cancel, Cancelled, Partial, Reply};
use mesh_proto::{Header, ProcAddr, Target};
use std::sync::Arc;
use std::time::Instant;

impl Runtime {
    /// Tells the receivers of failed calls with combined replies to drop what they have gathered for them.
    pub(crate) fn forget_fallen(&self) {
        for call in self.calls.take_fallen() {
            let Some((target, actor)) = call.reduced() else { continue };
            let cancel = Cancel { actor: *actor, call: call.id, place: 0, what: Cancelled::Gathering };
            self.send_cancel(target, cancel);
        }
    }

    /// Nobody can look at the call any more. A stream, which may never end, ends here, and its senders are told. The
    /// failure of any other call is reported even if it comes later (UNS-1).
    pub fn abandon(&self, call: &Call) {
        if call.is_done() {
            if call.has_failed() && !self.is_forked() {
                self.calls.let_go(&self.reactor, call);
            }
        } else if call.is_stream() {
            self.calls.abandon(call);
        } else if !self.is_forked() {
            self.calls.let_go(&self.reactor, call);
        }
    }

    /// Notices of failed calls that are still held, and that nobody has looked at.
    pub fn unseen(&self) -> Vec<Message> {
        self.calls.unseen()
    }

    /// Sends a rank's share of a combined reply to the rank above it; from the first rank, to the caller. On the terms of
    /// [`Runtime::reply_by`]. `to` is the call that it answers; `printed` says that shares in it came marked (LOG-8).
    pub fn pass_on(
        &self,
        to: &Header,
        above: Option<ProcAddr>,
        printed: bool,
        due: Option<Instant>,
        body: Body<'_>,
    ) -> Option<Arc<Completion>> {
        let Asked { by, actor, call, place } = Asked::of(to)?;
        let (mut header, name) = match above {
            Some(above) => (Partial { actor, call, place }.header(self.me, above), Partial::name(by)),
            None => (Reply { actor, call, place, answer: Answer::Combined }.header(self.me, by), String::new()),
        };
        if printed {
            header.set_printed();
        }
        let frame = self.write(header, &Target::One(above.unwrap_or(by)), name.as_bytes(), body);
        self.answering.send(self, frame, due.filter(|_| above.is_none()), true).full
    }
}
