//! Outgoing messages, own and relayed.

use super::{Gateway, Machine, Process};
use crate::call::Outcome;
use crate::message::pieces;
use crate::reactor::Reactor;
use bytes::Bytes;
use mesh_proto::control::HostDown;
use mesh_proto::hosts::{Cargo, HostSet, Lost};
use mesh_proto::messages::Asked;
use mesh_proto::{CallId, Frame, HEADER_LEN, Header, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a sender waits for room before it checks again.
const LOOK: Duration = Duration::from_millis(20);

/// The beginning of a message that says whose it is, whom it is for and what it is about: all that a sender learns of one that
/// is lost. Its parts may be gigabytes, and whoever waits for the dead would wait until they were copied.
fn label_of(pieces: &[Bytes]) -> Option<Frame> {
    let bytes = |most: usize| -> Vec<u8> { pieces.iter().flat_map(|piece| piece.iter().copied()).take(most).collect() };
    let header = Header::decode(bytes(HEADER_LEN).first_chunk::<HEADER_LEN>()?).ok()?;
    let len = HEADER_LEN + header.target_len as usize + usize::from(header.name_len);
    let label = bytes(len);
    (label.len() == len).then(|| Frame { header, body: Bytes::from(label).slice(HEADER_LEN..) })
}

impl<P: Process> Gateway<P> {
    /// Sends a frame to other hosts. Returns how many bytes are queued.
    pub(crate) fn send(&self, frame: &Frame, hosts: HostSet) -> usize {
        if hosts.is_empty() {
            return 0;
        }
        let shares = frame.header.sharing().shared;
        let body = if shares { pieces(frame, &self.parts.memory) } else { None };
        let cargo = match body {
            Some(body) => Cargo::new(&frame.header, body),
            // Its sender died, and its memory with it, so nobody is notified.
            None if shares => return 0,
            None => Cargo::of(frame),
        };
        let mut unreached = HostSet::default();
        let queued = {
            let mut machine = self.machine();
            let now = self.now();
            let queued = if !machine.merges_replies() {
                machine.post(cargo, hosts, &mut unreached, now, self.reactor())
            } else if frame.header.kind == Kind::Reply && !shares && !frame.header.is_distant() {
                let ready = machine.merge_reply(frame.clone(), now);
                self.post_all(&mut machine, ready, &mut unreached, now)
            } else {
                if hosts.len() == 1 && frame.header.target_len == 0 {
                    let before = machine.merged_before(frame.header.src, frame.header.dst);
                    self.post_all(&mut machine, before, &mut unreached, now);
                }
                machine.post(cargo, hosts, &mut unreached, now, self.reactor())
            };
            machine.arm(self.reactor());
            queued
        };
        if !unreached.is_empty() {
            self.bounce(frame, &unreached);
        }
        queued
    }

    /// Posts frames that were held back. Returns how many bytes are queued.
    fn post_all(
        &self,
        machine: &mut Machine<Reactor>,
        frames: Vec<Frame>,
        unreached: &mut HostSet,
        now: Duration,
    ) -> usize {
        let post = |frame: Frame| {
            let host = HostSet::one(frame.header.dst.host);
            machine.post(Cargo::of(&frame), host, unreached, now, self.reactor())
        };
        frames.into_iter().map(post).max().unwrap_or(0)
    }

    /// Merges the replies to a call from another host to `count` processes of this one.
    pub(super) fn expect_replies(&self, caller: ProcAddr, call: CallId, count: u32) {
        let mut machine = self.machine();
        let ready = machine.expect_replies(caller, call, count);
        self.post_all(&mut machine, ready, &mut HostSet::default(), self.now());
    }

    // Undeliverable messages.

    /// Returns to its senders what a dead host never acknowledged.
    pub(super) fn bounce_lost(&self, host: HostNo, lost: Vec<Lost>) {
        for one in lost {
            if let Some(frame) = label_of(&one.frame) {
                self.bounce(&frame, &HostSet::one(host));
            }
        }
    }

    /// Bounces a message that cannot reach these hosts.
    fn bounce(&self, frame: &Frame, hosts: &HostSet) {
        let Some(process) = self.process.upgrade() else { return };
        if matches!(frame.header.kind, Kind::SpawnProcs | Kind::StopProcs) {
            // It waits for the processes of these hosts, not for their agents.
            hosts.iter().for_each(|host| self.order_lost(&*process, &frame.header, host));
            return;
        }
        let Ok(target) = frame.target() else { return };
        for (nth, addr) in (0..=u32::MAX).zip(target.procs()).filter(|(_, addr)| hosts.contains(addr.host)) {
            let one = if frame.header.target_len == 0 { frame.clone() } else { frame.for_one(addr, nth) };
            let ended = Arc::new(self.verdict_on(addr.host).ended());
            process.bounce(&one, Outcome::Lost(ended));
        }
    }

    /// Notifies the sender of an order to a host's agent that the host, and with it all processes there, is dead.
    fn order_lost(&self, process: &P, order: &Header, host: HostNo) {
        let verdict = self.verdict_on(host);
        if order.src != self.me {
            let down = HostDown { host, end: HostEnd::clone(&verdict) };
            process.dispatch(down.frame(self.me, order.src, None));
            return;
        }
        let ended = Arc::new(verdict.ended());
        if self.machine().knows(host) {
            self.parts.calls.on_host_down(self.reactor(), host, &ended);
        } else if let Some(Asked { call, .. }) = Asked::of(order) {
            // It has not arrived yet, and its attachment goes on waiting for it.
            self.parts.calls.on_host_missing(self.reactor(), call, host, &ended);
        }
    }

    /// Why nothing is sent to a host.
    pub(super) fn verdict_on(&self, host: HostNo) -> Arc<HostEnd> {
        self.machine().verdict_on(host)
    }

    // Back pressure.

    /// Returns the bytes queued for or in flight to the fullest of these hosts.
    pub(crate) fn outstanding_to(&self, hosts: &HostSet) -> usize {
        usize::try_from(self.machine().waiting(hosts)).unwrap_or(usize::MAX)
    }

    /// Waits until at most `budget` bytes are queued for these hosts. Returns false if `until` or the end of this process came
    /// first.
    pub(crate) fn wait_for_room(&self, hosts: &HostSet, budget: usize, until: Instant) -> bool {
        loop {
            self.room.want();
            let machine = self.machine();
            if usize::try_from(machine.waiting(hosts)).is_ok_and(|waiting| waiting <= budget) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.parts.standing.is_closed() {
                return false;
            }
            drop(self.room.wait(machine, left.min(LOOK)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh_proto::{Part, Target};

    #[test]
    fn parts_of_a_lost_message_are_not_copied() {
        let addr = |host| ProcAddr { mesh: 7, rank: 0, host };
        let header = mesh_proto::messages::Call { actor: 3, call: 5, place: 0, stream: false, task: None }
            .header(addr(1), addr(2));
        let part = Part::Inline(Bytes::from(vec![1; 1 << 20]));
        let whole = Frame::build(header, None, b"train", &[part]);
        let head = Bytes::copy_from_slice(&whole.header.encode());
        let (label, rest) = (whole.body.slice(..3), whole.body.slice(3..));
        let lost = label_of(&[head.clone(), label, rest]).unwrap();
        assert_eq!((lost.header, lost.body.as_ref()), (whole.header, &b"train"[..]));
        assert_eq!((lost.name(), lost.target().unwrap()), (&b"train"[..], Target::One(addr(2))));
        assert!(label_of(&[head]).is_none());
        assert!(label_of(&[]).is_none());
    }
}
