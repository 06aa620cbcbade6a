//! What waits for one next hop.

use super::cargo::AHEAD;
use super::cargo::Cargo;
use super::cargo::Lane;
use crate::HostNo;
use crate::hosts::packet::Dest;
use crate::hosts::{HostSet, Short};
use bytes::Bytes;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The hosts that a post is for. One host takes no allocation.
#[derive(Clone, Debug)]
pub(super) enum Hosts {
    One(HostNo),
    Many(HostSet),
}

impl Hosts {
    /// First number and length of each run.
    pub(super) fn runs(&self) -> impl Iterator<Item = (HostNo, u32)> + '_ {
        let (one, many) = match self {
            Self::One(host) => (Some((*host, 1)), &[][..]),
            Self::Many(set) => (None, set.runs()),
        };
        one.into_iter().chain(many.iter().copied())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = HostNo> + '_ {
        self.runs().flat_map(|(first, count)| first..first + count)
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(set) => set.len(),
        }
    }

    pub(super) fn to_set(&self) -> HostSet {
        match self {
            Self::One(host) => HostSet::one(*host),
            Self::Many(set) => set.clone(),
        }
    }

    fn contains(&self, host: HostNo) -> bool {
        match self {
            Self::One(one) => *one == host,
            Self::Many(set) => set.contains(host),
        }
    }

    fn is_only(&self, host: HostNo) -> bool {
        match self {
            Self::One(one) => *one == host,
            Self::Many(set) => set.runs() == [(host, 1)],
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::One(host), other) | (other, Self::One(host)) => other.contains(*host),
            (Self::Many(mine), Self::Many(theirs)) => mine.overlaps(theirs),
        }
    }
}

/// A message that waits, perhaps with some segments already sent.
#[derive(Clone, Debug)]
pub(super) struct Post {
    /// Increases with every message of this host.
    pub(super) ticket: u64,
    pub(super) hosts: Hosts,
    /// Its number, once its first segment is sent.
    pub(super) message: u32,
    pub(super) offset: u64,
    pub(super) total: u64,
    /// The whole frame, for its segments.
    pub(super) whole: Option<Arc<Short<Bytes>>>,
    pub(super) cargo: Cargo,
}

impl Post {
    /// Splits off the hosts from `first` on.
    pub(super) fn split_from(&mut self, first: HostNo) -> Self {
        let (low, high) = self.hosts.iter().partition::<Vec<_>, _>(|host| *host < first);
        let rest = Self { hosts: Hosts::Many(HostSet::from_iter(high)), ..self.clone() };
        self.hosts = Hosts::Many(HostSet::from_iter(low));
        rest
    }

    pub(super) fn left(&self) -> u64 {
        self.total - self.offset
    }
}

/// The posts of one lane, by ticket.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) posts: VecDeque<Post>,
    /// How many of them are not for the next hop alone.
    relayed: usize,
    pub(super) blocked: Blocked,
}

/// Whether a lane is out of the ring until something happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Blocked {
    #[default]
    No,
    /// The first post waits for an earlier one that takes another path.
    Order,
    /// The window of one of its hosts is full.
    Window,
}

impl Queue {
    /// Whether a post for any of `hosts` waits here with an earlier ticket.
    pub(super) fn has_earlier(&self, via: HostNo, ticket: u64, hosts: &Hosts) -> bool {
        if self.relayed == 0 && !hosts.contains(via) {
            return false;
        }
        self.posts.iter().take_while(|post| post.ticket < ticket).any(|post| post.hosts.overlaps(hosts))
    }

    /// Removes a post that is done.
    pub(super) fn remove(&mut self, at: usize, via: HostNo) {
        if let Some(post) = self.posts.remove(at) {
            self.relayed -= usize::from(!post.hosts.is_only(via));
        }
    }

    /// Inserts the rest of a post that was split.
    pub(super) fn put(&mut self, at: usize, rest: Post, via: HostNo) {
        self.posts.insert(at, rest);
        self.recount(via);
    }

    /// Splits a post so that its `ready` hosts go first. Returns how many bytes wait in addition.
    pub(super) fn split(&mut self, at: usize, ready: HostSet, via: HostNo) -> u64 {
        let Some(post) = self.posts.get_mut(at) else { return 0 };
        let rest = post.hosts.to_set().difference(&ready);
        let rest = Post { hosts: Hosts::Many(rest), ..post.clone() };
        post.hosts = Hosts::Many(ready);
        let left = rest.left();
        self.put(at + 1, rest, via);
        left
    }

    fn recount(&mut self, via: HostNo) {
        self.relayed = self.posts.iter().filter(|post| !post.hosts.is_only(via)).count();
    }
}

/// Sorts runs so that every host is in only one of them.
pub(super) fn in_order(dests: &mut Vec<Dest>) {
    dests.sort_unstable_by_key(|dest| dest.first);
    let mut end = 0;
    for dest in dests.iter_mut() {
        let dest_end = dest.first + dest.count;
        dest.first = dest.first.max(end).min(dest_end);
        dest.count = dest_end - dest.first;
        end = end.max(dest_end);
    }
    dests.retain(|dest| dest.count > 0);
}

/// What waits for one next hop.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Lanes that may have something to send, each once.
    pub(super) ring: VecDeque<Lane>,
    pub(super) queues: FxHashMap<Lane, Queue>,
    /// Packets to send again: by their order, to which hosts. Runs may overlap; a host's number is the same in all.
    pub(super) resend: BTreeMap<u64, Vec<Dest>>,
    /// Bytes of posts not yet taken.
    pub(super) waiting: u64,
    /// Whether the runtime was told to look here.
    pub(super) told: bool,
    /// Empty queues to reuse.
    spare: Vec<VecDeque<Post>>,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.resend.is_empty()
    }

    /// Inserts a post at its ticket's position.
    pub(super) fn insert(&mut self, via: HostNo, post: Post) {
        let lane = post.cargo.lane;
        self.waiting += post.left();
        let queue = self.queues.entry(lane).or_default();
        if queue.posts.is_empty() {
            if let Some(spare) = self.spare.pop() {
                queue.posts = spare;
            }
            self.ring.push_back(lane);
        } else if queue.blocked != Blocked::No && queue.posts.len() < AHEAD {
            // It may be for other hosts than those that the first ones wait for.
            queue.blocked = Blocked::No;
            self.ring.push_back(lane);
        }
        queue.relayed += usize::from(!post.hosts.is_only(via));
        let at = match queue.posts.back() {
            Some(last) if last.ticket > post.ticket => queue.posts.partition_point(|other| other.ticket < post.ticket),
            _ => queue.posts.len(),
        };
        queue.posts.insert(at, post);
    }

    /// Drops the queue of a lane that has nothing left.
    pub(super) fn drop_queue(&mut self, lane: Lane) {
        if let Some(queue) = self.queues.remove(&lane)
            && self.spare.len() < 16
        {
            self.spare.push(queue.posts);
        }
    }

    /// Hosts that something waits for.
    pub(super) fn hosts(&self) -> impl Iterator<Item = HostNo> + '_ {
        let posts = self.queues.values().flat_map(|queue| queue.posts.iter().flat_map(|post| post.hosts.iter()));
        let again = self.resend.values().flatten();
        posts.chain(again.flat_map(|dest| dest.first..dest.first + dest.count))
    }

    pub(super) fn forget_resends(&mut self, hosts: &HostSet) {
        self.resend.retain(|_, dests| {
            for &(first, count) in hosts.runs() {
                let end = first + count;
                let rest = dests.drain(..).flat_map(|dest| {
                    let dest_end = dest.first + dest.count;
                    let below = Dest { count: dest_end.min(first).saturating_sub(dest.first), ..dest };
                    let from = dest.first.max(end);
                    let above = Dest { first: from, count: dest_end.saturating_sub(from), ..dest };
                    [below, above].into_iter().filter(|dest| dest.count > 0)
                });
                *dests = rest.collect();
            }
            !dests.is_empty()
        });
    }

    /// Queues a packet to be sent again.
    pub(super) fn send_again(&mut self, order: u64, dest: Dest) {
        let dests = self.resend.entry(order).or_default();
        dests.push(dest);
        if dests.len().is_power_of_two() {
            // It may be asked for repeatedly while nothing can go: duplicates do not add up.
            in_order(dests);
        }
    }

    /// Takes out what is for `hosts` if their next hop has changed.
    pub(super) fn take_moving(
        &mut self,
        via: HostNo,
        hosts: &HostSet,
        to: &dyn Fn(HostNo) -> HostNo,
        moved: &mut Vec<(HostNo, Post)>,
    ) {
        let Self { queues, ring, waiting, .. } = self;
        queues.retain(|lane, queue| {
            let before = moved.len();
            queue.posts.retain_mut(|post| {
                let mut groups: BTreeMap<HostNo, Vec<HostNo>> = BTreeMap::new();
                let mut stay = Vec::new();
                for host in post.hosts.iter() {
                    match hosts.contains(host).then(|| to(host)).filter(|to| *to != via) {
                        Some(to) => groups.entry(to).or_default().push(host),
                        None => stay.push(host),
                    }
                }
                for (to, hosts) in groups {
                    moved.push((to, Post { hosts: Hosts::Many(HostSet::from_iter(hosts)), ..post.clone() }));
                }
                if stay.is_empty() {
                    *waiting = waiting.saturating_sub(post.left());
                    return false;
                }
                post.hosts = Hosts::Many(HostSet::from_iter(stay));
                true
            });
            if moved.len() > before {
                queue.recount(via);
            }
            if queue.posts.is_empty() {
                ring.retain(|other| other != lane);
                return false;
            }
            true
        });
    }

    /// Takes out what is for `hosts`, whatever their next hop.
    pub(super) fn take_hosts(&mut self, via: HostNo, hosts: &HostSet, taken: &mut Vec<(HostNo, Post)>) {
        self.take_moving(via, hosts, &|_| via.wrapping_sub(1), taken);
    }
}
