//! Shares work among idle cores.

use crate::error::TransferError;

/// The number of idle cores besides this thread's, as far as the kernel tells.
pub(crate) fn spare() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores == 1 {
        return 0;
    }
    // The fourth field: runnable threads, including this one, out of all threads.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|field| field.split('/').next()).and_then(|n| n.parse().ok());
    cores.saturating_sub(running.unwrap_or(cores))
}

/// Calls `lane` with each value, the first on this thread and the others on new threads; returns when all have ended.
/// Skips values whose thread cannot be started: lanes take their work from a common list.
pub(crate) fn in_lanes<T: Copy + Send, E: From<TransferError> + Send>(
    values: &[T],
    lane: impl Fn(T) -> Result<(), E> + Sync,
) -> Vec<Result<(), E>> {
    let Some((first, others)) = values.split_first() else { return Vec::new() };
    let lane = &lane;
    std::thread::scope(|scope| {
        let helpers: Vec<_> = others
            .iter()
            .filter_map(|&value| {
                let helper = std::thread::Builder::new().name("mesh-copy".to_owned()).stack_size(256 * 1024);
                helper.spawn_scoped(scope, move || lane(value)).ok()
            })
            .collect();
        let mine = lane(*first);
        let panicked = |_| Err(TransferError::transport("a copying thread has panicked").into());
        let theirs = helpers.into_iter().map(|helper| helper.join().unwrap_or_else(panicked));
        std::iter::once(mine).chain(theirs).collect()
    })
}
