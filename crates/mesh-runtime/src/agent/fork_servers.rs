//! The fork servers of a host: one per kind, started by the first spawn of that kind.
//!
//! Only the I/O thread starts them, because the kernel treats the end of the thread that created a child as the end of its
//! parent. Orders for workers wait until then.

use crate::fork_server::{ForkServer, ForkServerSpec, WorkerFds};
use crate::inspect::ForkServerView;
use mesh_proto::{Event, ProcAddr};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Their reactor tokens start here, above those of all links.
pub(crate) const FORK_SERVER_TOKENS: u64 = 1 << 32;

/// A worker to fork.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) addr: ProcAddr,
    pub(super) exec: bool,
    pub(super) seat: u32,
    pub(super) worker: WorkerFds,
}

#[derive(Debug)]
enum Birth {
    /// The I/O thread is about to start it; these workers wait.
    Due(ForkServerSpec, Vec<Order>),
    Running(Arc<ForkServer>),
}

/// What a fork server has reported of its imports.
#[derive(Debug, Default)]
struct Imports {
    /// What it is importing.
    now: Option<String>,
    /// What it has imported for its workers, by commas.
    done: String,
    /// How much it had worked when it was looked at, and since when it has not worked more.
    work: Option<(u64, Duration)>,
}

impl Imports {
    /// Looks at it; returns since when it has not worked.
    fn look(&mut self, fork_server: &ForkServer, now: Duration) -> Option<Duration> {
        let work = fork_server.work()?;
        let (_, since) = *self.work.get_or_insert((work, now));
        let since = if self.work.is_some_and(|(before, _)| before != work) { now } else { since };
        self.work = Some((work, since));
        Some(since)
    }
}

/// The fork servers of this host.
#[derive(Debug, Default)]
pub(super) struct ForkServers {
    tokens: HashMap<ForkServerSpec, u64>,
    births: HashMap<u64, Birth>,
    imports: HashMap<u64, Imports>,
    /// How many there have been so far.
    count: u64,
}

impl ForkServers {
    /// Returns the token of the fork server of this kind. If there is none, one becomes due.
    pub(super) fn token_of(&mut self, spec: &ForkServerSpec) -> u64 {
        if let Some(token) = self.tokens.get(spec) {
            return *token;
        }
        let token = FORK_SERVER_TOKENS + self.count;
        self.count += 1;
        self.tokens.insert(spec.clone(), token);
        self.births.insert(token, Birth::Due(spec.clone(), Vec::new()));
        token
    }

    pub(super) fn running(&self, token: u64) -> Option<Arc<ForkServer>> {
        match self.births.get(&token) {
            Some(Birth::Running(fork_server)) => Some(Arc::clone(fork_server)),
            _ => None,
        }
    }

    /// Orders workers. If the fork server is running, returns it and the orders to send to it.
    pub(super) fn order(&mut self, token: u64, orders: Vec<Order>) -> Option<(Arc<ForkServer>, Vec<Order>)> {
        match self.births.get_mut(&token)? {
            Birth::Due(_, waiting) => {
                waiting.extend(orders);
                None
            }
            Birth::Running(fork_server) => Some((Arc::clone(fork_server), orders)),
        }
    }

    pub(super) fn due(&self) -> Vec<(u64, ForkServerSpec)> {
        let due = self.births.iter().filter_map(|(token, birth)| match birth {
            Birth::Due(spec, _) => Some((*token, spec.clone())),
            Birth::Running(_) => None,
        });
        due.collect()
    }

    /// Marks it as running. Returns the workers that waited for it, or `None` if it was forgotten meanwhile.
    pub(super) fn started(&mut self, token: u64, fork_server: &Arc<ForkServer>) -> Option<Vec<Order>> {
        let birth = self.births.get_mut(&token)?;
        match std::mem::replace(birth, Birth::Running(Arc::clone(fork_server))) {
            Birth::Due(_, waiting) => Some(waiting),
            Birth::Running(_) => None,
        }
    }

    /// It begins to import a module at this time.
    pub(super) fn importing(&mut self, token: u64, module: String, now: Duration) {
        let Some(fork_server) = self.running(token) else { return };
        let imports = self.imports.entry(token).or_default();
        imports.now = Some(module);
        imports.look(&fork_server, now);
    }

    /// It follows orders again, and has imported these modules for its workers.
    pub(super) fn imported(&mut self, token: u64, modules: String) {
        self.imports.insert(token, Imports { done: modules, ..Imports::default() });
    }

    /// What the passing of time means for a proc that it is to fork, which may take this long.
    pub(super) fn tick(&mut self, token: u64, now: Duration, allowed: Duration) -> Event {
        let fork_server = self.running(token);
        let Some(imports) = self.imports.get_mut(&token) else { return Event::Tick };
        let (Some(module), Some(fork_server)) = (imports.now.clone(), fork_server) else { return Event::Tick };
        let progress = imports.look(&fork_server, now).is_some_and(|since| since + allowed > now);
        Event::Importing { module, progress }
    }

    /// Returns the running ones: their pids, what each is importing, and what it has imported.
    pub(super) fn overview(&self) -> Vec<(u64, ForkServerView)> {
        let running = self.births.iter().filter_map(|(token, birth)| match birth {
            Birth::Running(fork_server) => Some((*token, fork_server.pid())),
            Birth::Due(..) => None,
        });
        let told = |token: &u64| self.imports.get(token);
        let view = |(token, pid)| {
            let now = told(&token).and_then(|imports| imports.now.clone());
            let done = told(&token).map(|imports| imports.done.clone()).unwrap_or_default();
            (token, ForkServerView { pid, importing: now.unwrap_or_default(), imported: done, workers: 0 })
        };
        running.map(view).collect()
    }

    /// Forgets one that ended or failed to start. The next spawn of its kind starts another.
    pub(super) fn forget(&mut self, token: u64) {
        self.births.remove(&token);
        self.imports.remove(&token);
        self.tokens.retain(|_, one| *one != token);
    }

    /// Forgets all and returns the running ones. No more are started.
    pub(super) fn take_all(&mut self) -> Vec<Arc<ForkServer>> {
        let running = self.births.drain().filter_map(|(_, birth)| match birth {
            Birth::Running(fork_server) => Some(fork_server),
            Birth::Due(..) => None,
        });
        running.collect()
    }
}
