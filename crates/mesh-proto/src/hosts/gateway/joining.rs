//! Attached hosts, greetings between hosts, and new connections.
//!
//! The dialing host says [`Join`] and sends nothing else until it is welcome. A host dials those below it, the first
//! time with what they have to know ([`Attachment`]). Either end of any other connection may dial; if both do, the
//! lower number's attempt counts. A host that can only dial out offers itself to the controller, which then joins it
//! over that very connection.

use super::{Action, Gateway, GatewayOptions, Missed, Pending, Turn, Wire};
use crate::control::{Attachment, Report, Terms};
use crate::hosts::{
    Cargo, Fate, Heartbeat, HostSet, Join, Packet, PacketKind, Parting, Refusal, Refuse, Standing, Welcome,
};
use crate::{CallId, HostNo, ProcAddr};
use std::sync::Arc;
use std::time::Duration;

/// The caller's role, by its certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A controller.
    Controller,
    /// A host.
    Host,
    /// Someone who may look into jobs but not join them.
    Observer,
}

impl<W: Wire> Gateway<W> {
    /// Whether a host may not be connected to yet (ATT-1).
    pub(super) fn is_pending(&self, host: HostNo) -> bool {
        let Pending { unproven, unplaced } = &self.pending;
        if unproven.is_empty() && unplaced.is_empty() {
            return false;
        }
        let below = self.topology.subtree(host);
        below.overlaps(unproven) || below.overlaps(unplaced)
    }

    /// Adopts the latest options of the job. Returns the number of the first of the `count` hosts that come next.
    fn agree(&mut self, count: u32, options: &GatewayOptions) -> HostNo {
        let base = self.next_host;
        self.next_host += count;
        self.window = options.window;
        self.hold = self.hold.max(options.hold);
        self.fan_out = options.fan_out;
        self.peer_streams.resend_within(self.window);
        base
    }

    /// At the controller: attaches hosts at these addresses, some of which may be told later. They get numbers and
    /// places at once, from [`Gateway::next_host`] on, and are not connected to before
    /// [`Event::Proven`](super::Event::Proven). Each answers `call` once it is there.
    pub fn attach(&mut self, call: CallId, addresses: &[Option<String>], options: &GatewayOptions) {
        let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        let base = self.agree(count, options);
        self.topology.add_group(base, count, options.fan_out);
        self.pending.unproven.extend_by(&HostSet::range(base, count));
        let told = Arc::new(attachment(call, (base, count), options, false));
        for (host, address) in (base..).zip(addresses) {
            if address.is_none() {
                self.pending.unplaced.push(host);
            }
            let peer = self.peer(host);
            peer.address.clone_from(address);
            peer.attachment = Some(Arc::clone(&told));
        }
    }

    /// At the controller: expects `count` hosts to dial. Returns what each has to know, for [`Gateway::seat`].
    pub fn attach_dialers(&mut self, call: CallId, count: u32, options: &GatewayOptions) -> Arc<Attachment> {
        let base = self.agree(count, options);
        Arc::new(attachment(call, (base, count), options, true))
    }

    /// At the controller: gives a host that has dialed this number. A number is unknown until a host has dialed for it.
    pub fn seat(&mut self, host: HostNo, told: Option<Arc<Attachment>>) {
        self.topology.add_dialed(host);
        if told.is_some() {
            self.peer(host).attachment = told;
        }
    }

    pub(super) fn proven(&mut self, turn: &mut Turn<'_, W>, hosts: &HostSet) {
        self.pending.unproven.reduce_by(hosts);
        self.no_longer_pending(turn, hosts);
    }

    pub(super) fn placed(&mut self, turn: &mut Turn<'_, W>, host: HostNo, address: String) {
        if !self.pending.unplaced.remove(host) {
            return;
        }
        self.peer(host).address = Some(address);
        let ancestors = self.topology.ancestors(host).into_iter().filter(|above| *above != 0);
        let above: HostSet = ancestors.chain(std::iter::once(host)).collect();
        self.no_longer_pending(turn, &above);
    }

    /// Connects to those of these hosts that are no longer pending. Their silence counts from now on.
    fn no_longer_pending(&mut self, turn: &mut Turn<'_, W>, hosts: &HostSet) {
        let ready: Vec<HostNo> = hosts.iter().filter(|host| !self.is_pending(*host)).collect();
        for host in ready {
            if let Some(peer) = self.peers.get_mut(&host).filter(|peer| peer.connection.is_none()) {
                peer.lost_since.get_or_insert(turn.now);
                self.plan_look(host, turn.now);
            }
        }
        self.look_soon();
        self.reach_out(turn);
        turn.wire.wake();
    }

    pub(super) fn give_up(&mut self, turn: &mut Turn<'_, W>, hosts: &HostSet, fate: Fate, why: &str) {
        for host in hosts.iter() {
            self.lost(turn, host, fate, why.to_owned());
        }
        self.pending.unproven.reduce_by(hosts);
        self.pending.unplaced.reduce_by(hosts);
        // Those above them may have waited for this alone.
        let unattached = self.peers.iter().filter(|(_, peer)| peer.attachment.is_some() && peer.incarnation == 0);
        let unattached: HostSet = unattached.map(|(host, _)| *host).collect();
        self.no_longer_pending(turn, &unattached);
    }

    /// Begins this attached host's part in a job.
    pub(super) fn begin(&mut self, turn: &mut Turn<'_, W>, job: u64, told: &Attachment) {
        let me = self.me;
        self.job = job;
        self.window = told.window;
        self.hold = told.hold;
        self.fan_out = told.fan_out;
        if told.dialed {
            self.topology.add_dialed(me);
        } else {
            self.topology.add_group(told.base, told.count, told.fan_out);
        }
        self.orphaned = Some(turn.now);
        self.peer_streams.resend_within(told.window);
        self.merge_answers_to_attachment(turn, told);
        let children = self.topology.children(me);
        let attachment = Arc::new(Attachment { below: Vec::new(), ..told.clone() });
        for (host, address) in &told.below {
            let peer = self.peer(*host);
            peer.address = Some(address.clone());
            peer.lost_since = children.contains(*host).then_some(turn.now);
            if *host == 0 {
                peer.dials = true;
            } else {
                peer.attachment = Some(Arc::clone(&attachment));
            }
            self.plan_look(*host, turn.now);
        }
        self.reach_out(turn);
        turn.wire.wake();
    }

    /// The answers of the hosts below to their attachment pass here, and are merged with this host's own.
    fn merge_answers_to_attachment(&mut self, turn: &mut Turn<'_, W>, told: &Attachment) {
        let below = self.topology.subtree(self.me);
        let is_alone = below.len() < 2 && self.topology.parent(self.me) == Some(0);
        if told.dialed || is_alone {
            return;
        }
        for frame in self.merge.expect(ProcAddr::CONTROLLER, told.call, 1) {
            let host = HostSet::one(frame.header.dst.host);
            self.post(Cargo::of(&frame), host, &mut HostSet::default(), turn.now, turn.wire);
        }
        let merged = self.relays.expect(0, ProcAddr::CONTROLLER, told.call, &below);
        self.send_on(turn.wire, merged, turn.now);
    }

    /// Makes sure that a connection to every host that this one relays to exists or is being made.
    pub(super) fn reach_out(&mut self, turn: &mut Turn<'_, W>) {
        let mut wanted = Vec::new();
        for host in self.topology.children(self.me).iter() {
            let Some(peer) = self.peers.get_mut(&host) else { continue };
            if peer.address.is_some() && peer.connection.is_none() && !peer.dialing {
                if !std::mem::replace(&mut peer.dials, true) {
                    // From now on it is this host's to reach.
                    peer.lost_since = Some(turn.now);
                }
                wanted.push(host);
            }
        }
        for host in wanted {
            self.plan_look(host, turn.now);
            self.dial(turn, host);
        }
    }

    pub(super) fn dial(&mut self, turn: &mut Turn<'_, W>, host: HostNo) {
        if self.is_pending(host) {
            return;
        }
        let window = self.window_of(host);
        let Some(peer) = self.peers.get_mut(&host) else { return };
        // A second connection may come up beside a silent one.
        let wanted = peer.connection.is_none() || peer.heartbeat.as_ref().is_some_and(Heartbeat::is_suspect);
        let Some(address) = peer.address.clone().filter(|_| !peer.dialing && wanted) else { return };
        peer.dialing = true;
        turn.out.push(Action::Dial { host, address, window });
    }

    /// What this side says to a host that it has dialed, or that offered itself.
    pub fn join(&mut self, host: HostNo) -> Join {
        let mut below = self.topology.subtree(host);
        below.remove(host);
        let address = |host: HostNo| self.peers.get(&host).and_then(|peer| peer.address.clone());
        let below: Vec<(HostNo, String)> = below.iter().filter_map(|host| Some((host, address(host)?))).collect();
        let terms = Terms { window: self.window_of(host) };
        let (job, from, incarnation) = (self.job, self.me, self.incarnation);
        let peer = self.peer(host);
        let body = peer.attachment.as_ref().map(|told| Attachment { below, ..(**told).clone() }.encode());
        let body = body.unwrap_or_else(|| terms.encode());
        Join { job, from, to: host, incarnation, expected: peer.incarnation, body }
    }

    /// Reads the answer of a host at `address` to a [`Gateway::join`]: what to connect with, or why there is no
    /// connection. Neither if it is already connected, or has declared this host dead: see the action.
    ///
    /// # Errors
    /// If the answer is of no use.
    #[allow(clippy::type_complexity, reason = "an answer and what follows from it")]
    pub fn answered(
        &mut self,
        host: HostNo,
        address: &str,
        answer: &Packet,
    ) -> (Result<Option<(u64, Option<Terms>)>, Missed>, Option<Action<W::Connection>>) {
        let strange = || Missed::for_now(format!("{address} answers what nobody understands"));
        let answer = match answer.kind {
            PacketKind::Welcome => Welcome::read(answer).map_err(|_| strange()).and_then(|welcome| {
                let known = self.peers.get(&host).map_or(0, |peer| peer.incarnation);
                if known != 0 && known != welcome.incarnation {
                    let why = format!("{address} was started anew, and what ran there is gone");
                    return Err(Missed::for_good(Fate::Restarted, why));
                }
                Ok(Some((welcome.incarnation, Terms::decode(&welcome.body))))
            }),
            PacketKind::Refuse => match Refuse::read(answer) {
                Ok(Refuse { code: Refusal::Busy, .. }) => Ok(None),
                Ok(Refuse { code: Refusal::Dead, text }) if self.topology.is_above(host, self.me) => {
                    let end = (!std::mem::replace(&mut self.over, true)).then_some(Action::End {
                        parting: Parting::CutOff,
                        visitors: Parting::CutOff,
                        why: text,
                    });
                    return (Ok(None), end);
                }
                Ok(Refuse { code, text }) => {
                    let fate = match code {
                        Refusal::NoSuchJob | Refusal::NotMe => Fate::Restarted,
                        _ => Fate::Refused,
                    };
                    Err(Missed::for_good(fate, format!("{address} refuses: {text}")))
                }
                Err(_) => Err(Missed::for_good(Fate::Refused, format!("{address} refuses"))),
            },
            _ => Err(strange()),
        };
        (answer, None)
    }

    /// Answers a host that has dialed this one as a member of its job.
    ///
    /// # Errors
    /// If it is not admitted.
    pub fn admit(&self, join: &Join, caller: Caller) -> Result<Welcome, (Refusal, String)> {
        let peer = self.peers.get(&join.from);
        let me = self.me;
        Err(if self.over {
            (Refusal::NoSuchJob, "the job has ended".to_owned())
        } else if caller == Caller::Observer {
            (Refusal::NotAllowed, "an observer can look into jobs, and not join them".to_owned())
        } else if join.from == 0 && caller != Caller::Controller {
            (Refusal::Other, "it is a host, where a controller is expected".to_owned())
        } else if join.to != me {
            let text = format!("it is host {me} of this job already, and cannot be host {} too", join.to);
            (Refusal::NotMe, text)
        } else if join.expected != 0 && join.expected != self.incarnation {
            (Refusal::NotMe, "this host was started anew; what ran here is gone".to_owned())
        } else if self.standing(join.from) == Standing::Dead {
            let why = peer.and_then(|peer| peer.verdict.as_ref()).map(|end| end.verdict());
            (Refusal::Dead, why.unwrap_or_else(|| "declared dead".to_owned()))
        } else if peer.is_some_and(|peer| peer.incarnation != 0 && peer.incarnation != join.incarnation) {
            (Refusal::NotMe, format!("host {} was started anew; what ran there is gone", join.from))
        } else if me < join.from && peer.is_some_and(|peer| peer.dialing && peer.dials) {
            (Refusal::Busy, "a connection is being made the other way".to_owned())
        } else {
            let own = Terms { window: self.window_of(join.from) };
            return Ok(Welcome { incarnation: self.incarnation, body: own.encode() });
        })
    }

    /// Takes a connection with complete greetings into use. What the last one may have lost is sent again.
    pub(super) fn connected(
        &mut self,
        turn: &mut Turn<'_, W>,
        host: HostNo,
        connection: W::Connection,
        (incarnation, terms): (u64, Option<Terms>),
        dialed: bool,
    ) {
        let now = turn.now;
        let window = Terms::agree(self.window_of(host), terms);
        if self.over || self.standing(host) == Standing::Dead {
            // It was dialed before that was known. Nobody looks after a connection to the dead.
            self.peer(host).dialing = false;
            turn.out.push(Action::Close { connection, farewell: None });
            return;
        }
        let was_apart = self.topology.reachable(host);
        self.back_again(now);
        let peer = self.peer(host);
        let old = peer.connection.replace(connection.clone());
        peer.dialing = false;
        // Only hosts that have dialed the controller know its address at first; nobody else could reconnect.
        peer.dials = dialed || host == 0 && peer.address.is_some();
        peer.redial_at = None;
        peer.lost_since = None;
        peer.attempts = 0;
        peer.why.clear();
        peer.incarnation = incarnation;
        peer.heartbeat = Some(Heartbeat::new(window, now));
        peer.agreed = Some(window);
        peer.kept_bytes = 0;
        for packet in std::mem::take(&mut peer.kept) {
            turn.wire.send(&connection, &packet, now);
        }
        self.plan_look(host, now);
        let recovered = self.standing(host) == Standing::Suspect;
        if recovered {
            self.stand(turn.wire, host, Standing::Live, now);
        }
        // Even if another host relays to it: that one may be dead, and its successor finds nothing to mend.
        let recovered = recovered && self.topology.is_above(self.me, host);
        let mut through = self.peer_streams.through(host);
        if was_apart {
            // Packets for it went along the tree, and would continue to, whatever becomes of the hosts in between.
            through = through.union(&HostSet::one(host));
        }
        self.reroute(turn.wire, &through, now);
        self.pump(turn.wire, host, now);
        self.look_soon();
        if let Some(connection) = old {
            turn.out.push(Action::Close { connection, farewell: None });
        }
        if recovered {
            // Others may still go around it.
            self.report(turn, host, Report::Well);
        }
        turn.wire.wake();
    }

    /// Wants the next tick at once, whatever was asked for before.
    pub(super) fn look_soon(&mut self) {
        self.armed = Duration::ZERO;
    }
}

fn attachment(call: CallId, (base, count): (HostNo, u32), options: &GatewayOptions, dialed: bool) -> Attachment {
    let GatewayOptions { window, fan_out, patience, hold } = *options;
    Attachment { call, base, count, fan_out, window, patience, hold, dialed, below: Vec::new() }
}
