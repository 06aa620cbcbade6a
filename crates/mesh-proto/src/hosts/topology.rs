//! Which host relays for which.
//!
//! Hosts that are attached together form a group: a tree in which every host but the first few has a parent computed
//! from its number. A host that is dead or suspect relays nothing; the hosts below it are served by the nearest
//! ancestor that can relay. So the groups and the few unwell hosts define the tree, and the other hosts cost nothing,
//! however many there are.

use super::{HostSet, MAX_HOSTS};
use crate::HostNo;
use std::collections::{BTreeMap, BTreeSet};

mod group;
use group::Group;

/// How many hosts a host relays to by default.
pub const DEFAULT_FAN_OUT: u32 = 16;

/// For fewer destinations than this the route is looked up one by one; for more, child by child.
const FEW: usize = 32;

/// Whether a host gets messages, and relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Gets what is for it, and relays.
    #[default]
    Live,
    /// Silent for a while: gets what is for it, but relays nothing.
    Suspect,
    /// Gets nothing any more, and never comes back.
    Dead,
}

/// Which host relays for which, as one host sees it.
///
/// What the controller sends and receives follows the tree. Other hosts talk directly, and cast to many by cutting the
/// destinations into chunks: each chunk goes to its first host, which does the same with the rest. Hosts that cannot
/// reach one another use the tree.
///
/// - TOP-1: every destination that is not dead gets exactly one copy, whoever sends and whatever the standings are.
/// - TOP-2: only live hosts relay.
/// - TOP-3: no packet goes in circles, even if the hosts on its way differ about the standings: in the tree it goes up
///   and then down, and a chunk shrinks with every host that cuts it.
/// - TOP-4: if all are live, no host sends more than `fan_out` copies of a message to its group.
///
/// ```
/// # use mesh_proto::hosts::{HostSet, Standing, Topology};
/// let mut seen_by_controller = Topology::new(0);
/// seen_by_controller.add_group(1, 20, 4);
/// assert_eq!(seen_by_controller.children(0), HostSet::range(1, 4));
/// assert_eq!(seen_by_controller.parent(7), Some(1));
/// assert_eq!(seen_by_controller.next_hop(0, 7), Some(1));
/// seen_by_controller.set(1, Standing::Dead);
/// assert_eq!(seen_by_controller.next_hop(0, 7), Some(7));
/// ```
#[derive(Clone, Debug)]
pub struct Topology {
    me: HostNo,
    /// In ascending order of their numbers.
    groups: Vec<Group>,
    /// Hosts that are not live.
    unwell: BTreeMap<HostNo, Standing>,
    /// Hosts that this one cannot reach directly.
    apart: BTreeSet<HostNo>,
}

impl Topology {
    /// A job with only the controller, as host `me` sees it.
    #[must_use]
    pub fn new(me: HostNo) -> Self {
        Self { me, groups: Vec::new(), unwell: BTreeMap::new(), apart: BTreeSet::new() }
    }

    /// The host whose view this is.
    #[must_use]
    pub fn me(&self) -> HostNo {
        self.me
    }

    /// Adds `count` hosts from `base` on, attached together, none of which relays to more than `fan_out`. Returns
    /// false, and does nothing, if one of them is already known or a number is out of range.
    pub fn add_group(&mut self, base: HostNo, count: u32, fan_out: u32) -> bool {
        let group = Group { base, count, fan_out: fan_out.max(1) };
        let at = self.groups.partition_point(|other| other.base < base);
        let fits = base > 0
            && count > 0
            && group.end() <= u64::from(MAX_HOSTS)
            && at.checked_sub(1).is_none_or(|before| self.groups[before].end() <= u64::from(base))
            && self.groups.get(at).is_none_or(|after| group.end() <= u64::from(after.base));
        if fits {
            self.groups.insert(at, group);
        }
        fits
    }

    /// Adds a host that has itself connected to the controller: a child of the controller, whatever the fan-out.
    /// Returns false if it is already known or is the controller.
    pub fn add_dialed(&mut self, host: HostNo) -> bool {
        let at = self.groups.partition_point(|group| group.base < host);
        let before = at.checked_sub(1).map(|before| self.groups[before]);
        if let Some(group) = before.filter(|group| group.is_flat() && group.end() == u64::from(host)) {
            if self.groups.get(at).is_some_and(|after| after.base == host) {
                return false;
            }
            self.groups[at - 1].count = group.count + 1;
            return true;
        }
        self.add_group(host, 1, u32::MAX)
    }

    /// The groups as base number, count, fan-out (`u32::MAX` for hosts that have dialed). [`Topology::add_group`]
    /// builds the same tree from them.
    pub fn groups(&self) -> impl Iterator<Item = (HostNo, u32, u32)> + '_ {
        self.groups.iter().map(|group| (group.base, group.count, group.fan_out))
    }

    /// The hosts that are not live, with their standing; ascending.
    pub fn unwell(&self) -> impl Iterator<Item = (HostNo, Standing)> + '_ {
        self.unwell.iter().map(|(host, standing)| (*host, *standing))
    }

    /// Whether such a host exists or existed.
    #[must_use]
    pub fn knows(&self, host: HostNo) -> bool {
        host == 0 || self.group_of(host).is_some()
    }

    /// Whether each of the `count` hosts from `first` on exists or existed. Takes time proportional to the groups.
    #[must_use]
    pub fn knows_all(&self, first: HostNo, count: u32) -> bool {
        let end = u64::from(first) + u64::from(count);
        let mut at = u64::from(first.max(1));
        while at < end {
            let Some(group) = HostNo::try_from(at).ok().and_then(|at| self.group_of(at)) else { return false };
            at = group.end();
        }
        true
    }

    /// All hosts that are not dead, including the controller.
    #[must_use]
    pub fn hosts(&self) -> HostSet {
        self.subtree(0)
    }

    /// A host's standing. An unknown host counts as live.
    #[must_use]
    pub fn standing(&self, host: HostNo) -> Standing {
        self.unwell.get(&host).copied().unwrap_or_default()
    }

    /// Sets a host's standing.
    ///
    /// Returns the hosts whose route from here, or any later part of it along the tree, changes by that: what they have
    /// not acknowledged may be lost. `None` if nothing changes: the standing is the same, `host` is the controller, or
    /// it is dead, which is final.
    pub fn set(&mut self, host: HostNo, standing: Standing) -> Option<HostSet> {
        let before = self.standing(host);
        if before == standing || before == Standing::Dead || host == 0 {
            return None;
        }
        let was_reached = self.ways_by(host);
        match standing {
            Standing::Live => self.unwell.remove(&host),
            _ => self.unwell.insert(host, standing),
        };
        let relayed = (before == Standing::Live) != (standing == Standing::Live);
        let mut changed = if relayed { was_reached } else { HostSet::default() };
        if standing == Standing::Dead && host != self.me {
            changed = changed.union(&HostSet::one(host));
        }
        Some(changed)
    }

    /// Notes that this host cannot connect to `host`, so packets for it take the tree. Returns false if that was known.
    pub fn unreachable(&mut self, host: HostNo) -> bool {
        host != self.me && self.apart.insert(host)
    }

    /// Notes that there is a connection to `host` after all. Returns false if `host` was not noted as unreachable.
    pub fn reachable(&mut self, host: HostNo) -> bool {
        self.apart.remove(&host)
    }

    /// The nearest ancestor that relays; none for the controller and for unknown hosts.
    #[must_use]
    pub fn parent(&self, host: HostNo) -> Option<HostNo> {
        let group = self.group_of(host)?;
        group.above(host).find(|above| self.relays(*above))
    }

    /// Where a host that has lost its parent may connect: the ancestors that relay, nearest first, the controller last.
    #[must_use]
    pub fn ancestors(&self, host: HostNo) -> Vec<HostNo> {
        let Some(group) = self.group_of(host) else { return Vec::new() };
        group.above(host).filter(|above| self.relays(*above)).collect()
    }

    /// Whether the route from the controller to `host` leads through `above`, or would if all hosts were well. True for
    /// the controller and the hosts in between, whatever their standings.
    ///
    /// ```
    /// # use mesh_proto::hosts::Topology;
    /// let mut topology = Topology::new(7);
    /// topology.add_group(1, 20, 4);
    /// assert!(topology.is_above(0, 7) && topology.is_above(1, 7));
    /// assert!(!topology.is_above(2, 7) && !topology.is_above(7, 7) && !topology.is_above(7, 1));
    /// ```
    #[must_use]
    pub fn is_above(&self, above: HostNo, host: HostNo) -> bool {
        self.group_of(host).is_some_and(|group| group.above(host).any(|one| one == above))
    }

    /// The hosts to which `host` relays the controller's casts, including those that others can no longer relay to. The
    /// dead are left out.
    #[must_use]
    pub fn children(&self, host: HostNo) -> HostSet {
        let mut runs = Vec::new();
        if self.relays(host) {
            self.children_into(host, &mut runs);
        }
        HostSet::from_runs(runs)
    }

    /// `host` and everything below it: the hosts that lose their route from the controller if it fails. The dead are
    /// left out; for a host that does not relay it is only itself.
    #[must_use]
    pub fn subtree(&self, host: HostNo) -> HostSet {
        if self.relays(host) { self.without_dead(&self.below(host)) } else { self.without_dead(&HostSet::one(host)) }
    }

    /// Where this host passes what `origin` sends to `dest`. None if `dest` is this host or dead.
    #[must_use]
    pub fn next_hop(&self, origin: HostNo, dest: HostNo) -> Option<HostNo> {
        if dest == self.me || self.standing(dest) == Standing::Dead {
            None
        } else if origin != 0 && dest != 0 && !self.apart.contains(&dest) {
            Some(dest)
        } else {
            self.by_tree(origin, dest)
        }
    }

    /// What this host, as origin or relay, does with a message of `origin` to `dests`: the next hops, each with its
    /// share of the destinations, ascending. This host and dead ones are left out.
    ///
    /// ```
    /// # use mesh_proto::hosts::{HostSet, Topology};
    /// let mut topology = Topology::new(0);
    /// topology.add_group(1, 6, 2);
    /// let plan = topology.plan(0, &HostSet::range(2, 4));
    /// assert_eq!(plan, [(1, HostSet::range(3, 2)), (2, HostSet::from_iter([2, 5]))]);
    /// ```
    #[must_use]
    pub fn plan(&self, origin: HostNo, dests: &HostSet) -> Vec<(HostNo, HostSet)> {
        let mut dests = self.without_dead(dests);
        dests.remove(self.me);
        if origin == 0 {
            return self.plan_tree(&dests);
        }
        // The controller, unreachable hosts and hosts that may not relay are handled one by one.
        let mut hops: BTreeMap<HostNo, Vec<(HostNo, u32)>> = BTreeMap::new();
        for host in self.special_among(&dests) {
            if let Some(hop) = self.next_hop(origin, host) {
                hops.entry(hop).or_default().push((host, 1));
            }
            dests.remove(host);
        }
        for chunk in dests.split(self.fan_out() as usize) {
            if let Some(head) = chunk.first() {
                hops.entry(head).or_default().extend(chunk.runs());
            }
        }
        given_out(hops)
    }

    /// The `dests` that cannot head a chunk, or cannot be reached as part of one.
    fn special_among(&self, dests: &HostSet) -> Vec<HostNo> {
        if dests.len() < FEW {
            let is_special = |host: &HostNo| *host == 0 || !self.relays(*host) || self.apart.contains(host);
            return dests.iter().filter(is_special).collect();
        }
        let special: BTreeSet<HostNo> =
            std::iter::once(0).chain(self.apart.iter().copied()).chain(self.unwell.keys().copied()).collect();
        special.into_iter().filter(|host| dests.contains(*host)).collect()
    }

    /// Into how many chunks a host other than the controller cuts the destinations of a cast.
    #[must_use]
    pub fn fan_out(&self) -> u32 {
        self.groups.iter().filter(|group| !group.is_flat()).map(|group| group.fan_out).max().unwrap_or(DEFAULT_FAN_OUT)
    }

    /// The next hops, with their shares, for what the controller sends.
    fn plan_tree(&self, dests: &HostSet) -> Vec<(HostNo, HostSet)> {
        let mut hops: BTreeMap<HostNo, Vec<(HostNo, u32)>> = BTreeMap::new();
        let mut singly = dests.clone();
        if dests.len() >= FEW {
            let below = dests.intersection(&self.below(self.me));
            // What is not below: only if this host's view differs from the controller's.
            singly = dests.difference(&below);
            let mut children = Vec::new();
            self.children_into(self.me, &mut children);
            let children = HostSet::from_runs(children);
            let inner = self.inner_among(&children);
            for child in &inner {
                let share = self.below(*child).intersection(&below);
                if !share.is_empty() {
                    hops.insert(*child, share.runs().to_vec());
                }
            }
            // Leaves, and children that do not relay, get only their own message.
            let leaves = children.difference(&inner.into_iter().collect()).intersection(&below);
            hops.extend(leaves.iter().map(|leaf| (leaf, vec![(leaf, 1)])));
        }
        for dest in singly.iter() {
            if let Some(hop) = self.by_tree(0, dest) {
                hops.entry(hop).or_default().push((dest, 1));
            }
        }
        given_out(hops)
    }

    /// The next hop along the tree: down if `dest` is below this host. Otherwise, what the controller sends goes
    /// directly, which ends its route (the views differ), and everything else goes up.
    fn by_tree(&self, origin: HostNo, dest: HostNo) -> Option<HostNo> {
        let Some(group) = self.group_of(dest) else {
            // The controller, or a host not known here: whoever is above knows it.
            let up = dest == 0 || origin != 0 && self.apart.contains(&dest);
            return if up { self.parent(self.me) } else { Some(dest) };
        };
        let mut hop = dest;
        for above in group.above(dest) {
            if above == self.me {
                return Some(hop);
            }
            if self.relays(above) {
                hop = above;
            }
        }
        if origin == 0 { Some(dest) } else { self.parent(self.me) }
    }

    /// The hosts that this host's own messages reach through `host`, as the tree is now.
    fn ways_by(&self, host: HostNo) -> HostSet {
        if self.me == 0 {
            // Its own messages take the same route.
            return self.without_dead(&self.below(host).difference(&HostSet::one(host)));
        }
        let above = |host: HostNo| self.group_of(host).into_iter().flat_map(move |group| group.above(host));
        let over_me = above(self.me).any(|relay| relay == host);
        let far = self.apart.iter().copied().filter(|dest| {
            let below_me = above(*dest).any(|relay| relay == self.me);
            (over_me && !below_me) || (host != self.me && above(*dest).any(|relay| relay == host))
        });
        self.without_dead(&over_me.then_some(0).into_iter().chain(far).collect())
    }

    fn relays(&self, host: HostNo) -> bool {
        !self.unwell.contains_key(&host)
    }

    fn group_of(&self, host: HostNo) -> Option<Group> {
        let at = self.groups.partition_point(|group| group.base <= host);
        at.checked_sub(1).map(|at| self.groups[at]).filter(|group| group.contains(host))
    }

    /// A host and everything that would be below it if all were well.
    fn below(&self, host: HostNo) -> HostSet {
        if host == 0 {
            let all = self.groups.iter().map(|group| (group.base, group.count));
            return HostSet::from_runs(std::iter::once((0, 1)).chain(all).collect());
        }
        self.group_of(host).map_or_else(HostSet::default, |group| HostSet::from_runs(group.below(host)))
    }

    /// The children of a host, with the children of those that do not relay.
    fn children_into(&self, host: HostNo, runs: &mut Vec<(HostNo, u32)>) {
        let mut levels: Vec<(HostNo, u32)> = if host == 0 {
            self.groups.iter().map(Group::top).collect()
        } else {
            self.group_of(host).map(|group| group.under((host, 1))).into_iter().collect()
        };
        while let Some((first, len)) = levels.pop() {
            if len == 0 {
                continue;
            }
            let mut rest = first;
            for (unwell, standing) in self.unwell.range(first..=first + (len - 1)) {
                if *standing == Standing::Dead {
                    runs.push((rest, unwell - rest));
                    rest = unwell + 1;
                }
                levels.extend(self.group_of(*unwell).map(|group| group.under((*unwell, 1))));
            }
            runs.push((rest, first + len - rest));
        }
    }

    /// The `hosts` that have children of their own and relay.
    fn inner_among(&self, hosts: &HostSet) -> Vec<HostNo> {
        let inner = HostSet::from_runs(self.groups.iter().map(Group::inner).collect());
        hosts.intersection(&inner).iter().filter(|host| self.relays(*host)).collect()
    }

    fn without_dead(&self, hosts: &HostSet) -> HostSet {
        if self.unwell.is_empty() {
            return hosts.clone();
        }
        let dead = self.unwell.iter().filter(|(_, standing)| **standing == Standing::Dead);
        let dead: HostSet = dead.map(|(host, _)| *host).collect();
        hosts.difference(&dead)
    }
}

/// Each next hop with its share as a set.
fn given_out(hops: BTreeMap<HostNo, Vec<(HostNo, u32)>>) -> Vec<(HostNo, HostSet)> {
    hops.into_iter().map(|(hop, runs)| (hop, HostSet::from_runs(runs))).collect()
}
