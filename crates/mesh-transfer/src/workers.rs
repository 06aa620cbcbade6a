//! Threads for work that would block its caller. They start when there is work and end after being idle for a while.

use crate::error::TransferError;
use crate::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most threads; further work waits for its turn.
const MOST: usize = 32;
/// How long a thread stays idle before it ends.
const IDLE: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// The threads of an engine.
#[derive(Clone, Default)]
pub(crate) struct Workers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.0.lock().threads)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    fn serve(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                // A panic ends one job: what it holds is dropped, which tells its waiters.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                queue = self.lock();
                continue;
            }
            queue.idle += 1;
            let (back, wait) = self.work.wait_timeout(queue, IDLE).unwrap_or_else(PoisonError::into_inner);
            queue = back;
            queue.idle -= 1;
            if wait.timed_out() && queue.jobs.is_empty() {
                queue.threads -= 1;
                return;
            }
        }
    }
}

impl Workers {
    /// Runs the job on a thread. Fails only if there is none, and none can be started.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<(), TransferError> {
        let mut queue = self.0.lock();
        queue.jobs.push_back(Box::new(job));
        if queue.idle >= queue.jobs.len() || queue.threads >= MOST {
            self.0.work.notify_one();
            return Ok(());
        }
        let shared = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("mesh-transfer".to_owned()).stack_size(256 * 1024);
        match thread.spawn(move || shared.serve()) {
            Ok(_) => queue.threads += 1,
            Err(error) if queue.threads == 0 => {
                queue.jobs.pop_back();
                return Err(TransferError::transport(format!("cannot start a thread: {error}")));
            }
            // The existing threads will take it.
            Err(_) => {}
        }
        Ok(())
    }
}
