//! Lost connections, silent or dead hosts, and the consequences: GTW-2 and GTW-3.

use super::{Action, Gateway, Missed, Turn, Wire};
use crate::control::{HostDown, HostLost, HostStanding, Report, Whereabouts};
use crate::hosts::{Farewell, Fate, HostSet, Parting, Standing};
use crate::{Frame, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::time::Duration;

/// The first and the longest delay before an unreachable host is dialed again. It doubles each time.
const REDIAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(1000)];

/// The longest time between two attempts to reach a host: several fit into the window.
fn redial_at_most(window: Duration) -> Duration {
    (window / 8).clamp(REDIAL[0], REDIAL[1])
}

impl<W: Wire> Gateway<W> {
    /// A connection has ended. If it should exist, it is made again; if that is refused, its host is dead. Returns
    /// whether it was the one in use.
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
            // What was sent to it has arrived, or nobody is left to receive it.
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
            // If that was the only way up, silence counts from then on (GTW-3).
            self.orphaned.get_or_insert(heard);
        }
        // Go around it at once, before the controller hears of it.
        let neighbour = above || self.topology.children(me).contains(host);
        if neighbour && self.standing(host) == Standing::Live {
            self.stand(turn.wire, host, Standing::Suspect, turn.now);
        }
        self.plan_look(host, turn.now);
        self.look_soon();
        self.reach_out(turn);
        turn.wire.wake();
        true
    }

    /// An attempt to dial a host failed.
    pub(super) fn missed(&mut self, turn: &mut Turn<'_, W>, host: HostNo, missed: Missed) {
        let now = turn.now;
        let Missed { fate, why, mut gone } = missed;
        let child = self.topology.children(self.me).contains(host);
        let dead = self.standing(host) == Standing::Dead;
        let window = self.window_of(host);
        let lost_since = self.peers.get(&host).and_then(|peer| self.lost_since(peer));
        let Some(peer) = self.peers.get_mut(&host) else { return };
        // A host that does not listen yet may do so soon.
        gone &=
            fate != Fate::Unreachable || lost_since.is_none_or(|since| now.saturating_sub(since) >= peer.patience());
        peer.dialing = false;
        // The verdict on a dead host stays.
        if dead {
            return;
        }
        if peer.connection.is_some() {
            // It was dialed beside a silent connection, which still decides.
            peer.redial_at = Some(now + (window / 20).min(REDIAL[1]));
            return self.plan_look(host, now);
        }
        peer.why.clone_from(&why);
        peer.attempts += 1;
        let wait = REDIAL[0] * 2_u32.saturating_pow(peer.attempts.min(8) - 1);
        peer.redial_at = Some(now + wait.min(redial_at_most(window)));
        if gone && child {
            peer.redial_at = None;
            self.report(turn, host, Report::dead(fate, why));
        } else {
            if gone {
                // A host that relays for it knows better. If it is the parent, do not wait for a window of silence:
                // each refusal would restart it, and word of its end waits for acks that would go through it.
                let is_parent = Some(host) == self.topology.parent(self.me);
                self.go_around(turn.wire, now, host, is_parent && self.is_connected_above(host));
            }
            self.look_soon();
        }
        self.plan_look(host, now);
        turn.wire.wake();
    }

    /// Reports to the controller, perhaps this host, that a host is dead, suspect, or well again.
    pub(super) fn report(&mut self, turn: &mut Turn<'_, W>, host: HostNo, report: Report) {
        if self.me == 0 {
            self.decide(turn, host, report);
        } else {
            turn.out.push(Action::Send(HostLost { host, report }.frame(ProcAddr::agent(self.me))));
        }
    }

    /// At the controller: decides on a report.
    fn decide(&mut self, turn: &mut Turn<'_, W>, host: HostNo, report: Report) {
        match report {
            Report::Dead { fate, why } => self.lost(turn, host, fate, why),
            Report::Well => self.tell_standing(turn, host, Standing::Live),
            Report::Suspect => self.tell_standing(turn, host, Standing::Suspect),
        }
    }

    /// At the controller: declares a host dead (GTW-2).
    pub(super) fn lost(&mut self, turn: &mut Turn<'_, W>, host: HostNo, fate: Fate, why: String) {
        if self.standing(host) == Standing::Dead || !self.topology.knows(host) || host == 0 || self.me != 0 {
            return;
        }
        let label = self.label_of(host);
        let peer = self.peer(host);
        // It is declared once: a host being released says farewell before all have heard of it.
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

    /// Changes a host's standing, and reroutes what went through it.
    fn set_standing(&mut self, turn: &mut Turn<'_, W>, host: HostNo, standing: Standing) {
        self.stand(turn.wire, host, standing, turn.now);
        self.reach_out(turn);
    }

    /// Like [`Gateway::set_standing`], for callers that reach out later.
    pub(super) fn stand(&mut self, wire: &W, host: HostNo, standing: Standing, now: Duration) {
        if let Some(changed) = self.topology.set(host, standing) {
            // The next tick sees whether it is true, and later ticks when it no longer is.
            self.schedule.watch(host, standing == Standing::Suspect);
            self.reroute(wire, &changed, now);
        }
    }

    /// The controller declared a host dead.
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
        self.schedule.watch(host, false);
        self.schedule.set(host, None);
        let peer = self.peer(host);
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
            // It hears of its death from those above it; others only close.
            let farewell = above.then(|| Farewell { parting: Parting::YouAreDead, text: end.verdict() });
            turn.out.push(Action::Close { connection, farewell });
        }
        turn.out.push(Action::Died { host, end, lost });
        self.reach_out(turn);
    }

    /// Handles a frame from another gateway. Only the controller may end or reroute others' work, and only a host above
    /// may report on another.
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
            // It has dialed the controller, and is reachable only through it.
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

    /// The other end said farewell. Only the controller, and hosts between it and this one, can end this host's work:
    /// the word of any other host may concern only its own death.
    pub(super) fn parted(&mut self, turn: &mut Turn<'_, W>, host: HostNo, farewell: &Farewell) {
        let Farewell { parting, text } = farewell;
        let above = self.topology.is_above(host, self.me);
        let missed = !self.closing && !self.over && self.topology.children(self.me).contains(host);
        match parting {
            Parting::YouAreDead if above => self.end(turn, Parting::CutOff, Parting::CutOff, text),
            // If it is true, the controller says so too.
            Parting::YouAreDead => {}
            _ if above && host == 0 => self.end(turn, Parting::JobOver, Parting::JobOver, text),
            _ if missed => self.report(turn, host, Report::dead(Fate::Left, text.clone())),
            _ => {}
        }
    }

    /// Ends this host's part in the job.
    pub(super) fn end(&mut self, turn: &mut Turn<'_, W>, parting: Parting, visitors: Parting, why: &str) {
        if !std::mem::replace(&mut self.over, true) {
            turn.out.push(Action::End { parting, visitors, why: why.to_owned() });
        }
    }
}
