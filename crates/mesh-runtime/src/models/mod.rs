//! Every schedule of a few threads through what they share without locks, tried by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p mesh-runtime --profile schedules loom_`, which is `./dev loom`.
//!
//! The files beside this one take the place of what has no model: the kernel, and memory that processes share.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod completion;
mod holders;
mod quiet;
mod reactor;
mod spin_board;

/// Tries all schedules with up to `preemptions` switches away from a thread that could have gone on.
fn model(preemptions: usize, threads: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(threads);
}
