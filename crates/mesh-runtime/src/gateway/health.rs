//! Whether the other hosts live, and what follows if one does not.
//!
//! GTW-2: the controller alone says that a host is dead, once, and everybody acts on its word: calls there fail, what was
//! owned from there ends, and the host itself, if it still lives, is refused and stops its work.
//! GTW-3: a host that nobody above can reach for the window ends its job's work by itself.
//! GTW-4: in a job that is held, that takes as long as it is held; and a controller that hears none of its hosts any more takes it
//! that it is cut off itself, and declares none of them dead for that time.

use super::State;
use super::connection::HostConnection;
use super::verdict::Missed;
use crate::runtime::{Runtime, lock};
use mesh_proto::control::{
    Down, EndJob, HostDown, HostLost, HostStanding, Introduction, Report, Revoked, Traits, Whereabouts,
};
use mesh_proto::hosts::{Beat, Farewell, Fate, HostSet, Parting, Standing};
use mesh_proto::{Frame, HostEnd, HostNo, ProcAddr, Target};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a host that was not reached is left alone until the next attempt: twice as long each time, up to the last.
const REDIAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(1000)];
/// How often it is looked again at hosts that are held.
const AGAIN: Duration = Duration::from_millis(100);
/// How often certificates of connected hosts are looked at again.
const RECHECK: Duration = Duration::from_secs(1);

/// What is to be done once the lock is let go.
#[derive(Default)]
struct Due {
    dial: Vec<HostNo>,
    ask: Vec<HostNo>,
    lost: Vec<(HostNo, Report)>,
    closed: Vec<(Arc<HostConnection>, String)>,
    silent: Vec<(Arc<HostConnection>, String)>,
    orphan: bool,
    /// A list of revocations that all hosts are to hear of.
    revoked: Option<Vec<u8>>,
}

impl State {
    /// At the controller of a job that is held: the hosts that may be silent because this side is cut off from them all, or was until
    /// just now (GTW-4). A host is missing by itself if any other was heard of well after it.
    fn held(&mut self, me: HostNo, now: Duration) -> HostSet {
        if me != 0 || self.hold.is_zero() {
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
                let heard = peer.connection.as_ref().map(|connection| connection.heard_at()).or(peer.heard);
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
        if silent.iter().any(|(host, _, last)| *last + self.window <= now && alone(*host, *last)) {
            self.cut_off = Some(now);
        }
        let held = |&&(host, _, last): &&(HostNo, Option<Duration>, Duration)| just_back || alone(host, last);
        let held: HostSet = silent.iter().filter(held).map(|(host, ..)| *host).collect();
        held
    }

    /// Takes a time in which this process did nothing for one in which it was cut off: its machine slept, or it was stopped.
    /// The connections that have ended meanwhile may be noticed, and the first of them be made again, before the next turn.
    fn notice_sleep(&mut self, now: Duration) {
        if now.saturating_sub(self.looked_at) > self.window / 2 {
            self.cut_off = Some(now);
        }
        self.looked_at = now;
    }

    /// At the controller: a host was connected to. If there was none before, the others have their time from now on (GTW-4).
    pub(super) fn back_again(&mut self, me: HostNo, now: Duration) {
        if me != 0 || self.hold.is_zero() {
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
}

impl Runtime {
    /// The I/O thread's turn: what is due. Returns when it wants to be called next.
    pub(crate) fn gateway_turn(&self) -> Option<Instant> {
        if !self.gateway.is_active() {
            return None;
        }
        let now = self.started.elapsed();
        let mut due = Due::default();
        let next = {
            let mut state = lock(&self.gateway.state);
            if state.over {
                return None;
            }
            self.tick_peer_streams(&mut state, now);
            self.tick_peers(&mut state, now, &mut due);
            let mut next =
                [state.peer_streams.next_deadline(), state.merge.next_deadline(), state.relays.next_deadline()]
                    .into_iter()
                    .flatten()
                    .min()
                    .unwrap_or(Duration::MAX);
            for peer in state.peers.values() {
                let beat = peer.heartbeat.as_ref().map(mesh_proto::hosts::Heartbeat::next_deadline);
                let end = peer.lost_since.map(|since| since + state.limit_of(peer));
                // One that is late already is waited for all the same (GTW-4).
                let end = end.map(|end| if end > now { end } else { now + AGAIN });
                next = [beat, peer.redial_at, end].into_iter().flatten().fold(next, Duration::min);
            }
            if state.peers.values().any(|peer| peer.connection.is_some()) {
                next = next.min(state.recheck_at);
            }
            if let Some(since) = state.orphaned {
                next = next.min(since + state.window.max(state.hold));
            }
            // What this turn was asked for may be settled already, and asked for again by the next packet: an ack that is
            // due in a moment, say. One look too many then costs less than a wake-up for every packet.
            let next = if state.armed > now { next.min(state.armed) } else { next };
            let next = next.max(now + Duration::from_micros(200));
            state.armed = next;
            next
        };
        for (connection, why) in due.closed {
            self.connection_lost(&connection, &why);
        }
        for (connection, why) in due.silent {
            if self.me == ProcAddr::CONTROLLER {
                // In case it hears more than it says.
                let farewell = Farewell { parting: Parting::YouAreDead, text: format!("declared dead: {why}") };
                connection.send(&self.reactor, &farewell.packet(self.me.host), now);
                connection.flush(&self.reactor);
            }
            if !self.connection_lost(&connection, &why) {
                // It was connected to anew meanwhile.
                continue;
            }
            let (child, above) = {
                let state = lock(&self.gateway.state);
                let above = state.topology.ancestors(self.me.host).contains(&connection.peer);
                (state.topology.children(self.me.host).contains(connection.peer), above)
            };
            if child {
                self.report_lost(connection.peer, Report::dead(Fate::Silent, why));
            } else if !above {
                self.dial_failed(connection.peer, Missed::for_good(Fate::Silent, why));
            }
        }
        for host in due.ask {
            let question = Whereabouts { host, address: None };
            self.dispatch(question.frame(self.me, ProcAddr::CONTROLLER), None);
        }
        for host in due.dial {
            self.dial(host);
        }
        if let Some(list) = due.revoked {
            let revoked = Revoked { list: list.into() };
            self.cast_to_agents(|agents| revoked.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        }
        for (host, report) in due.lost {
            self.report_lost(host, report);
        }
        if due.orphan {
            let limit = {
                let state = lock(&self.gateway.state);
                state.window.max(state.hold)
            };
            let why = format!("the controller could not be reached for {} s", limit.as_secs_f64());
            self.end_job(Parting::CutOff, &why);
        }
        self.started.checked_add(next)
    }

    fn tick_peer_streams(&self, state: &mut State, now: Duration) {
        let mut unreached = HostSet::default();
        for frame in state.merge.on_tick(now) {
            self.post_frame(state, &frame, &mut unreached);
        }
        let merged = state.relays.on_tick(now);
        self.send_on(state, merged);
        let mut packets = Vec::new();
        state.peer_streams.on_tick(now, &mut packets);
        self.send_on(state, packets);
        for via in state.peer_streams.take_ready() {
            self.pump(state, via);
        }
    }

    fn tick_peers(&self, state: &mut State, now: Duration, due: &mut Due) {
        let me = self.me.host;
        let default = state.window;
        let identity = self.gateway.identity.get().filter(|_| now >= state.recheck_at);
        if let Some(identity) = identity {
            state.recheck_at = now + RECHECK;
            let mut complaint = String::new();
            match identity.reload_if_changed() {
                Ok(true) if me == 0 => due.revoked = identity.revocations(),
                Ok(_) => {}
                Err(error) => complaint = format!("the credentials cannot be read again: {error}"),
            }
            // What stays wrong is told once.
            if !complaint.is_empty() && complaint != state.complaint {
                self.gateway.warn(complaint.clone());
            }
            state.complaint = complaint;
        }
        let children = state.topology.children(me);
        let hosts: Vec<HostNo> = state.peers.keys().copied().collect();
        let mut up = false;
        let held = state.held(me, now);
        for host in hosts {
            let standing = state.topology.standing(host);
            let parent = Some(host) == state.topology.parent(me);
            let pending = state.is_pending(host);
            let Some(peer) = state.peers.get_mut(&host) else { continue };
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
                let was_suspect = heartbeat.heard(connection.heard_at());
                heartbeat.sent(connection.sent_at());
                if was_suspect && connection.heard_at() + window / 4 > now && children.contains(host) {
                    due.lost.push((host, Report::Well));
                }
                loop {
                    match heartbeat.on_tick(now) {
                        Beat::Quiet => break,
                        Beat::Ping => {
                            let ping = mesh_proto::hosts::Packet::new(mesh_proto::hosts::PacketKind::Ping, me);
                            connection.send(&self.reactor, &ping, now);
                        }
                        Beat::Suspect if children.contains(host) => due.lost.push((host, Report::Suspect)),
                        Beat::Suspect => {}
                        Beat::Dead => {
                            peer.redial_at = None;
                            let why = format!("nothing was heard of it for {} s", window.as_secs_f64());
                            if held.contains(host) {
                                // This side may be the one that is cut off: another connection is made when it can be.
                                due.closed.push((Arc::clone(connection), why));
                            } else {
                                due.silent.push((Arc::clone(connection), why));
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
                if let Some(identity) = identity
                    && let Err(reason) = identity.check_peer(&connection.facts, std::time::SystemTime::now())
                {
                    due.closed.push((Arc::clone(connection), format!("its certificate holds no more: {reason}")));
                }
                up |= parent || host == 0;
                continue;
            }
            let limit = if held.contains(host) { limit.max(state.hold) } else { limit };
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
                if !children.contains(host) && !parent && host != 0 {
                    // There is another way.
                    peer.lost_since = None;
                    peer.redial_at = None;
                    if state.topology.unreachable(host) {
                        self.reroute(state, &HostSet::one(host));
                    }
                    continue;
                }
            }
            let Some(peer) = state.peers.get_mut(&host) else { continue };
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
            up |= state
                .peers
                .iter()
                .any(|(host, peer)| peer.connection.is_some() && state.topology.ancestors(me).contains(host));
            if up {
                state.orphaned = None;
            } else {
                // The window counts from the last sign of life, as it does for whoever is above.
                let heard = |host: &HostNo| state.peers.get(host).and_then(|peer| peer.lost_since);
                let last = state.topology.ancestors(me).iter().filter_map(heard).max();
                let since = *state.orphaned.get_or_insert(last.unwrap_or(now));
                due.orphan = now.saturating_sub(since) >= default.max(state.hold);
            }
        }
    }

    /// A connection has ended. If it should be there, it is made again; if that is refused, its host is dead.
    /// Returns whether it was the one in use.
    pub(super) fn connection_lost(&self, connection: &Arc<HostConnection>, why: &str) -> bool {
        connection.close(&self.reactor);
        self.gateway.connections.write().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&connection.token);
        let now = self.started.elapsed();
        {
            let mut state = lock(&self.gateway.state);
            if state.over {
                return false;
            }
            let me = self.me.host;
            let above = state.topology.ancestors(me).contains(&connection.peer);
            if state.closing {
                // What was said to it has been heard, or nobody is left to hear it.
                let gone = state.topology.subtree(connection.peer);
                for host in gone.iter() {
                    state.peer_streams.end(host);
                }
                drop(state);
                self.tell_room();
                return false;
            }
            let Some(peer) = state.peers.get_mut(&connection.peer) else { return false };
            // A later connection has taken its place.
            if peer.connection.as_ref().is_none_or(|current| current.token != connection.token) {
                return false;
            }
            peer.connection = None;
            peer.heartbeat = None;
            // The window counts from the last sign of life.
            let heard = connection.heard_at();
            peer.lost_since = Some(heard);
            peer.heard = Some(heard);
            peer.why = why.to_owned();
            peer.attempts = 0;
            if peer.dials {
                peer.redial_at = Some(now);
            } else if !above {
                peer.lost_since = if me == 0 { Some(heard) } else { None };
            }
            if above {
                // Where that was the only way up, silence has counted from then on (GTW-3).
                state.orphaned.get_or_insert(heard);
            }
            // Who sees it goes around it at once, before the controller has heard of it.
            let neighbour = above || state.topology.children(me).contains(connection.peer);
            if neighbour && state.topology.standing(connection.peer) == Standing::Live {
                self.stand(&mut state, connection.peer, Standing::Suspect);
            }
            state.armed = Duration::ZERO;
        }
        self.reach_out();
        self.reactor.ring_io();
        true
    }

    /// A host was dialed in vain.
    pub(super) fn dial_failed(&self, host: HostNo, missed: Missed) {
        let now = self.started.elapsed();
        let Missed { fate, why, mut gone } = missed;
        let report = {
            let mut state = lock(&self.gateway.state);
            let me = self.me.host;
            let child = state.topology.children(me).contains(host);
            let dead = state.topology.standing(host) == Standing::Dead;
            let window = state.window_of(host);
            let Some(peer) = state.peers.get_mut(&host) else { return };
            // One that does not listen yet may do so soon.
            gone &= fate != Fate::Unreachable
                || peer.lost_since.is_none_or(|since| now.saturating_sub(since) >= peer.patience());
            // Until its death is told nobody dials it anew, not even to tell it. What was said of the dead stays.
            peer.dialing = gone && child && !dead && peer.connection.is_none();
            if dead {
                return;
            }
            if peer.connection.is_some() {
                // It was dialed beside a connection that is silent, which is still the one to go by.
                peer.redial_at = Some(now + (window / 20).min(REDIAL[1]));
                return;
            }
            peer.why = why.clone();
            peer.attempts += 1;
            let wait = REDIAL[0] * 2_u32.saturating_pow(peer.attempts.min(8) - 1);
            peer.redial_at = Some(now + wait.min(REDIAL[1]));
            if gone && child {
                peer.redial_at = None;
                true
            } else {
                if gone && !child {
                    // Whoever relays for it knows better.
                    peer.redial_at = None;
                    peer.lost_since = None;
                    if state.topology.unreachable(host) {
                        self.reroute(&mut state, &HostSet::one(host));
                    }
                }
                state.armed = Duration::ZERO;
                false
            }
        };
        if report {
            self.report_lost(host, Report::dead(fate, why));
            if let Some(peer) = lock(&self.gateway.state).peers.get_mut(&host) {
                peer.dialing = false;
            }
        }
        self.reactor.ring_io();
    }

    /// Tells the controller, which may be this process, that a host is dead, suspect, or well again.
    pub(super) fn report_lost(&self, host: HostNo, report: Report) {
        if self.me == ProcAddr::CONTROLLER {
            self.on_host_lost(host, report);
        } else {
            self.dispatch(HostLost { host, report }.frame(self.me), None);
        }
    }

    /// The controller decides.
    pub(super) fn on_host_lost(&self, host: HostNo, report: Report) {
        let (fate, why) = match report {
            Report::Dead { fate, why } => (fate, why),
            Report::Well => return self.tell_standing(host, Standing::Live),
            Report::Suspect => return self.tell_standing(host, Standing::Suspect),
        };
        let label = self.host_label(host);
        let verdict = {
            let mut state = lock(&self.gateway.state);
            if state.topology.standing(host) == Standing::Dead || !state.topology.knows(host) || host == 0 {
                return;
            }
            let peer = state.peers.entry(host).or_default();
            // It is said once: who is let go says farewell before all have heard of it.
            if peer.verdict.is_some() {
                return;
            }
            let (fate, why) = super::releasing::end_of(peer.released, fate, why);
            let fate = match (fate, peer.introduction.is_some()) {
                (Fate::Released, _) => fate,
                (Fate::NotAuthenticated, true) => Fate::Expelled,
                (Fate::NotAuthenticated, false) | (_, true) => fate,
                (_, false) => Fate::NotAttached,
            };
            let verdict = HostEnd { fate, label, why };
            peer.verdict = Some(Arc::new(verdict.clone()));
            verdict
        };
        // Before anybody learns of it from somewhere else.
        let down = HostDown { host, end: verdict.clone() };
        self.cast_to_agents(|agents| down.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        self.host_down(host, verdict);
    }

    fn tell_standing(&self, host: HostNo, standing: Standing) {
        let told = HostStanding { host, live: standing == Standing::Live };
        self.cast_to_agents(|agents| told.frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
        self.set_standing(host, standing);
    }

    fn host_label(&self, host: HostNo) -> String {
        let address = lock(&self.gateway.state).peers.get(&host).and_then(|peer| peer.address.clone());
        let name = self.host_called(host).filter(|name| Some(name) != address.as_ref());
        let number = host.to_string();
        [name.unwrap_or(number), address.unwrap_or_default()]
            .iter()
            .filter(|part| !part.is_empty())
            .cloned()
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// From the controller to every other agent.
    pub(crate) fn cast_to_agents(&self, frame: impl FnOnce(&Target) -> Frame) {
        if let Some(agents) = self.other_agents() {
            self.dispatch(frame(&agents), None);
        }
    }

    /// A host's standing has changed: what went by it takes another way.
    pub(super) fn set_standing(&self, host: HostNo, standing: Standing) {
        self.stand(&mut lock(&self.gateway.state), host, standing);
        self.reach_out();
    }

    /// As [`Runtime::set_standing`], for who holds the state and reaches out later.
    pub(super) fn stand(&self, state: &mut State, host: HostNo, standing: Standing) {
        if let Some(changed) = state.topology.set(host, standing) {
            self.reroute(state, &changed);
        }
    }

    /// Sends again what these hosts have not acknowledged, by the way that leads there now.
    pub(super) fn reroute(&self, state: &mut State, hosts: &HostSet) {
        let State { peer_streams, topology, .. } = state;
        let me = self.me.host;
        peer_streams.reroute(hosts, &|host| topology.next_hop(me, host));
        for via in state.peer_streams.take_ready() {
            self.pump(state, via);
        }
        self.arm(state);
    }

    /// A host is dead, by the controller's word.
    pub(super) fn host_down(&self, host: HostNo, verdict: HostEnd) {
        let verdict = Arc::new(verdict);
        let (lost, connection, above) = {
            let mut state = lock(&self.gateway.state);
            if host == self.me.host {
                drop(state);
                let parting = if verdict.fate == Fate::Released { Parting::JobOver } else { Parting::CutOff };
                // For those who look in here the job goes on elsewhere.
                self.end_visits(Parting::CutOff, &verdict.to_string());
                self.end_job(parting, &verdict.to_string());
                return;
            }
            let above = state.topology.is_above(self.me.host, host) || self.me.host == 0;
            let Some(changed) = state.topology.set(host, Standing::Dead) else { return };
            let peer = state.peers.entry(host).or_default();
            peer.why = verdict.why.clone();
            peer.verdict = Some(Arc::clone(&verdict));
            peer.lost_since = None;
            peer.redial_at = None;
            peer.heartbeat = None;
            peer.kept.clear();
            peer.kept_bytes = 0;
            let connection = peer.connection.take();
            let lost = state.peer_streams.end(host);
            state.merge.end(|caller| caller.host == host);
            let merged = state.relays.lost(host);
            self.send_on(&mut state, merged);
            state.relays.end(host);
            state.assemblies.retain(|(origin, _), _| *origin != host);
            self.reroute(&mut state, &changed);
            (lost, connection, above)
        };
        if let Some(connection) = connection {
            // It hears of its death from those above it; others only take their leave.
            if above {
                let farewell = Farewell { parting: Parting::YouAreDead, text: format!("declared dead: {verdict}") };
                connection.send(&self.reactor, &farewell.packet(self.me.host), self.started.elapsed());
            }
            connection.close(&self.reactor);
            self.gateway
                .connections
                .write()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .remove(&connection.token);
        }
        self.end_visits_through(host);
        self.note_host_died(host, &verdict);
        self.tell_room();
        self.reach_out();
        let aftermath = lock(&self.agent).family.host_died(host);
        self.end_orphans(aftermath.end);
        self.bounce_lost(host, lost);
        let down = HostDown { host, end: (*verdict).clone() };
        for link in self.links() {
            link.send(&self.reactor, &down.frame(self.me, link.peer, None));
        }
        self.ranks_lost_with(host, &verdict);
    }

    /// What this process has to do with a host that is dead: its calls there are lost, its meshes have lost ranks.
    pub(super) fn ranks_lost_with(&self, host: HostNo, verdict: &HostEnd) {
        let ended = verdict.ended();
        self.landings_end(|one| one.host == host);
        let known = lock(&self.remote_meshes).on(host);
        for addr in known {
            self.deliver(Down::notice(addr, &ended).frame(ProcAddr::agent(host), self.me));
        }
        let ended = Arc::new(ended);
        self.calls.on_host_down(&self.reactor, host, &ended);
        self.forget_lines_of(host);
        self.forget_fallen();
        self.ports.on_host_down(host);
        self.refs_end(|one| one.host == host, &ended);
        self.meters.end_host(&self.reactor, host);
        self.answers_end_with(host);
    }

    // Where others are.

    pub(super) fn tell_whereabouts(&self, asker: ProcAddr, host: HostNo) {
        let address = lock(&self.gateway.state).peers.get(&host).and_then(|peer| peer.address.clone());
        let answer = Whereabouts { host, address: Some(address.unwrap_or_default()) };
        self.dispatch(answer.frame(self.me, asker), None);
    }

    pub(super) fn on_whereabouts(&self, host: HostNo, address: String) {
        {
            let mut state = lock(&self.gateway.state);
            let Some(peer) = state.peers.get_mut(&host) else { return };
            if address.is_empty() {
                // It has dialed the controller, and can be reached by that alone.
                peer.lost_since = None;
                if state.topology.unreachable(host) {
                    self.reroute(&mut state, &HostSet::one(host));
                }
                return;
            }
            peer.address = Some(address);
            if peer.connection.is_some() || peer.dialing {
                return;
            }
        }
        self.dial(host);
    }

    // The end.

    /// The other end has said that it ends.
    /// Nobody's word ends this host's work but the controller's and that of the hosts between the two: who is not above
    /// may have heard of its own death only.
    pub(super) fn on_farewell(&self, connection: &Arc<HostConnection>, farewell: &Farewell) {
        let Farewell { parting, text } = farewell;
        let (above, missed) = {
            let state = lock(&self.gateway.state);
            let missed =
                !state.closing && !state.over && state.topology.children(self.me.host).contains(connection.peer);
            (state.topology.is_above(connection.peer, self.me.host), missed)
        };
        match parting {
            Parting::YouAreDead if above => self.end_job(Parting::CutOff, text),
            // If it is true then the controller says so too.
            Parting::YouAreDead => {}
            _ if above && connection.peer == 0 => self.end_job(Parting::JobOver, text),
            _ if missed => self.report_lost(connection.peer, Report::dead(Fate::Left, text.clone())),
            _ => {}
        }
    }

    /// This host's part in the job is over: its process, or what holds this runtime, sees to the rest.
    pub(super) fn end_job(&self, parting: Parting, why: &str) {
        {
            let mut state = lock(&self.gateway.state);
            if std::mem::replace(&mut state.over, true) {
                return;
            }
        }
        self.end_visits(parting, why);
        if parting == Parting::CutOff {
            self.gateway.tell(format!("host {} stops its work: {why}", self.me.host));
        }
        let farewell = Farewell { parting, text: why.to_owned() }.packet(self.me.host);
        for connection in self.connections() {
            connection.send(&self.reactor, &farewell, self.started.elapsed());
            connection.flush(&self.reactor);
        }
        if let Some(ended) = self.gateway.ended.get() {
            (ended.0)(why.to_owned());
        }
    }

    /// The runtime closes: the others are told.
    pub(crate) fn close_gateway(&self, limit: Duration) {
        if !self.gateway.is_active() {
            return;
        }
        let until = Instant::now() + limit;
        // They refer to this runtime, and would keep it.
        self.close_listeners();
        if self.me == ProcAddr::CONTROLLER {
            lock(&self.gateway.state).closing = true;
            self.cast_to_agents(|agents| EndJob::frame(self.me, ProcAddr::CONTROLLER, Some(agents)));
            // What was said before the end is to arrive; a host that does not answer holds up nobody for long.
            let mut state = lock(&self.gateway.state);
            while !state.peer_streams.is_idle() && Instant::now() < until {
                self.gateway.room_wanted.store(true, Ordering::SeqCst);
                let wait = self.gateway.room.wait_timeout(state, Duration::from_millis(5));
                state = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
            state.over = true;
        }
        let parting = Parting::JobOver;
        let farewell = Farewell { parting, text: parting.to_string() }.packet(self.me.host);
        let connections: Vec<Arc<HostConnection>> = {
            let mut all = self.gateway.connections.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            all.drain().map(|(_, connection)| connection).collect()
        };
        for connection in connections {
            connection.send(&self.reactor, &farewell, self.started.elapsed());
            connection
                .drain(&self.reactor, until.saturating_duration_since(Instant::now()).min(Duration::from_millis(200)));
            connection.close(&self.reactor);
        }
        self.gateway.active.store(false, Ordering::SeqCst);
    }

    pub(super) fn close_listeners(&self) {
        let listeners = std::mem::take(&mut *lock(&self.gateway.listeners));
        listeners.iter().for_each(|(.., listener)| listener.close());
    }

    /// What an agent says of itself when it is attached.
    pub(super) fn introduction(name: &str, traits: &Traits) -> Introduction {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
        Introduction { name: name.to_owned(), pid: u64::from(std::process::id()), cpus, traits: traits.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gateway, Peer};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A controller that has lost the connections to two hosts, and last checked on them when it was heard of them.
    fn controller(hold: Duration) -> Gateway {
        let gateway = Gateway::new(0, 1);
        {
            let mut state = lock(&gateway.state);
            (state.window, state.hold) = (2 * SECOND, hold);
            assert!(state.topology.add_group(1, 2, 16));
            for host in [1, 2] {
                let lost = Peer { incarnation: 1, lost_since: Some(SECOND), heard: Some(SECOND), ..Peer::default() };
                state.peers.insert(host, lost);
            }
            state.held(0, SECOND);
        }
        gateway
    }

    /// GTW-4: the first host may be back before the next turn.
    #[test]
    fn the_first_host_that_is_back_after_a_sleep_gives_the_others_their_time() {
        let gateway = controller(60 * SECOND);
        let mut state = lock(&gateway.state);
        let now = 9 * SECOND;
        state.back_again(0, now);
        let first = state.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(now));
        assert_eq!(state.peers[&2].lost_since, Some(now));
        assert!(state.held(0, now).contains(2));
        // No longer than the window.
        state.held(0, now + SECOND);
        assert!(!state.held(0, now + 2 * SECOND).contains(2));
    }

    #[test]
    fn a_host_that_is_lost_while_the_controller_runs_gets_no_more_time_from_another_that_is_back() {
        let gateway = controller(60 * SECOND);
        let mut state = lock(&gateway.state);
        let first = state.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(3 * SECOND));
        for tenth in 10..30 {
            state.held(0, tenth * SECOND / 10);
        }
        state.back_again(0, 3 * SECOND);
        assert_eq!(state.peers[&2].lost_since, Some(SECOND));
        assert!(!state.held(0, 3 * SECOND).contains(2));
    }
}
