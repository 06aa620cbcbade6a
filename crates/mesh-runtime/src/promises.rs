//! Named promises of a process, so that they can be listed while somebody waits for them.

use crate::completion::Completion;
use crate::locks::lock;
use mesh_proto::ActorId;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

/// How many are kept before finished ones are removed.
const FEW: usize = 64;

/// A promise without an outcome, as far as is known.
#[derive(Debug)]
struct Open {
    name: Box<str>,
    born: Instant,
    completion: Weak<Completion>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Promises(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    open: Vec<Open>,
    /// How many were left when finished ones were last removed.
    left: usize,
}

impl Promises {
    /// Lists a promise as long as it has no outcome.
    pub(crate) fn show(&self, name: &str, completion: &Arc<Completion>) {
        let mut kept = lock(&self.0);
        if kept.open.len() >= FEW + 2 * kept.left {
            kept.open.retain(|one| one.completion.upgrade().is_some_and(|one| !one.is_done()));
            kept.left = kept.open.len();
        }
        kept.open.push(Open { name: name.into(), born: Instant::now(), completion: Arc::downgrade(completion) });
    }

    /// The promises that somebody waits for: since when, and on behalf of which actor.
    pub(crate) fn waits(&self) -> Vec<(Instant, ActorId, Box<str>)> {
        let kept = lock(&self.0);
        let waits = |one: &Open| {
            let (by, since) = one.completion.upgrade()?.awaited()?;
            Some((since, by, one.name.clone()))
        };
        kept.open.iter().filter_map(waits).collect()
    }

    /// The promises that somebody waits for, with their age in seconds.
    pub(crate) fn awaited(&self) -> Vec<(Box<str>, f64)> {
        let kept = lock(&self.0);
        let awaited = kept.open.iter().filter(|one| one.completion.upgrade().is_some_and(|one| one.is_awaited()));
        awaited.map(|one| (one.name.clone(), one.born.elapsed().as_secs_f64())).collect()
    }
}
