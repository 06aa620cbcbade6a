//! Messages out: to the hosts that they are for, and on behalf of others.

use super::connection::HostConnection;
use super::{MOST_KEPT, Peer, State};
use crate::calls::Outcome;
use crate::message::pieces;
use crate::runtime::{Runtime, lock};
use bytes::Bytes;
use mesh_proto::control::{HostDown, down_of};
use mesh_proto::hosts::{Cargo, HostSet, Lane, Lost, Packet, Short, Standing};
use mesh_proto::messages::Asked;
use mesh_proto::{Frame, HEADER_LEN, Header, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A frame as it travels between hosts, with what it must not overtake.
fn cargo(header: &Header, frame: Short<Bytes>) -> Cargo {
    // What a proc has sent comes before the notice of its end, however large it is.
    let sender = down_of(header).unwrap_or(header.src);
    let lane = Lane { sender: (sender.mesh, sender.rank, sender.host), mesh: header.dst.mesh };
    Cargo { frame, lane }
}

/// A frame without shared memory, in one piece or two.
fn plain(frame: &Frame) -> Short<Bytes> {
    let head = frame.header.encode();
    if frame.body.len() > 1024 {
        return Short::from([Bytes::copy_from_slice(&head), frame.body.clone()]);
    }
    let mut whole = Vec::with_capacity(HEADER_LEN + frame.body.len());
    whole.extend_from_slice(&head);
    whole.extend_from_slice(&frame.body);
    Short::from_iter([Bytes::from(whole)])
}

/// A frame out of what travelled; none if it is none.
pub(super) fn frame_of(pieces: &[Bytes]) -> Option<Frame> {
    let whole = match pieces {
        [one] => one.clone(),
        [head, body] if head.len() == HEADER_LEN => {
            let header = Header::decode(head.first_chunk::<HEADER_LEN>()?).ok()?;
            return (header.body_len == body.len() as u64).then(|| Frame { header, body: body.clone() });
        }
        many => many.concat().into(),
    };
    let header = Header::decode(whole.first_chunk::<HEADER_LEN>()?).ok()?;
    (header.body_len == (whole.len() - HEADER_LEN) as u64).then(|| Frame { header, body: whole.slice(HEADER_LEN..) })
}

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
        let body = if shares { pieces(frame, &self.memory) } else { Some(plain(frame)) };
        // Its sender has died, and its memory with it: nobody is to hear of it.
        let Some(body) = body else { return 0 };
        let mut unreached = HostSet::default();
        let queued = {
            let mut state = lock(&self.gateway.state);
            let state = &mut *state;
            if frame.header.kind == Kind::Reply && !shares && !frame.header.is_distant() && !state.merge.is_empty() {
                let now = self.started.elapsed();
                let ready = state.merge.on_reply(frame.clone(), now);
                let queued = ready.into_iter().map(|one| {
                    let host = HostSet::one(one.header.dst.host);
                    self.post(state, cargo(&one.header, plain(&one)), host, &mut unreached)
                });
                let queued = queued.max().unwrap_or(0);
                self.arm(state);
                queued
            } else {
                let first = hosts.first().filter(|_| hosts.len() == 1 && frame.header.target_len == 0);
                if first.is_some() && !state.merge.is_empty() {
                    for held in state.merge.before(frame.header.src, frame.header.dst) {
                        let host = HostSet::one(held.header.dst.host);
                        self.post(state, cargo(&held.header, plain(&held)), host, &mut unreached);
                    }
                }
                let queued = self.post(state, cargo(&frame.header, body), hosts, &mut unreached);
                self.arm(state);
                queued
            }
        };
        if !unreached.is_empty() {
            self.bounce_from(frame, &unreached);
        }
        queued
    }

    /// Hands a frame to the peer streams, and those to the connections. Hosts that are dead, or that nobody knows, are noted.
    pub(super) fn post(&self, state: &mut State, cargo: Cargo, mut hosts: HostSet, unreached: &mut HostSet) -> usize {
        let me = self.me.host;
        // A host that only the controller knows of is not known here until it has told of it.
        let lost: HostSet = hosts
            .iter()
            .filter(|host| {
                state.topology.standing(*host) == Standing::Dead || (me == 0 && !state.topology.knows(*host))
            })
            .collect();
        if !lost.is_empty() {
            lost.iter().for_each(|host| {
                hosts.remove(host);
            });
            *unreached = unreached.union(&lost);
        }
        let mut most = 0;
        if let (1, Some(host)) = (hosts.len(), hosts.first()) {
            let Some(via) = state.topology.next_hop(me, host) else { return 0 };
            if !state.peer_streams.post_one(via, host, cargo) {
                *unreached = unreached.union(&hosts);
                return 0;
            }
            self.pump(state, via);
            most = state.peer_streams.waiting(via);
        } else {
            for (via, share) in state.topology.plan(me, &hosts) {
                let gone = state.peer_streams.post(via, share, cargo.clone());
                *unreached = unreached.union(&gone);
                self.pump(state, via);
                most = most.max(state.peer_streams.waiting(via));
            }
        }
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// Posts a frame to the one host that it is for.
    pub(super) fn post_frame(&self, state: &mut State, frame: &Frame, unreached: &mut HostSet) -> usize {
        let host = HostSet::one(frame.header.dst.host);
        self.post(state, cargo(&frame.header, plain(frame)), host, unreached)
    }

    /// Moves packets from the peer streams into a connection while it has room.
    pub(super) fn pump(&self, state: &mut State, via: HostNo) {
        let now = self.started.elapsed();
        let connection = state.peers.get(&via).and_then(|peer| peer.connection.clone());
        let Some(connection) = connection.filter(|connection| connection.is_open()) else {
            self.want(state, via, now);
            return;
        };
        while connection.has_room() {
            let Some(packet) = state.peer_streams.next_packet(via, now) else { break };
            if state.relays.is_empty() || packet.sole().is_none() {
                connection.send(&self.reactor, &packet, now);
            } else {
                // This host's own answer to a call that it has relayed goes with those of the others.
                let (alone, casts) = state.relays.offer(packet, now).into_iter().partition(|one| one.sole().is_some());
                self.send_on(state, alone);
                for cast in casts {
                    connection.send(&self.reactor, &cast, now);
                }
            }
        }
    }

    /// There is something for a host that is not connected.
    fn want(&self, state: &mut State, via: HostNo, now: Duration) {
        let peer = state.peers.entry(via).or_default();
        if peer.connection.is_none() && peer.lost_since.is_none() {
            peer.lost_since = Some(now);
        }
        if peer.dialing || peer.redial_at.is_some() {
            return;
        }
        // The I/O thread dials, or asks where it is.
        peer.redial_at = Some(now);
        state.armed = Duration::ZERO;
        self.reactor.ring_io();
    }

    /// Sends somebody's packet on, whatever is in it.
    pub(super) fn forward(&self, state: &mut State, via: HostNo, packet: Packet) {
        let now = self.started.elapsed();
        if let Some(connection) =
            state.peers.get(&via).and_then(|peer| peer.connection.as_ref()).filter(|connection| connection.is_open())
        {
            connection.send(&self.reactor, &packet, now);
            return;
        }
        let peer: &mut Peer = state.peers.entry(via).or_default();
        // What is dropped here its origin sends again.
        let len = packet.wire_len();
        if peer.kept_bytes + len <= MOST_KEPT {
            peer.kept_bytes += len;
            peer.kept.push_back(packet);
        }
        self.want(state, via, now);
    }

    /// Has the I/O thread look in no later than the peer streams want.
    pub(super) fn arm(&self, state: &mut State) {
        let next = [state.peer_streams.next_deadline(), state.merge.next_deadline(), state.relays.next_deadline()];
        if let Some(next) = next.into_iter().flatten().min()
            && next < state.armed
        {
            state.armed = next;
            self.reactor.ring_io();
        }
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
            if lock(&self.gateway.state).topology.knows(host) {
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
        let state = lock(&self.gateway.state);
        if let Some(verdict) = state.peers.get(&host).and_then(|peer| peer.verdict.clone()) {
            return verdict;
        }
        Arc::new(HostEnd::absent(if host < state.next_host && !state.topology.knows(host) {
            format!("host {host} has not dialed this script yet; wait for the `initialized` of its mesh of hosts first")
        } else {
            format!("host {host} is not, or not any more, part of this job")
        }))
    }

    // Back pressure.

    /// Bytes that wait for, or are under way to, the fullest of these hosts.
    pub(crate) fn outstanding_to(&self, hosts: &HostSet) -> usize {
        let state = lock(&self.gateway.state);
        let most = hosts.iter().map(|host| {
            let via = state.topology.next_hop(self.me.host, host).unwrap_or(host);
            state.peer_streams.waiting(via)
        });
        usize::try_from(most.max().unwrap_or(0)).unwrap_or(usize::MAX)
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
        let mut state = lock(&self.gateway.state);
        for frame in state.merge.expect(caller, call, count) {
            self.post_frame(&mut state, &frame, &mut unreached);
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
