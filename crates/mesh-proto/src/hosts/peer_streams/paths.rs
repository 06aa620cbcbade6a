//! Paths that change, and hosts that end.

use super::outbox::Outbox;
use super::{Lane, Lost, NOWHERE, PeerStreams, tell, unblock};
use crate::HostNo;
use crate::hosts::{HostSet, Short};
use rustc_hash::FxHashSet;

impl PeerStreams {
    /// The hosts to which something is under way by, or waits for, the next hop `via`: their path changes if `via` is
    /// lost or comes back.
    #[must_use]
    pub fn through(&self, via: HostNo) -> HostSet {
        let flying = self.peers.iter().filter(|(_, _, peer)| peer.out.goes_by(via));
        let flying = flying.flat_map(|(first, count, _)| first..first + count);
        let waiting = self.outboxes.get(&via).into_iter().flat_map(Outbox::hosts);
        flying.chain(waiting).collect()
    }

    /// Notes that the path to these hosts has changed. What they have not acknowledged is sent again, in order and
    /// before anything new, by the next hop that `via` now returns, and what waits for them moves there. If it returns
    /// none, everything waits until the next change.
    pub fn reroute(&mut self, hosts: &HostSet, via: &dyn Fn(HostNo) -> Option<HostNo>) {
        let mut moved = Vec::new();
        for (at, outbox) in &mut self.outboxes {
            outbox.forget_resends(hosts);
            outbox.take_moving(*at, hosts, &|host| via(host).unwrap_or(NOWHERE), &mut moved);
        }
        self.outboxes.retain(|_, outbox| !outbox.is_empty() || outbox.told);
        let lanes: FxHashSet<Lane> = moved.iter().map(|(_, post)| post.cargo.lane).collect();
        for lane in &lanes {
            self.index_lane(*lane);
        }
        for (to, post) in moved {
            self.enqueue(to, post);
        }
        for lane in &lanes {
            let vias = self.lanes.get(lane).cloned().unwrap_or_default();
            vias.iter().for_each(|via| unblock(&mut self.outboxes, &mut self.ready, *via, *lane));
        }
        for (first, count, path) in alike(hosts, via) {
            let runs: Vec<(HostNo, u32, Vec<u64>)> = self
                .peers
                .range(first, count)
                .map(|(first, count, peer)| {
                    peer.out.path = path;
                    (first, count, peer.out.all())
                })
                .collect();
            for (first, count, seqs) in runs {
                self.resend(first, count, &seqs);
            }
            self.peers.join(first, count);
        }
        for (via, outbox) in &mut self.outboxes {
            if !outbox.is_empty() {
                tell(&mut self.ready, *via, outbox);
            }
        }
    }

    /// Updates the index of where posts of a lane wait.
    fn index_lane(&mut self, lane: Lane) {
        let vias: Short<HostNo> =
            self.outboxes.iter().filter(|(_, outbox)| outbox.queues.contains_key(&lane)).map(|(via, _)| *via).collect();
        if vias.is_empty() {
            self.lanes.remove(&lane);
        } else {
            self.lanes.insert(lane, vias);
        }
    }

    /// Ends a host (STR-6). Returns what it has not acknowledged, oldest first, each frame once.
    pub fn end(&mut self, host: HostNo) -> Vec<Lost> {
        let mut lost = Vec::new();
        if host == self.me || self.ended.contains(host) {
            return lost;
        }
        self.ended = self.ended.iter().chain([host]).collect();
        let mut told = FxHashSet::default();
        let mut blocked = Vec::new();
        if let Some(mut peer) = self.peers.remove(host) {
            for index in peer.out.drain() {
                if let Some(sent) = self.log.get(index)
                    && (sent.whole.is_none() || told.insert(sent.message))
                {
                    lost.push(sent.lost());
                }
                self.log.release(index, 1);
            }
            blocked = std::mem::take(&mut peer.out.blocked);
        }
        let one = HostSet::one(host);
        let mut posts = Vec::new();
        for (via, outbox) in &mut self.outboxes {
            outbox.forget_resends(&one);
            let mut ended = Vec::new();
            outbox.take_moving(*via, &one, &|_| NOWHERE, &mut ended);
            if *via == NOWHERE {
                outbox.take_hosts(*via, &one, &mut ended);
            }
            posts.extend(ended.into_iter().map(|(_, post)| post));
        }
        posts.sort_by_key(|post| post.ticket);
        let lanes: FxHashSet<Lane> = posts.iter().map(|post| post.cargo.lane).collect();
        for post in posts {
            if post.message == 0 || told.insert(post.message) {
                lost.push(Lost { frame: post.cargo.frame, lane: post.cargo.lane });
            }
        }
        for lane in lanes {
            self.index_lane(lane);
            let vias = self.lanes.get(&lane).cloned().unwrap_or_default();
            vias.iter().for_each(|via| unblock(&mut self.outboxes, &mut self.ready, *via, lane));
        }
        for (via, lane) in blocked {
            unblock(&mut self.outboxes, &mut self.ready, via, lane);
        }
        self.outboxes.retain(|_, outbox| !outbox.is_empty() || outbox.told);
        self.passing.forget(host);
        lost
    }
}

/// Neighbours with the same next hop.
fn alike(hosts: &HostSet, via: &dyn Fn(HostNo) -> Option<HostNo>) -> Vec<(HostNo, u32, HostNo)> {
    let mut out: Vec<(HostNo, u32, HostNo)> = Vec::new();
    for host in hosts.iter() {
        let path = via(host).unwrap_or(NOWHERE);
        match out.last_mut() {
            Some((first, count, last)) if *last == path && *first + *count == host => *count += 1,
            _ => out.push((host, 1, path)),
        }
    }
    out
}
