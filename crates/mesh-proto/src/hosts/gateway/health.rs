//! Connections that end, hosts that are silent or dead, and what follows: GTW-2 and GTW-3.

use super::{Action, Gateway, Missed, Turn, Wire};
use crate::control::{HostDown, HostLost, HostStanding, Report, Whereabouts};
use crate::hosts::{Farewell, Fate, HostSet, Parting, Standing};
use crate::{Frame, HostEnd, HostNo, Kind, ProcAddr};
use std::sync::Arc;
use std::time::Duration;

/// How long a host that was not reached is left alone until the next attempt: twice as long each time, up to the last.
const REDIAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(1000)];

/// The longest time between two attempts to reach a host: several fit into the window.
fn redial_at_most(window: Duration) -> Duration {
    (window / 8).clamp(REDIAL[0], REDIAL[1])
}

impl<W: Wire> Gateway<W> {
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
        self.plan_look(host, turn.now);
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
        let lost_since = self.peers.get(&host).and_then(|peer| self.lost_since(peer));
        let Some(peer) = self.peers.get_mut(&host) else { return };
        // One that does not listen yet may do so soon.
        gone &=
            fate != Fate::Unreachable || lost_since.is_none_or(|since| now.saturating_sub(since) >= peer.patience());
        peer.dialing = false;
        // What was said of the dead stays.
        if dead {
            return;
        }
        if peer.connection.is_some() {
            // It was dialed beside a connection that is silent, which is still the one to go by.
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
                // Whoever relays for it knows better. If it is the parent, do not wait for a window of silence: each refusal
                // would start that anew, and the word of its end waits for acks that would go by it.
                let is_parent = Some(host) == self.topology.parent(self.me);
                self.go_around(turn.wire, now, host, is_parent && self.is_connected_above(host));
            }
            self.look_soon();
        }
        self.plan_look(host, now);
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
            // The next tick sees whether it is true, and when it is true no more.
            self.schedule.watch(host, standing == Standing::Suspect);
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
