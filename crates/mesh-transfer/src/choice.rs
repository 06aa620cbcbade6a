//! Decides which transports to try, in which order, and why not the others. A pure function of what both ends say.
//!
//! CHO-1: a transport is tried only if both ends have it, it works here, it can do the work, and it reaches the owner.
//! CHO-2: among candidates, those that leave the owner's processor alone come first; ties follow the owner's order.

use crate::transports::Capabilities;

/// How far away the owner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// It is this process.
    Process,
    /// Another process of this host.
    Host,
    /// A process of another host.
    Elsewhere,
}

/// What the transfer needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Reads or writes.
    pub copies: bool,
    /// Atomic operations.
    pub atomics: bool,
}

/// A transport of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ours {
    /// Its name.
    pub name: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Why it does not work here, or recently failed for this owner; none if it works.
    pub broken: Option<String>,
}

/// The transports to try, and those left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Transports to try, in order.
    pub candidates: Vec<String>,
    /// Transports not tried, with the reason.
    pub passed: Vec<(String, String)>,
}

impl Choice {
    /// Why nothing can be tried, in words.
    pub fn nothing(&self, owner: &str, forced: Option<&str>) -> String {
        let Some(forced) = forced else {
            let passed: Vec<_> = self.passed.iter().map(|(name, why)| format!("{name}: {why}")).collect();
            return format!("no transport reaches the buffer's owner, {owner}: {}", passed.join("; "));
        };
        if let Some((_, why)) = self.passed.iter().find(|(name, _)| name == forced) {
            return format!("the transport '{forced}' does not reach the buffer's owner, {owner}: {why}");
        }
        let names = || self.passed.iter().map(|(name, _)| name.as_str());
        let advice = match mesh_topology::nearest(forced, names()) {
            Some(meant) => format!("did you mean '{meant}'?"),
            None => format!("there are {}", names().collect::<Vec<_>>().join(", ")),
        };
        format!("no transport is called '{forced}'; {advice}")
    }
}

/// Ranks the transports. `theirs` are the owner's, in its order; `forced` is the only one that the user allows.
pub fn choose(ours: &[Ours], theirs: &[&str], distance: Distance, need: Need, forced: Option<&str>) -> Choice {
    let mut choice = Choice::default();
    let mut usable: Vec<(bool, usize, &str)> = Vec::new();
    for each in ours {
        let place = theirs.iter().position(|name| *name == each.name);
        match (why_not(each, place.is_some(), distance, need, forced), place) {
            (None, Some(place)) => usable.push((!each.capabilities.one_sided, place, &each.name)),
            (why, _) => choice.passed.push((each.name.clone(), why.unwrap_or_default())),
        }
    }
    for name in theirs {
        if !ours.iter().any(|each| each.name == *name) {
            choice.passed.push(((*name).to_owned(), "not installed in this process".to_owned()));
        }
    }
    usable.sort_unstable();
    choice.candidates = usable.into_iter().map(|(_, _, name)| name.to_owned()).collect();
    choice
}

fn why_not(each: &Ours, offered: bool, distance: Distance, need: Need, forced: Option<&str>) -> Option<String> {
    if let Some(forced) = forced
        && forced != each.name
    {
        return Some(format!("the transport '{forced}' was asked for"));
    }
    // Of one that was asked for, what can be changed here comes first.
    if let (true, Some(why)) = (offered || forced.is_some(), &each.broken) {
        return Some(why.clone());
    }
    if !offered {
        return Some("the owner does not offer it".to_owned());
    }
    if distance == Distance::Elsewhere && !each.capabilities.remote {
        return Some("the owner is on another host, or this one was restarted since".to_owned());
    }
    if need.atomics && !each.capabilities.atomics {
        return Some("it has no atomic operations".to_owned());
    }
    if need.copies && !each.capabilities.copies {
        return Some("it has no reads and writes".to_owned());
    }
    None
}
