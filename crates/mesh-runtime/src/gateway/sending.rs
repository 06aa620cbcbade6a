//! Messages out: to the hosts that they are for, and on behalf of others.

use super::connection::HostConnection;
use crate::calls::Outcome;
use crate::message::pieces;
use crate::reactor::Reactor;
use crate::runtime::{Runtime, lock};
use bytes::Bytes;
use mesh_proto::control::HostDown;
use mesh_proto::hosts::{Cargo, Gateway as Machine, HostSet, Lost};
use mesh_proto::messages::Asked;
use mesh_proto::{Frame, HEADER_LEN, Header, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What says whose message it is, whom it is for and what it is about: all that a sender hears of one that is lost. Its
/// parts may be gigabytes, and whoever waits for the dead would wait until they were copied.
fn label_of(pieces: &[Bytes]) -> Option<Frame> {
    let bytes = |most: usize| -> Vec<u8> { pieces.iter().flat_map(|piece| piece.iter().copied()).take(most).collect() };
    let header = Header::decode(bytes(HEADER_LEN).first_chunk::<HEADER_LEN>()?).ok()?;
    let len = HEADER_LEN + header.target_len as usize + usize::from(header.name_len);
    let label = bytes(len);
    (label.len() == len).then(|| Frame { header, body: Bytes::from(label).slice(HEADER_LEN..) })
}

impl Runtime {
    /// Sends a frame to other hosts. Returns how many bytes wait behind it.
    pub(crate) fn send_remote(&self, frame: &Frame, hosts: HostSet) -> usize {
        if hosts.is_empty() {
            return 0;
        }
        let shares = frame.header.sharing().shared;
        let body = if shares { pieces(frame, &self.memory) } else { None };
        let cargo = match body {
            Some(body) => Cargo::new(&frame.header, body),
            // Its sender has died, and its memory with it: nobody is to hear of it.
            None if shares => return 0,
            None => Cargo::of(frame),
        };
        let mut unreached = HostSet::default();
        let queued = {
            let machine = &mut lock(&self.gateway.state).machine;
            let now = self.started.elapsed();
            let mut posted = |machine: &mut Machine<Reactor>, held: Vec<Frame>| {
                let post = |one: Frame| {
                    let host = HostSet::one(one.header.dst.host);
                    machine.post(Cargo::of(&one), host, &mut unreached, now, &self.reactor)
                };
                held.into_iter().map(post).max().unwrap_or(0)
            };
            let queued = if machine.merges_replies()
                && frame.header.kind == Kind::Reply
                && !shares
                && !frame.header.is_distant()
            {
                let ready = machine.merge_reply(frame.clone(), now);
                posted(machine, ready)
            } else {
                if machine.merges_replies() && hosts.len() == 1 && frame.header.target_len == 0 {
                    let held = machine.merged_before(frame.header.src, frame.header.dst);
                    posted(machine, held);
                }
                machine.post(cargo, hosts, &mut unreached, now, &self.reactor)
            };
            machine.arm(&self.reactor);
            queued
        };
        if !unreached.is_empty() {
            self.bounce_from(frame, &unreached);
        }
        queued
    }

    /// What was never acknowledged by a host that is dead comes back to whoever sent it.
    pub(super) fn bounce_lost(&self, host: HostNo, lost: Vec<Lost>) {
        for one in lost {
            if let Some(frame) = label_of(&one.frame) {
                self.bounce_from(&frame, &HostSet::one(host));
            }
        }
    }

    /// A message cannot reach these hosts.
    pub(super) fn bounce_from(&self, frame: &Frame, hosts: &HostSet) {
        if matches!(frame.header.kind, Kind::SpawnProcs | Kind::StopProcs) {
            // What it waits for are the procs of these hosts, not their agents.
            hosts.iter().for_each(|host| self.order_lost(&frame.header, host, &self.verdict_on(host)));
            return;
        }
        let Ok(target) = frame.target() else { return };
        for (nth, addr) in (0..=u32::MAX).zip(target.procs()).filter(|(_, addr)| hosts.contains(addr.host)) {
            let one = if frame.header.target_len == 0 { frame.clone() } else { frame.for_one(addr, nth) };
            let ended = Arc::new(self.verdict_on(addr.host).ended());
            self.bounce(&one, Outcome::Lost(ended));
        }
    }

    /// Whoever has given an order to a host's agent learns that the host is dead, and with it all procs there.
    fn order_lost(&self, order: &Header, host: HostNo, verdict: &HostEnd) {
        if order.src == self.me {
            let ended = Arc::new(verdict.ended());
            if lock(&self.gateway.state).machine.knows(host) {
                self.calls.on_host_down(&self.reactor, host, &ended);
            } else if let Some(Asked { call, .. }) = Asked::of(order) {
                // It has yet to come, which its attachment goes on waiting for.
                self.calls.on_host_missing(&self.reactor, call, host, &ended);
            }
            return;
        }
        let down = HostDown { host, end: verdict.clone() };
        self.dispatch(down.frame(self.me, order.src, None), None);
    }

    /// Why nothing goes to a host.
    pub(super) fn verdict_on(&self, host: HostNo) -> Arc<HostEnd> {
        lock(&self.gateway.state).machine.verdict_on(host)
    }

    // Back pressure.

    /// Bytes that wait for, or are under way to, the fullest of these hosts.
    pub(crate) fn outstanding_to(&self, hosts: &HostSet) -> usize {
        usize::try_from(lock(&self.gateway.state).machine.waiting(hosts)).unwrap_or(usize::MAX)
    }

    /// Waits a moment for what waits for these hosts to be within the budget; true once it is.
    pub(crate) fn wait_room_remote(&self, hosts: &HostSet, budget: usize, until: Instant) -> bool {
        loop {
            if self.outstanding_to(hosts) <= budget {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_closed() {
                return false;
            }
            self.gateway.room_wanted.store(true, Ordering::SeqCst);
            let state = lock(&self.gateway.state);
            let wait = self.gateway.room.wait_timeout(state, left.min(Duration::from_millis(20)));
            drop(wait);
        }
    }

    pub(super) fn tell_room(&self) {
        if self.gateway.room_wanted.swap(false, Ordering::SeqCst) {
            self.gateway.room.notify_all();
        }
    }

    /// The connections that are up.
    pub(super) fn connections(&self) -> Vec<Arc<HostConnection>> {
        let connections = self.gateway.connections.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        connections.values().cloned().collect()
    }

    /// A call has come for `count` procs of this host from another host: their replies are merged.
    pub(crate) fn expect_replies(&self, caller: ProcAddr, call: u64, count: u32) {
        let mut unreached = HostSet::default();
        let now = self.started.elapsed();
        let machine = &mut lock(&self.gateway.state).machine;
        for frame in machine.expect_replies(caller, call, count) {
            let host = HostSet::one(frame.header.dst.host);
            machine.post(Cargo::of(&frame), host, &mut unreached, now, &self.reactor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mesh_proto::{Part, Target};

    #[test]
    fn of_a_lost_message_no_part_is_copied() {
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
