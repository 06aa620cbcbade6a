//! The scenarios: a job from its start, some calls, and deaths.

use crate::model::Model;
use crate::node::Load;
use crate::world::{Purpose, World};
use mesh_proto::HostNo;
use mesh_proto::hosts::Standing;
use std::time::Duration;

/// The work of three kinds of hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The controller's gateway.
    pub controller: Load,
    /// The busiest gateway besides the controller's.
    pub busiest: Load,
    /// The median host.
    pub median: Load,
}

/// The results for jobs of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figures {
    /// Hosts besides the controller's.
    pub hosts: u32,
    /// Until every host has its place and says so.
    pub attach: Duration,
    /// From then until every proc is up.
    pub spawn: Duration,
    /// Until a call has reached the last host.
    pub cast: Duration,
    /// Until its last reply has reached the caller; equal replies.
    pub gather: Duration,
    /// The same, but no two replies are equal.
    pub distinct: Duration,
    /// The same as `gather`, with arguments of 1 MiB.
    pub large: Duration,
    /// Until the last host knows of the death of a leaf whose connections end.
    pub leaf_dead: Duration,
    /// The same for the busiest relay.
    pub relay_dead: Duration,
    /// The same for a relay that falls silent: nearly all of it is the window, from its last sign of life.
    pub silent_dead: Duration,
    /// What one call with equal replies made hosts do, until everything was acknowledged.
    pub call: Work,
    /// What attaching and spawning made them do.
    pub start: Work,
}

/// Runs a job of `model.hosts` hosts.
///
/// ```
/// use mesh_sim::{Model, figures};
/// let small = figures(&Model { hosts: 20, ..Model::default() });
/// assert!(small.cast < small.gather && small.gather.as_millis() < 10);
/// assert_eq!(small, figures(&Model { hosts: 20, ..Model::default() }), "nothing is left to chance");
/// ```
///
/// # Panics
/// If a reply is lost or repeated, or not everybody hears of a death: then a state machine is wrong.
#[must_use]
pub fn figures(model: &Model) -> Figures {
    let hosts = model.hosts;
    let mut world = World::new(model.clone());
    let attach = world.attach();
    let attach = answered(&mut world, attach, u64::from(hosts), Duration::ZERO).1;
    world.settle();
    let spawn = timed(&mut world, 2, Purpose::Spawn).1;
    let start = work(&world, &vec![Load::default(); hosts as usize + 1]);
    let before = loads(&world);
    let (cast, gather) = timed(&mut world, 3, Purpose::Endpoint);
    let call = work(&world, &before);
    world.vary(|model| model.equal = false);
    let distinct = timed(&mut world, 4, Purpose::Endpoint).1;
    world.vary(|model| (model.equal, model.payload) = (true, 1 << 20));
    let large = timed(&mut world, 5, Purpose::Endpoint).1;
    let leaf_dead = told(&mut world, hosts, true);
    let relay_dead = if hosts > 1 { told(&mut world, 1, true) } else { leaf_dead };
    let silent_dead = if hosts > 2 { told(&mut world, 2, false) } else { leaf_dead };
    Figures { hosts, attach, spawn, cast, gather, distinct, large, leaf_dead, relay_dead, silent_dead, call, start }
}

/// A call from its start: until it has reached the last host, and until it is answered.
fn timed(world: &mut World, call: u64, purpose: Purpose) -> (Duration, Duration) {
    let begun = world.now();
    world.call(call, purpose);
    let replies = u64::from(world.model().hosts) * u64::from(world.model().procs);
    let times = answered(world, call, replies, begun);
    world.settle();
    assert_eq!(world.progress(call).repeated, 0, "replies came twice");
    times
}

fn answered(world: &mut World, call: u64, replies: u64, begun: Duration) -> (Duration, Duration) {
    world.run(|world| world.progress(call).replies == replies);
    let progress = world.progress(call);
    assert_eq!(progress.replies, replies, "replies are lost");
    (progress.last_reached.saturating_sub(begun), progress.last_reply.saturating_sub(begun))
}

/// How long it takes until the last living host knows of a death.
fn told(world: &mut World, dead: HostNo, closed: bool) -> Duration {
    let begun = world.now();
    world.kill(dead, closed);
    world.settle();
    let (count, last) = world.told(dead, Standing::Dead);
    assert_eq!(count, world.living(), "hosts that have not heard of the death of {dead}");
    last.saturating_sub(begun)
}

fn loads(world: &World) -> Vec<Load> {
    (0..=world.model().hosts).map(|host| world.load(host)).collect()
}

fn work(world: &World, before: &[Load]) -> Work {
    let mut done: Vec<Load> = loads(world).iter().zip(before).map(|(now, before)| now.since(before)).collect();
    let controller = done.remove(0);
    done.sort_by_key(|load| (load.busy, load.bytes));
    Work {
        controller,
        busiest: done.last().copied().unwrap_or_default(),
        median: done.get(done.len() / 2).copied().unwrap_or_default(),
    }
}
