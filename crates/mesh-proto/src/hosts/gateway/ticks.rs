//! What is due: heartbeats, hosts to dial again, and hosts out of reach for too long.

use super::{Action, Gateway, Missed, Peer, Turn, Wire};
use crate::control::{Report, Whereabouts};
use crate::hosts::{Beat, Farewell, Fate, Heartbeat, HostSet, Packet, PacketKind, Parting, Standing};
use crate::{HostNo, ProcAddr};
use std::time::Duration;

/// How often to look at a host that is out of reach, and held.
const AGAIN: Duration = Duration::from_millis(100);
/// The least time between two ticks.
const BETWEEN: Duration = Duration::from_micros(200);

/// What a tick finds, carried out once all hosts that are due have been looked at.
struct Due<C> {
    dial: Vec<HostNo>,
    ask: Vec<HostNo>,
    reports: Vec<(HostNo, Report)>,
    closed: Vec<(HostNo, C, String)>,
    silent: Vec<(HostNo, C, String)>,
    /// At the controller of a job with a hold: hosts that may be silent because this side is cut off; on demand.
    held: Option<HostSet>,
}

/// A host that a tick looks at.
struct Look {
    host: HostNo,
    standing: Standing,
    is_child: bool,
}

impl<C> Default for Due<C> {
    fn default() -> Self {
        Self {
            dial: Vec::new(),
            ask: Vec::new(),
            reports: Vec::new(),
            closed: Vec::new(),
            silent: Vec::new(),
            held: None,
        }
    }
}

impl<W: Wire> Gateway<W> {
    /// When the next [`Event::Tick`](super::Event::Tick) is due; ask right after one. Anything earlier wakes.
    pub fn next_tick(&mut self, now: Duration) -> Duration {
        let orphan = self.orphaned.map(|since| since + self.orphan_limit());
        let next = [self.next_deadline(), self.schedule.next(), orphan].into_iter().flatten().min();
        let next = next.unwrap_or(Duration::MAX);
        // What this turn was asked for may be settled already, and asked for again by the next packet, such as an ack
        // that is due in a moment. One superfluous look costs less than a wake-up for every packet.
        let next = if self.armed > now { next.min(self.armed) } else { next };
        self.armed = next.max(now + BETWEEN);
        self.armed
    }

    /// When streams and merges next have something due; none if nothing is under way.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        [self.peer_streams.next_deadline(), self.merge.next_deadline(), self.relays.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    pub(super) fn tick(&mut self, turn: &mut Turn<'_, W>) {
        if self.over {
            return;
        }
        self.tick_streams(turn.wire, turn.now);
        let due = self.look_at_peers(turn.wire, turn.now);
        let is_orphaned = self.is_orphaned(turn.now);
        for (host, connection, why) in due.closed {
            self.closed(turn, host, &connection, &why);
            turn.out.push(Action::Close { connection, farewell: None });
        }
        for (host, connection, why) in due.silent {
            self.silent(turn, host, connection, why);
        }
        for host in due.ask {
            let question = Whereabouts { host, address: None };
            turn.out.push(Action::Send(question.frame(ProcAddr::agent(self.me), ProcAddr::CONTROLLER)));
        }
        for host in due.dial {
            self.dial(turn, host);
        }
        for (host, report) in due.reports {
            self.report(turn, host, report);
        }
        if is_orphaned {
            let why = format!("the controller could not be reached for {} s", self.orphan_limit().as_secs_f64());
            self.end(turn, Parting::CutOff, Parting::CutOff, &why);
        }
    }

    /// Handles a connection that was silent for the window.
    fn silent(&mut self, turn: &mut Turn<'_, W>, host: HostNo, connection: W::Connection, why: String) {
        // In case it hears more than it says.
        let farewell =
            (self.me == 0).then(|| Farewell { parting: Parting::YouAreDead, text: format!("declared dead: {why}") });
        let was_used = self.closed(turn, host, &connection, &why);
        turn.out.push(Action::Close { connection, farewell });
        if !was_used {
            return;
        }
        if self.topology.children(self.me).contains(host) {
            self.report(turn, host, Report::dead(Fate::Silent, why));
        } else if !self.topology.ancestors(self.me).contains(&host) {
            self.missed(turn, host, Missed::for_good(Fate::Silent, why));
        }
    }

    /// Plans the next look at a host. Call this after each change of what is due.
    pub(super) fn plan_look(&mut self, host: HostNo, now: Duration) {
        let deadline = if self.standing(host) == Standing::Dead {
            None
        } else {
            self.peers.get(&host).and_then(|peer| {
                let beat = peer.heartbeat.as_ref().map(Heartbeat::next_deadline);
                let end = self.lost_since(peer).map(|since| since + peer.limit(self.window));
                // A host that is already late is still waited for (GTW-4), and all such hosts are looked at together.
                let end = end.map(|end| if end > now { end } else { next_multiple(now, AGAIN) });
                // An attempt under way ends by itself, and the host is then planned again.
                let dials = !peer.dialing && (peer.dials || peer.connection.is_none());
                [beat, peer.redial_at.filter(|_| dials), end].into_iter().flatten().min()
            })
        };
        self.schedule.set(host, deadline);
    }

    fn look_at_peers(&mut self, wire: &W, now: Duration) -> Due<W::Connection> {
        let mut due = Due::default();
        self.notice_cut_off(wire, now);
        let hosts = self.schedule.take_due(now);
        if hosts.is_empty() {
            return due;
        }
        let children = self.topology.children(self.me);
        for host in hosts {
            let standing = self.standing(host);
            let Some(peer) = self.peers.get(&host).filter(|_| standing != Standing::Dead) else {
                self.schedule.watch(host, false);
                continue;
            };
            let look = Look { host, standing, is_child: children.contains(host) };
            if self.is_pending(host) {
                // ATT-1
                if let Some(peer) = self.peers.get_mut(&host) {
                    (peer.lost_since, peer.redial_at) = (None, None);
                }
            } else if peer.connection.is_some() {
                self.look_at_connected(wire, now, &look, &mut due);
            } else {
                self.look_at_lost(wire, now, &look, &mut due);
            }
            let heartbeat = self.peers.get(&host).and_then(|peer| peer.heartbeat.as_ref());
            let is_suspect = heartbeat.is_some_and(Heartbeat::is_suspect) || self.standing(host) == Standing::Suspect;
            self.schedule.watch(host, is_suspect);
            self.plan_look(host, now);
        }
        due
    }

    fn look_at_connected(&mut self, wire: &W, now: Duration, look: &Look, due: &mut Due<W::Connection>) {
        let Look { host, standing, is_child } = *look;
        let (me, default) = (self.me, self.window);
        let Some(peer) = self.peers.get_mut(&host) else { return };
        let window = peer.window(default);
        let (Some(connection), Some(heartbeat)) = (&peer.connection, &mut peer.heartbeat) else { return };
        let heard_at = wire.heard_at(connection);
        // A sign of life counts once: a suspect host does not become suspect again with every look.
        let was_suspect = peer.heard.replace(heard_at) != Some(heard_at) && heartbeat.heard(heard_at);
        heartbeat.sent(wire.sent_at(connection));
        // A host that reconnected while others were told of its silence is not suspect here, but to everyone else.
        let is_mistaken = standing == Standing::Suspect
            && !heartbeat.is_suspect()
            && peer.well_at.is_none_or(|at| at + window / 4 <= now);
        if (was_suspect || is_mistaken) && heard_at + window / 4 > now && is_child {
            peer.well_at = Some(now);
            due.reports.push((host, Report::Well));
        }
        let mut dead = None;
        loop {
            match heartbeat.on_tick(now) {
                Beat::Quiet => break,
                Beat::Ping => wire.send(connection, &Packet::new(PacketKind::Ping, me), now),
                Beat::Suspect if is_child => due.reports.push((host, Report::Suspect)),
                Beat::Suspect => {}
                Beat::Dead => {
                    peer.redial_at = None;
                    dead = Some(connection.clone());
                    break;
                }
            }
        }
        // Perhaps only the connection is silent: a network that has recovered, or a firewall that has forgotten it,
        // takes a new one at once, while the old one waits for TCP to retransmit.
        if !heartbeat.is_suspect() {
            peer.redial_at = None;
        } else if peer.dials && !peer.dialing && peer.redial_at.is_none_or(|at| at <= now) {
            peer.redial_at = None;
            due.dial.push(host);
        }
        if let Some(connection) = dead {
            let why = format!("nothing was heard of it for {} s", window.as_secs_f64());
            if self.is_held(wire, now, host, due) {
                // This side may be the one that is cut off: reconnect when possible.
                due.closed.push((host, connection, why));
            } else {
                due.silent.push((host, connection, why));
            }
        }
    }

    fn look_at_lost(&mut self, wire: &W, now: Duration, look: &Look, due: &mut Due<W::Connection>) {
        let Look { host, standing, is_child } = *look;
        let is_parent = Some(host) == self.topology.parent(self.me);
        let Some(peer) = self.peers.get(&host) else { return };
        let mut limit = peer.limit(self.window);
        let (silent, dials) = (self.lost_since(peer).map(|since| now.saturating_sub(since)), peer.dials);
        if silent.is_some_and(|silent| silent >= limit) && self.is_held(wire, now, host, due) {
            limit = limit.max(self.hold);
        }
        if silent.is_some_and(|silent| silent >= limit) {
            if is_child && (dials || self.me == 0) {
                let Some(peer) = self.peers.get_mut(&host) else { return };
                let why = match peer.why.as_str() {
                    "" => format!("it could not be reached for {} s", limit.as_secs_f64()),
                    why => why.to_owned(),
                };
                peer.redial_at = None;
                peer.lost_since = Some(now);
                due.reports.push((host, Report::dead(Fate::Unreachable, why)));
                return;
            }
            if !is_child && host != 0 && (!is_parent || self.is_connected_above(host)) {
                self.go_around(wire, now, host, is_parent && standing == Standing::Live);
                return;
            }
        }
        let Some(peer) = self.peers.get_mut(&host) else { return };
        if !peer.dialing && peer.redial_at.is_some_and(|at| at <= now) {
            peer.redial_at = None;
            // The host above dials; the one below waits.
            let above = is_parent || host == 0;
            if peer.address.is_some() && (peer.dials || !above) {
                peer.dials = true;
                due.dial.push(host);
            } else if !peer.asked && self.me != 0 && !above {
                peer.asked = true;
                due.ask.push(host);
            }
        }
    }

    /// Goes around a host that was not reached for the window, or is gone.
    pub(super) fn go_around(&mut self, wire: &W, now: Duration, host: HostNo, is_suspect: bool) {
        let Some(peer) = self.peers.get_mut(&host) else { return };
        peer.lost_since = None;
        peer.redial_at = None;
        if is_suspect {
            // It would have dialed. Word of its end may be lost for want of this side's acks, which wait for it.
            self.stand(wire, host, Standing::Suspect, now);
        }
        if self.topology.unreachable(host) {
            self.reroute(wire, &HostSet::one(host), now);
        }
    }

    fn is_held(&mut self, wire: &W, now: Duration, host: HostNo, due: &mut Due<W::Connection>) -> bool {
        due.held.get_or_insert_with(|| self.held(wire, now)).contains(host)
    }

    fn is_connected_to(&self, host: HostNo) -> bool {
        self.peers.get(&host).is_some_and(|peer: &Peer<W::Connection>| peer.connection.is_some())
    }

    /// Whether another host above this one than `host` is connected.
    pub(super) fn is_connected_above(&self, host: HostNo) -> bool {
        self.topology.ancestors(self.me).into_iter().any(|above| above != host && self.is_connected_to(above))
    }

    /// Whether no host above this one was connected for so long that it must end (GTW-3).
    fn is_orphaned(&mut self, now: Duration) -> bool {
        if self.me == 0 {
            return false;
        }
        let ancestors = self.topology.ancestors(self.me);
        if self.is_connected_to(0) || ancestors.iter().any(|above| self.is_connected_to(*above)) {
            self.orphaned = None;
            return false;
        }
        // The window counts from the last sign of life, as it does for the hosts above. It may be from a host that just
        // became suspect, over a connection that is still there.
        let above = self.peers.iter().filter(|(host, _)| self.topology.is_above(**host, self.me));
        let since = self.orphaned.or_else(|| above.filter_map(|(_, peer)| peer.heard).max()).unwrap_or(now);
        self.orphaned = Some(since);
        now.saturating_sub(since) >= self.orphan_limit()
    }
}

/// The first multiple of `step` after `now`.
fn next_multiple(now: Duration, step: Duration) -> Duration {
    let late = now.as_nanos() % step.as_nanos().max(1);
    now + step - Duration::from_nanos(u64::try_from(late).unwrap_or(0))
}
