//! Promises that have a name, for those who look into a process.

use crate::completion::Completion;
use crate::locks::lock;
use mesh_proto::ActorId;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// How many may be kept before those that are over are looked for.
const FEW: usize = 64;

/// A promise that has no outcome.
#[derive(Debug)]
struct Open {
    name: Box<str>,
    born: Instant,
    completion: Weak<Completion>,
}

/// Those of a process.
#[derive(Debug, Default)]
pub(crate) struct Promises(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    open: Vec<Open>,
    /// How many were left when those that were over were last thrown out.
    left: usize,
}

impl Promises {
    /// Shows a promise for as long as it is open.
    pub(crate) fn show(&self, name: &str, completion: &Arc<Completion>) {
        let mut kept = lock(&self.0);
        if kept.open.len() >= FEW + 2 * kept.left {
            kept.open.retain(|one| one.completion.upgrade().is_some_and(|one| !one.is_done()));
            kept.left = kept.open.len();
        }
        kept.open.push(Open { name: name.into(), born: Instant::now(), completion: Arc::downgrade(completion) });
    }

    /// Those that somebody waits for: since when, and on behalf of which actor.
    pub(crate) fn waits(&self) -> Vec<(Instant, ActorId, Box<str>)> {
        let kept = lock(&self.0);
        let waits = |one: &Open| {
            let (by, since) = one.completion.upgrade()?.awaited()?;
            Some((since, by, one.name.clone()))
        };
        kept.open.iter().filter_map(waits).collect()
    }

    /// Those that somebody waits for, with the seconds since they were made.
    pub(crate) fn awaited(&self) -> Vec<(Box<str>, f64)> {
        let kept = lock(&self.0);
        let awaited = kept.open.iter().filter(|one| one.completion.upgrade().is_some_and(|one| one.is_awaited()));
        awaited.map(|one| (one.name.clone(), one.born.elapsed().as_secs_f64())).collect()
    }
}
