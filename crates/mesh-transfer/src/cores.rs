//! How many cores have nothing to do.

/// Cores beside this thread's that are idle just now, as far as the kernel tells.
pub(crate) fn spare() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores == 1 {
        return 0;
    }
    // The fourth field: threads that can run, this one among them, of all threads.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|field| field.split('/').next()).and_then(|n| n.parse().ok());
    cores.saturating_sub(running.unwrap_or(cores))
}
