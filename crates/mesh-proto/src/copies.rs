//! Values from other hosts that a host fetches once for all its processes.
//!
//! Everything that reaches a host passes through its agent, so the agent knows which of its processes hold references
//! to which values: each process that was sent one, until it says that it let go. It may count a holder as gone that
//! was just sent another reference; then the value is fetched once more than needed, which does no other harm.
//!
//! CPY-1: a value that is on its way or here is not fetched again.
//! CPY-2: a process that asks is answered as long as the owner lives. If the process for which a value was fetched
//! dies, the value is fetched for the next one that waits.
//! CPY-3: a copy is dropped once no process of the host is known to hold a reference, or its owner has ended.

use crate::{CallId, ProcAddr};
use std::collections::{HashMap, HashSet};

/// Which value: its owner, and the owner's number for it.
pub type ValueKey = (ProcAddr, u64);

/// A process that waits for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Asker {
    /// The process.
    pub proc: ProcAddr,
    /// The call to answer.
    pub call: CallId,
}

/// What to do for a process that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted<P> {
    /// Fetch it, for this process.
    Fetch,
    /// It is on its way.
    Wait,
    /// It is here.
    Here(P),
}

/// The consequences of the end of processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bereft<P> {
    /// Copies to drop.
    pub dropped: Vec<P>,
    /// What to fetch again, and for whom.
    pub fetch: Vec<(ValueKey, Asker)>,
}

#[derive(Debug)]
struct Copy<P> {
    holders: HashSet<ProcAddr>,
    /// The process for which the owner was asked, and the others that wait for the same value.
    lead: Option<Asker>,
    waiting: Vec<Asker>,
    here: Option<P>,
}

/// The state machine; `P` says where a copy lies.
#[derive(Debug)]
pub struct Copies<P> {
    of: HashMap<ValueKey, Copy<P>>,
    leads: HashMap<Asker, ValueKey>,
    /// Owners whose ends are watched.
    watched: HashSet<ProcAddr>,
}

impl<P> Default for Copies<P> {
    fn default() -> Self {
        Self { of: HashMap::new(), leads: HashMap::new(), watched: HashSet::new() }
    }
}

impl<P: Clone> Copies<P> {
    fn copy(&mut self, value: ValueKey) -> &mut Copy<P> {
        let none = || Copy { holders: HashSet::new(), lead: None, waiting: Vec::new(), here: None };
        self.of.entry(value).or_insert_with(none)
    }

    /// A reference is about to reach a process of this host. True if its owner must be watched.
    pub fn held(&mut self, value: ValueKey, by: ProcAddr) -> bool {
        self.copy(value).holders.insert(by);
        self.watched.insert(value.0)
    }

    /// A process let go of its reference. Returns a copy to drop (CPY-3).
    pub fn let_go(&mut self, value: ValueKey, by: ProcAddr) -> Option<P> {
        let copy = self.of.get_mut(&value)?;
        copy.holders.remove(&by);
        if !copy.holders.is_empty() || copy.lead.is_some() {
            return None;
        }
        self.of.remove(&value)?.here
    }

    /// A process wants the value (CPY-1).
    pub fn ask(&mut self, value: ValueKey, asker: Asker) -> Wanted<P> {
        let copy = self.copy(value);
        copy.holders.insert(asker.proc);
        if let Some(place) = &copy.here {
            return Wanted::Here(place.clone());
        }
        if copy.lead.is_some() {
            copy.waiting.push(asker);
            return Wanted::Wait;
        }
        copy.lead = Some(asker);
        self.leads.insert(asker, value);
        Wanted::Fetch
    }

    /// Whether a value is being fetched for this one.
    #[must_use]
    pub fn is_coming(&self, lead: Asker) -> bool {
        self.leads.contains_key(&lead)
    }

    /// A fetched value arrived, or a refusal. `share` gets the others that wait for it and whether it is still wanted
    /// here, and returns where the copy stays, if it does.
    pub fn arrived(&mut self, lead: Asker, share: impl FnOnce(ValueKey, &[Asker], bool) -> Option<P>) {
        let Some(value) = self.leads.remove(&lead) else { return };
        let Some(copy) = self.of.get_mut(&value) else { return };
        copy.lead = None;
        let waiting = std::mem::take(&mut copy.waiting);
        copy.here = share(value, &waiting, !copy.holders.is_empty());
        if copy.holders.is_empty() && copy.here.is_none() {
            self.of.remove(&value);
        }
    }

    /// Processes ended.
    pub fn ended(&mut self, dead: impl Fn(ProcAddr) -> bool) -> Bereft<P> {
        self.watched.retain(|owner| !dead(*owner));
        let mut after = Bereft { dropped: Vec::new(), fetch: Vec::new() };
        let leads = &mut self.leads;
        self.of.retain(|value, copy| {
            copy.holders.retain(|holder| !dead(*holder));
            copy.waiting.retain(|asker| !dead(asker.proc));
            let lost = dead(value.0);
            if let Some(lead) = copy.lead.filter(|lead| lost || dead(lead.proc)) {
                leads.remove(&lead);
                copy.lead = None;
                if !lost && !copy.waiting.is_empty() {
                    let next = copy.waiting.remove(0);
                    leads.insert(next, *value);
                    copy.lead = Some(next);
                    after.fetch.push((*value, next));
                }
            }
            let stays = !lost && (copy.lead.is_some() || !copy.holders.is_empty());
            if !stays {
                after.dropped.extend(copy.here.take());
            }
            stays
        });
        after
    }

    /// How many copies are here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.of.values().filter(|copy| copy.here.is_some()).count()
    }

    /// Whether no value is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn proc(rank: u32, host: u32) -> ProcAddr {
        ProcAddr { mesh: 7, rank, host }
    }

    const OWNER: ProcAddr = proc(0, 2);
    const VALUE: ValueKey = (OWNER, 5);

    fn asker(rank: u32) -> Asker {
        Asker { proc: proc(rank, 1), call: u64::from(rank) + 100 }
    }

    /// CPY-1, CPY-3.
    #[test]
    fn it_is_fetched_once_and_dropped_with_its_last_holder() {
        let mut copies = Copies::default();
        assert!(copies.held(VALUE, proc(1, 1)) && !copies.held(VALUE, proc(2, 1)));
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
        assert_eq!(copies.ask(VALUE, asker(2)), Wanted::Wait);
        copies.arrived(asker(2), |_, _, _| panic!("nothing was fetched for it"));
        copies.arrived(asker(1), |value, waiting, wanted| {
            assert_eq!((value, waiting, wanted), (VALUE, &[asker(2)][..], true));
            Some("place")
        });
        assert_eq!(copies.ask(VALUE, asker(3)), Wanted::Here("place"));
        assert_eq!(copies.len(), 1);
        assert_eq!(copies.let_go(VALUE, proc(1, 1)), None);
        assert_eq!(copies.let_go(VALUE, proc(1, 1)), None);
        assert_eq!(copies.let_go(VALUE, proc(3, 1)), None);
        assert_eq!(copies.let_go(VALUE, proc(2, 1)), Some("place"));
        assert!(copies.is_empty());
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
    }

    /// CPY-2: waiting processes are answered even if the one for which the value was fetched dies.
    #[test]
    fn the_next_one_fetches_where_the_first_has_died() {
        let mut copies = Copies::<()>::default();
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
        for rank in 2..=4 {
            assert_eq!(copies.ask(VALUE, asker(rank)), Wanted::Wait);
        }
        let after = copies.ended(|addr| addr == proc(1, 1) || addr == proc(2, 1));
        assert_eq!(after, Bereft { dropped: vec![], fetch: vec![(VALUE, asker(3))] });
        // What was on its way to the dead process comes too late.
        copies.arrived(asker(1), |_, _, _| panic!("it is for nobody"));
        copies.arrived(asker(3), |_, waiting, _| {
            assert_eq!(waiting, [asker(4)]);
            None
        });
        assert_eq!(copies.ask(VALUE, asker(4)), Wanted::Fetch, "it was not kept");
    }

    #[test]
    fn what_nobody_wants_any_more_does_not_stay() {
        let mut copies = Copies::<()>::default();
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
        assert_eq!(copies.let_go(VALUE, proc(1, 1)), None);
        copies.arrived(asker(1), |_, _, wanted| {
            assert!(!wanted);
            None
        });
        assert!(copies.is_empty());
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
        assert_eq!(copies.ended(|addr| addr == proc(1, 1)).fetch, []);
        assert!(copies.is_empty());
    }

    /// CPY-3: a copy is dropped when its owner ends.
    #[test]
    fn copies_end_with_their_owner() {
        let mut copies = Copies::default();
        assert!(copies.held(VALUE, proc(1, 1)));
        assert_eq!(copies.ask(VALUE, asker(1)), Wanted::Fetch);
        copies.arrived(asker(1), |_, _, _| Some(1));
        let other = (OWNER, 6);
        assert_eq!(copies.ask(other, asker(1)), Wanted::Fetch);
        assert_eq!(copies.ended(|addr| addr == OWNER), Bereft { dropped: vec![1], fetch: vec![] });
        assert!(copies.is_empty());
        assert!(copies.held(VALUE, proc(1, 1)), "it is watched anew");
    }
}
