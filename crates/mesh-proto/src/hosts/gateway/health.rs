//! Whether the other hosts live, and what follows if one does not: GTW-2 to GTW-4.

use super::{Action, Gateway, Missed, Turn, Wire};
use crate::control::{HostDown, HostLost, HostStanding, Report, Whereabouts};
use crate::hosts::{Beat, Farewell, Fate, HostSet, Packet, PacketKind, Parting, Standing};
use crate::{Frame, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::time::Duration;

/// How long a host that was not reached is left alone until the next attempt: twice as long each time, up to the last.
const REDIAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(1000)];
/// How often it is looked again at hosts that are held.
const AGAIN: Duration = Duration::from_millis(100);
/// No tick comes sooner after another.
const BETWEEN: Duration = Duration::from_micros(200);

/// What a tick finds, to be carried out once all peers were looked at.
struct Due<C> {
    dial: Vec<HostNo>,
    ask: Vec<HostNo>,
    lost: Vec<(HostNo, Report)>,
    closed: Vec<(HostNo, C, String)>,
    silent: Vec<(HostNo, C, String)>,
    orphan: bool,
}

impl<C> Default for Due<C> {
    fn default() -> Self {
        Self {
            dial: Vec::new(),
            ask: Vec::new(),
            lost: Vec::new(),
            closed: Vec::new(),
            silent: Vec::new(),
            orphan: false,
        }
    }
}

impl<W: Wire> Gateway<W> {
    /// When the next [`Event::Tick`](super::Event::Tick) is wanted, asked right after one. What comes up earlier wakes.
    pub fn next_tick(&mut self, now: Duration) -> Duration {
        let mut next = self.next_deadline().unwrap_or(Duration::MAX);
        for peer in self.peers.values() {
            let beat = peer.heartbeat.as_ref().map(crate::hosts::Heartbeat::next_deadline);
            let end = peer.lost_since.map(|since| since + peer.limit(self.window));
            // One that is late already is waited for all the same (GTW-4).
            let end = end.map(|end| if end > now { end } else { now + AGAIN });
            next = [beat, peer.redial_at, end].into_iter().flatten().fold(next, Duration::min);
        }
        if let Some(since) = self.orphaned {
            next = next.min(since + self.orphan_limit());
        }
        // What this turn was asked for may be settled already, and asked for again by the next packet: an ack that is
        // due in a moment, say. One look too many then costs less than a wake-up for every packet.
        let next = if self.armed > now { next.min(self.armed) } else { next };
        self.armed = next.max(now + BETWEEN);
        self.armed
    }

    /// When streams and merges have something to do by themselves; none if nothing is under way.
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
        let mut due = Due::default();
        self.tick_peers(turn.wire, turn.now, &mut due);
        for (host, connection, why) in due.closed {
            self.closed(turn, host, &connection, &why);
            turn.out.push(Action::Close { connection, farewell: None });
        }
        for (host, connection, why) in due.silent {
            // In case it hears more than it says.
            let farewell = (self.me == 0)
                .then(|| Farewell { parting: Parting::YouAreDead, text: format!("declared dead: {why}") });
            let was_used = self.closed(turn, host, &connection, &why);
            turn.out.push(Action::Close { connection, farewell });
            if !was_used {
                continue;
            }
            if self.topology.children(self.me).contains(host) {
                self.report(turn, host, Report::dead(Fate::Silent, why));
            } else if !self.topology.ancestors(self.me).contains(&host) {
                self.missed(turn, host, Missed::for_good(Fate::Silent, why));
            }
        }
        for host in due.ask {
            let question = Whereabouts { host, address: None };
            turn.out.push(Action::Send(question.frame(ProcAddr::agent(self.me), ProcAddr::CONTROLLER)));
        }
        for host in due.dial {
            self.dial(turn, host);
        }
        for (host, report) in due.lost {
            self.report(turn, host, report);
        }
        if due.orphan {
            let why = format!("the controller could not be reached for {} s", self.orphan_limit().as_secs_f64());
            self.end(turn, Parting::CutOff, Parting::CutOff, &why);
        }
    }

    /// At the controller of a job that is held: the hosts that may be silent because this side is cut off from them all, or was
    /// until just now (GTW-4). A host is missing by itself if any other was heard of well after it.
    fn held(&mut self, wire: &W, now: Duration) -> HostSet {
        if self.me != 0 || self.hold.is_zero() {
            return HostSet::default();
        }
        self.notice_sleep(now);
        // One that others relay to was perhaps never heard of directly.
        let silent: Vec<(HostNo, Option<Duration>, Duration)> = self
            .peers
            .iter()
            .filter(|(host, peer)| {
                let attached = peer.incarnation != 0 || peer.introduction.is_some();
                attached && self.topology.standing(**host) != Standing::Dead
            })
            .filter_map(|(host, peer)| {
                let heard = peer.connection.as_ref().map(|connection| wire.heard_at(connection)).or(peer.heard);
                Some((*host, heard, heard.or(peer.lost_since)?))
            })
            .collect();
        let half = self.window / 2;
        let just_back = self.cut_off.is_some_and(|at| now.saturating_sub(at) < self.window);
        let alone = |host: HostNo, last: Duration| {
            let later = |(other, heard, _): &(HostNo, Option<Duration>, Duration)| {
                *other != host && heard.is_some_and(|at| at > last + half)
            };
            last + half <= now && !silent.iter().any(later)
        };
        // Half a window without any of them is enough: the first to be heard again may be so before the window is over.
        let all_silent = silent.iter().filter_map(|(_, heard, _)| *heard).max().is_some_and(|at| at + half <= now);
        if all_silent || silent.iter().any(|(host, _, last)| *last + self.window <= now && alone(*host, *last)) {
            self.cut_off = Some(now);
        }
        let held = |&&(host, _, last): &&(HostNo, Option<Duration>, Duration)| just_back || alone(host, last);
        silent.iter().filter(held).map(|(host, ..)| *host).collect()
    }

    /// Takes a time in which this process did nothing for one in which it was cut off: its machine slept, or it was stopped.
    /// The connections that have ended meanwhile may be noticed, and the first of them be made again, before the next tick.
    fn notice_sleep(&mut self, now: Duration) {
        if now.saturating_sub(self.looked_at) > self.window / 2 {
            self.cut_off = Some(now);
        }
        self.looked_at = now;
    }

    /// At the controller: a host was connected to. If there was none before, the others have their time from now on (GTW-4).
    pub(super) fn back_again(&mut self, now: Duration) {
        if self.me != 0 || self.hold.is_zero() {
            return;
        }
        self.notice_sleep(now);
        let was_cut_off = self.cut_off.is_some_and(|at| now.saturating_sub(at) < self.window);
        if was_cut_off {
            self.cut_off = Some(now);
            for peer in self.peers.values_mut() {
                peer.lost_since = peer.lost_since.map(|since| since.max(now));
            }
        }
    }

    fn tick_peers(&mut self, wire: &W, now: Duration, due: &mut Due<W::Connection>) {
        let me = self.me;
        let default = self.window;
        let children = self.topology.children(me);
        let hosts: Vec<HostNo> = self.peers.keys().copied().collect();
        let mut up = false;
        let held = self.held(wire, now);
        for host in hosts {
            let standing = self.topology.standing(host);
            let parent = Some(host) == self.topology.parent(me);
            let pending = self.is_pending(host);
            let Some(peer) = self.peers.get_mut(&host) else { continue };
            if standing == Standing::Dead {
                continue;
            }
            if pending {
                // ATT-1
                (peer.lost_since, peer.redial_at) = (None, None);
                continue;
            }
            let (window, limit) = (peer.window(default), peer.limit(default));
            if let (Some(connection), Some(heartbeat)) = (&peer.connection, &mut peer.heartbeat) {
                let heard_at = wire.heard_at(connection);
                // A sign of life counts once: who is suspect is not so anew with every look.
                let was_suspect = peer.heard.replace(heard_at) != Some(heard_at) && heartbeat.heard(heard_at);
                heartbeat.sent(wire.sent_at(connection));
                // Who was connected to anew while others were told of its silence is not suspect here, but is to all.
                let is_mistaken = standing == Standing::Suspect
                    && !heartbeat.is_suspect()
                    && peer.well_at.is_none_or(|at| at + window / 4 <= now);
                if (was_suspect || is_mistaken) && heard_at + window / 4 > now && children.contains(host) {
                    peer.well_at = Some(now);
                    due.lost.push((host, Report::Well));
                }
                loop {
                    match heartbeat.on_tick(now) {
                        Beat::Quiet => break,
                        Beat::Ping => wire.send(connection, &Packet::new(PacketKind::Ping, me), now),
                        Beat::Suspect if children.contains(host) => due.lost.push((host, Report::Suspect)),
                        Beat::Suspect => {}
                        Beat::Dead => {
                            peer.redial_at = None;
                            let why = format!("nothing was heard of it for {} s", window.as_secs_f64());
                            if held.contains(host) {
                                // This side may be the one that is cut off: another connection is made when it can be.
                                due.closed.push((host, connection.clone(), why));
                            } else {
                                due.silent.push((host, connection.clone(), why));
                            }
                            break;
                        }
                    }
                }
                // What is silent may be the connection alone: a network that is well again, or a firewall that has forgotten
                // it, takes a new one at once, while the old one waits for TCP to send again.
                if !heartbeat.is_suspect() {
                    peer.redial_at = None;
                } else if peer.dials && !peer.dialing && peer.redial_at.is_none_or(|at| at <= now) {
                    peer.redial_at = None;
                    due.dial.push(host);
                }
                up |= parent || host == 0;
                continue;
            }
            let limit = if held.contains(host) { limit.max(self.hold) } else { limit };
            let silent = peer.lost_since.map(|since| now.saturating_sub(since));
            if silent.is_some_and(|silent| silent >= limit) {
                if children.contains(host) && (peer.dials || me == 0) {
                    let why = match peer.why.as_str() {
                        "" => format!("it could not be reached for {} s", limit.as_secs_f64()),
                        why => why.to_owned(),
                    };
                    peer.redial_at = None;
                    due.lost.push((host, Report::dead(Fate::Unreachable, why)));
                    peer.lost_since = Some(now);
                    continue;
                }
                if !children.contains(host) && host != 0 && (!parent || self.is_connected_above(host)) {
                    // There is another way.
                    let Some(peer) = self.peers.get_mut(&host) else { continue };
                    peer.lost_since = None;
                    peer.redial_at = None;
                    if parent && standing == Standing::Live {
                        // It would have dialed. Word of its end may be lost for want of this side's acks, which wait for it.
                        self.stand(wire, host, Standing::Suspect, now);
                    }
                    if self.topology.unreachable(host) {
                        self.reroute(wire, &HostSet::one(host), now);
                    }
                    continue;
                }
            }
            let Some(peer) = self.peers.get_mut(&host) else { continue };
            if !peer.dialing && peer.redial_at.is_some_and(|at| at <= now) {
                peer.redial_at = None;
                // Who is above dials; whoever is below waits.
                let above = parent || host == 0;
                if peer.address.is_some() && (peer.dials || !above) {
                    peer.dials = true;
                    due.dial.push(host);
                } else if !peer.asked && me != 0 && !above {
                    peer.asked = true;
                    due.ask.push(host);
                }
            }
        }
        if me != 0 {
            let ancestors = self.topology.ancestors(me);
            up |= self.peers.iter().any(|(host, peer)| peer.connection.is_some() && ancestors.contains(host));
            if up {
                self.orphaned = None;
            } else {
                // The window counts from the last sign of life, as it does for whoever is above.
                let heard = |host: &HostNo| self.peers.get(host).and_then(|peer| peer.lost_since);
                let last = ancestors.iter().filter_map(heard).max();
                let since = *self.orphaned.get_or_insert(last.unwrap_or(now));
                due.orphan = now.saturating_sub(since) >= self.orphan_limit();
            }
        }
    }

    /// Whether there is a connection to another of those above this host than `host`.
    fn is_connected_above(&self, host: HostNo) -> bool {
        let connected = |above: &HostNo| self.peers.get(above).is_some_and(|peer| peer.connection.is_some());
        self.topology.ancestors(self.me).iter().any(|above| *above != host && connected(above))
    }

    /// A connection has ended. If it should be there, it is made again; if that is refused, its host is dead.
    /// Returns whether it was the one in use.
    pub(super) fn closed(
        &mut self,
        turn: &mut Turn<'_, W>,
        host: HostNo,
        connection: &W::Connection,
        why: &str,
    ) -> bool {
        if self.over {
            return false;
        }
        let me = self.me;
        let above = self.topology.ancestors(me).contains(&host);
        if self.closing {
            // What was said to it has been heard, or nobody is left to hear it.
            for gone in self.topology.subtree(host).iter() {
                self.peer_streams.end(gone);
            }
            return false;
        }
        let Some(peer) = self.peers.get_mut(&host) else { return false };
        // A later connection has taken its place.
        if peer.connection.as_ref().is_none_or(|current| !turn.wire.is_same(current, connection)) {
            return false;
        }
        peer.connection = None;
        peer.heartbeat = None;
        // The window counts from the last sign of life.
        let heard = turn.wire.heard_at(connection);
        peer.lost_since = Some(heard);
        peer.heard = Some(heard);
        why.clone_into(&mut peer.why);
        peer.attempts = 0;
        if peer.dials {
            peer.redial_at = Some(turn.now);
        } else if !above {
            peer.lost_since = if me == 0 { Some(heard) } else { None };
        }
        if above {
            // Where that was the only way up, silence has counted from then on (GTW-3).
            self.orphaned.get_or_insert(heard);
        }
        // Who sees it goes around it at once, before the controller has heard of it.
        let neighbour = above || self.topology.children(me).contains(host);
        if neighbour && self.standing(host) == Standing::Live {
            self.stand(turn.wire, host, Standing::Suspect, turn.now);
        }
        self.look_soon();
        self.reach_out(turn);
        turn.wire.wake();
        true
    }

    /// A host was dialed in vain.
    pub(super) fn missed(&mut self, turn: &mut Turn<'_, W>, host: HostNo, missed: Missed) {
        let now = turn.now;
        let Missed { fate, why, mut gone } = missed;
        let child = self.topology.children(self.me).contains(host);
        let dead = self.standing(host) == Standing::Dead;
        let window = self.window_of(host);
        let Some(peer) = self.peers.get_mut(&host) else { return };
        // One that does not listen yet may do so soon.
        gone &= fate != Fate::Unreachable
            || peer.lost_since.is_none_or(|since| now.saturating_sub(since) >= peer.patience());
        peer.dialing = false;
        // What was said of the dead stays.
        if dead {
            return;
        }
        if peer.connection.is_some() {
            // It was dialed beside a connection that is silent, which is still the one to go by.
            peer.redial_at = Some(now + (window / 20).min(REDIAL[1]));
            return;
        }
        peer.why.clone_from(&why);
        peer.attempts += 1;
        let wait = REDIAL[0] * 2_u32.saturating_pow(peer.attempts.min(8) - 1);
        peer.redial_at = Some(now + wait.min(REDIAL[1]));
        if gone && child {
            peer.redial_at = None;
            self.report(turn, host, Report::dead(fate, why));
        } else {
            if gone {
                // Whoever relays for it knows better.
                peer.redial_at = None;
                peer.lost_since = None;
                if self.topology.unreachable(host) {
                    self.reroute(turn.wire, &HostSet::one(host), now);
                }
            }
            self.look_soon();
        }
        turn.wire.wake();
    }

    /// Tells the controller, which may be this host, that a host is dead, suspect, or well again.
    pub(super) fn report(&mut self, turn: &mut Turn<'_, W>, host: HostNo, report: Report) {
        if self.me == 0 {
            self.decide(turn, host, report);
        } else {
            turn.out.push(Action::Send(HostLost { host, report }.frame(ProcAddr::agent(self.me))));
        }
    }

    /// The controller decides.
    fn decide(&mut self, turn: &mut Turn<'_, W>, host: HostNo, report: Report) {
        match report {
            Report::Dead { fate, why } => self.lost(turn, host, fate, why),
            Report::Well => self.tell_standing(turn, host, Standing::Live),
            Report::Suspect => self.tell_standing(turn, host, Standing::Suspect),
        }
    }

    /// At the controller: a host is dead from now on (GTW-2).
    pub(super) fn lost(&mut self, turn: &mut Turn<'_, W>, host: HostNo, fate: Fate, why: String) {
        if self.standing(host) == Standing::Dead || !self.topology.knows(host) || host == 0 || self.me != 0 {
            return;
        }
        let label = self.label_of(host);
        let peer = self.peer(host);
        // It is said once: who is let go says farewell before all have heard of it.
        if peer.verdict.is_some() {
            return;
        }
        let (fate, why) = super::roster::end_of(peer.released, fate, why);
        let fate = match (fate, peer.introduction.is_some()) {
            (Fate::Released, _) => fate,
            (Fate::NotAuthenticated, true) => Fate::Expelled,
            (Fate::NotAuthenticated, false) | (_, true) => fate,
            (_, false) => Fate::NotAttached,
        };
        let end = HostEnd { fate, label, why };
        peer.verdict = Some(Arc::new(end.clone()));
        // Before anybody learns of it from somewhere else.
        let down = HostDown { host, end: end.clone() };
        self.cast(turn, |me, agents| down.frame(me, ProcAddr::CONTROLLER, Some(agents)));
        self.down(turn, host, end);
    }

    fn tell_standing(&mut self, turn: &mut Turn<'_, W>, host: HostNo, standing: Standing) {
        let told = HostStanding { host, live: standing == Standing::Live };
        self.cast(turn, |me, agents| told.frame(me, ProcAddr::CONTROLLER, Some(agents)));
        self.set_standing(turn, host, standing);
    }

    /// A host's standing has changed: what went by it takes another way.
    fn set_standing(&mut self, turn: &mut Turn<'_, W>, host: HostNo, standing: Standing) {
        self.stand(turn.wire, host, standing, turn.now);
        self.reach_out(turn);
    }

    /// As [`Gateway::set_standing`], for who reaches out later.
    pub(super) fn stand(&mut self, wire: &W, host: HostNo, standing: Standing, now: Duration) {
        if let Some(changed) = self.topology.set(host, standing) {
            self.reroute(wire, &changed, now);
        }
    }

    /// A host is dead, by the controller's word.
    fn down(&mut self, turn: &mut Turn<'_, W>, host: HostNo, end: HostEnd) {
        let end = Arc::new(end);
        if host == self.me {
            let parting = if end.fate == Fate::Released { Parting::JobOver } else { Parting::CutOff };
            // For those who look in here the job goes on elsewhere.
            return self.end(turn, parting, Parting::CutOff, &end.to_string());
        }
        let above = self.topology.is_above(self.me, host) || self.me == 0;
        let Some(changed) = self.topology.set(host, Standing::Dead) else { return };
        let peer = self.peer(host);
        peer.why.clone_from(&end.why);
        peer.verdict = Some(Arc::clone(&end));
        peer.lost_since = None;
        peer.redial_at = None;
        peer.heartbeat = None;
        peer.kept.clear();
        peer.kept_bytes = 0;
        let connection = peer.connection.take();
        let lost = self.peer_streams.end(host);
        self.merge.end(|caller| caller.host == host);
        let merged = self.relays.lost(host);
        self.send_on(turn.wire, merged, turn.now);
        self.relays.end(host);
        self.reroute(turn.wire, &changed, turn.now);
        if let Some(connection) = connection {
            // It hears of its death from those above it; others only take their leave.
            let farewell =
                above.then(|| Farewell { parting: Parting::YouAreDead, text: format!("declared dead: {end}") });
            turn.out.push(Action::Close { connection, farewell });
        }
        turn.out.push(Action::Died { host, end, lost });
        self.reach_out(turn);
    }

    /// What gateways tell each other. What ends or reroutes the work of others counts from the controller alone, and a report
    /// on a host from those above it.
    pub(super) fn told(&mut self, turn: &mut Turn<'_, W>, frame: &Frame) {
        let header = frame.header;
        let ordered = header.src == ProcAddr::CONTROLLER;
        match header.kind {
            Kind::HostDown if ordered => {
                if let Some(HostDown { host, end }) = HostDown::read(frame) {
                    self.down(turn, host, end);
                }
            }
            Kind::HostLost if self.me == 0 => {
                let Some(HostLost { host, report }) = HostLost::read(frame) else { return };
                if header.src.is_agent() && self.topology.is_above(header.src.host, host) {
                    self.decide(turn, host, report);
                }
            }
            Kind::Standing if ordered => {
                if let Some(told) = HostStanding::read(frame) {
                    self.set_standing(turn, told.host, told.standing());
                }
            }
            Kind::Whereabouts => match Whereabouts::read(frame) {
                Some(Whereabouts { host, address: Some(address) }) => self.found(turn, host, address),
                Some(Whereabouts { host, address: None }) if self.me == 0 => {
                    let address = self.peers.get(&host).and_then(|peer| peer.address.clone());
                    let answer = Whereabouts { host, address: Some(address.unwrap_or_default()) };
                    turn.out.push(Action::Send(answer.frame(ProcAddr::CONTROLLER, header.src)));
                }
                Some(_) | None => {}
            },
            Kind::EndJob if ordered => {
                let over = Parting::JobOver;
                self.end(turn, over, over, "the controller has ended the job");
            }
            _ => {}
        }
    }

    fn found(&mut self, turn: &mut Turn<'_, W>, host: HostNo, address: String) {
        let Some(peer) = self.peers.get_mut(&host) else { return };
        if address.is_empty() {
            // It has dialed the controller, and can be reached by that alone.
            peer.lost_since = None;
            if self.topology.unreachable(host) {
                self.reroute(turn.wire, &HostSet::one(host), turn.now);
            }
            return;
        }
        peer.address = Some(address);
        if peer.connection.is_none() && !peer.dialing {
            self.dial(turn, host);
        }
    }

    /// The other end has said that it ends. Nobody's word ends this host's work but the controller's and that of the hosts
    /// between the two: who is not above may have heard of its own death only.
    pub(super) fn parted(&mut self, turn: &mut Turn<'_, W>, host: HostNo, farewell: &Farewell) {
        let Farewell { parting, text } = farewell;
        let above = self.topology.is_above(host, self.me);
        let missed = !self.closing && !self.over && self.topology.children(self.me).contains(host);
        match parting {
            Parting::YouAreDead if above => self.end(turn, Parting::CutOff, Parting::CutOff, text),
            // If it is true then the controller says so too.
            Parting::YouAreDead => {}
            _ if above && host == 0 => self.end(turn, Parting::JobOver, Parting::JobOver, text),
            _ if missed => self.report(turn, host, Report::dead(Fate::Left, text.clone())),
            _ => {}
        }
    }

    /// This host's part in the job is over.
    pub(super) fn end(&mut self, turn: &mut Turn<'_, W>, parting: Parting, visitors: Parting, why: &str) {
        if !std::mem::replace(&mut self.over, true) {
            turn.out.push(Action::End { parting, visitors, why: why.to_owned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::gateway::Peer;

    const SECOND: Duration = Duration::from_secs(1);

    /// One over which nothing goes.
    struct Cut;

    impl Wire for Cut {
        type Connection = ();

        fn send(&self, (): &(), _: &Packet, _: Duration) {}

        fn is_open(&self, (): &()) -> bool {
            false
        }

        fn has_room(&self, (): &()) -> bool {
            false
        }

        fn heard_at(&self, (): &()) -> Duration {
            Duration::ZERO
        }

        fn sent_at(&self, (): &()) -> Duration {
            Duration::ZERO
        }

        fn is_same(&self, (): &(), (): &()) -> bool {
            true
        }

        fn wake(&self) {}
    }

    /// A controller that has lost the connections to two hosts, and last checked on them when it was heard of them.
    fn controller() -> Gateway<Cut> {
        let mut gateway = Gateway::new(0, 1);
        (gateway.window, gateway.hold) = (2 * SECOND, 60 * SECOND);
        assert!(gateway.topology.add_group(1, 2, 16));
        for host in [1, 2] {
            let lost = Peer { incarnation: 1, lost_since: Some(SECOND), heard: Some(SECOND), ..Peer::default() };
            gateway.peers.insert(host, lost);
        }
        gateway.held(&Cut, SECOND);
        gateway
    }

    /// GTW-4: the first host may be back before the next tick.
    #[test]
    fn the_first_host_that_is_back_after_a_sleep_gives_the_others_their_time() {
        let mut gateway = controller();
        let now = 9 * SECOND;
        gateway.back_again(now);
        let first = gateway.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(now));
        assert_eq!(gateway.peers[&2].lost_since, Some(now));
        assert!(gateway.held(&Cut, now).contains(2));
        // No longer than the window, in which the first goes on to be heard.
        gateway.peers.get_mut(&1).unwrap().heard = Some(now + SECOND);
        gateway.held(&Cut, now + SECOND);
        assert!(!gateway.held(&Cut, now + 2 * SECOND).contains(2));
    }

    #[test]
    fn a_host_that_is_lost_while_the_controller_runs_gets_no_more_time_from_another_that_is_back() {
        let mut gateway = controller();
        let first = gateway.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(3 * SECOND));
        for tenth in 10..30 {
            gateway.held(&Cut, tenth * SECOND / 10);
        }
        gateway.back_again(3 * SECOND);
        assert_eq!(gateway.peers[&2].lost_since, Some(SECOND));
        assert!(!gateway.held(&Cut, 3 * SECOND).contains(2));
    }
}
