//! Spawning procs: their sockets and pipes, their entries, an order to a fork server.
//!
//! The links exist at once, so messages can follow at once. They wait in the sockets until the workers start.

use super::fork_servers::Order;
use super::stopping::ORPHAN_GRACE;
use super::watching::relate;
use super::{HostAgent, MOST_PROCS, Spawn, Surroundings};
use crate::error::RuntimeError;
use crate::fork_server::{ForkServerSpec, WorkerFds, told};
use crate::link::Link;
use crate::locks::lock;
use crate::oom::OomKills;
use bytes::Bytes;
use mesh_proto::control::{Down, SpawnProcs, ranks_of};
use mesh_proto::{CallId, EndReason, Ended, Frame, MeshId, ProcAddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::sync::Arc;
use std::time::Duration;

/// Descriptors that a spawn leaves free for everything else.
const SPARE_FDS: u64 = 64;

/// A mesh of procs to spawn.
#[derive(Clone, Debug)]
pub struct SpawnSpec {
    /// The fork server that forks them.
    pub fork_server: ForkServerSpec,
    /// Whether each one gets a fresh interpreter.
    pub exec: bool,
    /// Passed to the workers; opaque here.
    pub config: Bytes,
    /// How long a worker may take to report.
    pub within: Duration,
    /// The mesh's name and shape, for inspection; opaque here.
    pub title: Arc<str>,
}

impl SpawnSpec {
    /// The order to spawn such procs, for agents.
    pub(crate) fn order(&self, mesh: MeshId, per_host: u32, call: CallId) -> SpawnProcs {
        let raw = |text: &OsString| Bytes::copy_from_slice(text.as_bytes());
        SpawnProcs {
            mesh,
            call,
            per_host,
            exec: self.exec,
            within: self.within,
            argv: self.fork_server.argv.iter().map(raw).collect(),
            env: self.fork_server.env.iter().map(|(key, value)| (raw(key), raw(value))).collect(),
            plan: self.fork_server.plan.clone(),
            config: self.config.clone(),
            title: self.title.to_string(),
        }
    }

    /// Reads an order.
    pub(crate) fn ordered(order: SpawnProcs) -> Self {
        let text = |raw: Bytes| OsString::from_vec(raw.into());
        let SpawnProcs { exec, within, argv, env, plan, config, title, .. } = order;
        let argv = argv.into_iter().map(text).collect();
        let env = env.into_iter().map(|(key, value)| (text(key), text(value))).collect();
        Self { fork_server: ForkServerSpec { argv, env, plan }, exec, config, within, title: title.into() }
    }
}

/// Procs that could not be spawned, and why.
pub(crate) type Unmade = (MeshId, Arc<Ended>);

impl HostAgent {
    /// Makes these ranks of a mesh. `spawner` owns them, and is told of each by this call once it is up.
    ///
    /// # Errors
    /// If descriptors or memory run out. Then nothing was spawned.
    pub(crate) fn spawn(
        &self,
        around: &impl Surroundings,
        mesh: MeshId,
        ranks: Range<u32>,
        spec: &SpawnSpec,
        spawner: (ProcAddr, CallId),
    ) -> Result<(), RuntimeError> {
        if ranks.is_empty() {
            return Ok(());
        }
        let (links, workers) = self.prepare(around, mesh, ranks.clone(), spec)?;
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let (heard, strays) = around.open_routes(mesh, ranks.start, &links);
        let token = state.fork_servers.token_of(&spec.fork_server);
        let (title, within) = (&spec.title, spec.within);
        let spawn = Spawn { mesh, ranks: ranks.clone(), title, spawner, fork_server: Some(token), within };
        let (seats, owned) = state.procs.add(&spawn, self.now());
        state.oom = state.oom.take().or_else(OomKills::from_now_on);
        let mut unwatched = state.procs.family.to_watch();
        heard.iter().for_each(|header| unwatched.extend(relate(&mut state.procs.family, header)));
        around.note_spawn(mesh, title, spawner.0, &links);
        drop(guard);
        let orders = links.iter().zip(seats).zip(workers);
        let order =
            |((link, seat), worker): ((&Arc<Link>, u32), _)| Order { addr: link.peer, exec: spec.exec, seat, worker };
        self.order(token, orders.map(order).collect());
        self.watch(around, unwatched);
        strays.iter().for_each(|frame| around.refuse(frame));
        if !owned {
            self.end_procs(around, mesh, None, ORPHAN_GRACE);
        }
        Ok(())
    }

    /// Creates the sockets and pipes of new procs, both ends; all or none.
    fn prepare(
        &self,
        around: &impl Surroundings,
        mesh: MeshId,
        ranks: Range<u32>,
        spec: &SpawnSpec,
    ) -> Result<(Vec<Arc<Link>>, Vec<WorkerFds>), RuntimeError> {
        // A link and two pipes each; both ends are open until the worker has its own.
        room_for(6 * ranks.len() as u64)?;
        let config = Arc::new(told(&spec.config)?);
        let (mut links, mut workers) = (Vec::with_capacity(ranks.len()), Vec::with_capacity(ranks.len()));
        for rank in ranks {
            match self.prepare_one(around, ProcAddr { mesh, rank, host: self.me.host }, &config) {
                Ok((link, worker)) => {
                    links.push(link);
                    workers.push(worker);
                }
                Err(error) => {
                    drop(workers);
                    links.iter().for_each(|link| around.forget_output(link.peer));
                    return Err(error);
                }
            }
        }
        Ok((links, workers))
    }

    fn prepare_one(
        &self,
        around: &impl Surroundings,
        addr: ProcAddr,
        config: &Arc<OwnedFd>,
    ) -> Result<(Arc<Link>, WorkerFds), RuntimeError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(RuntimeError::os("socketpair"))?;
        let link = Arc::new(Link::new(self.new_link(), addr, ours));
        link.register(&self.reactor)?;
        let (out, err) = around.open_output(addr)?;
        Ok((link, WorkerFds { link: theirs, out, err, config: Arc::clone(config) }))
    }

    /// Somebody orders procs on this host; `leaving` says why nothing new runs here, if so. Whoever ordered what could not be
    /// made is told.
    ///
    /// # Errors
    /// If they could not be made.
    pub(crate) fn on_spawn_procs(
        &self,
        around: &impl Surroundings,
        frame: &Frame,
        leaving: Option<Arc<Ended>>,
    ) -> Result<(), Unmade> {
        let (Some(order), Some(ranks)) = (SpawnProcs::read(frame), ranks_of(frame, MOST_PROCS)) else { return Ok(()) };
        let (mesh, spawner) = (order.mesh, (frame.header.src, order.call));
        // Mesh itself never orders procs from a worker, or the same mesh twice.
        if !self.me.is_agent() || lock(&self.state).procs.has(mesh) {
            return Ok(());
        }
        let mut spec = SpawnSpec::ordered(order);
        // If no interpreter is named, each host uses its own.
        if spec.fork_server.argv.first().is_some_and(|program| program.is_empty()) {
            self.home.settle_in(&mut spec.fork_server);
        }
        let made = match leaving {
            Some(ended) => Err(ended),
            None => self
                .spawn(around, mesh, ranks.clone(), &spec, spawner)
                .map_err(|error| Arc::new(Ended::unmade(EndReason::NotMade(error.to_string())))),
        };
        made.map_err(|ended| {
            for rank in ranks {
                let who = ProcAddr { mesh, rank, host: self.me.host };
                around.dispatch(Down::notice(who, &ended).frame(self.me, spawner.0));
            }
            (mesh, ended)
        })
    }
}

/// Makes room for `n` more descriptors by raising the soft limit as far as the hard limit allows.
fn room_for(n: u64) -> Result<(), RuntimeError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let used = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let limit = getrlimit(Resource::Nofile);
    let need = used.saturating_add(n).saturating_add(SPARE_FDS);
    if limit.current.is_some_and(|soft| soft < need) {
        let maximum = limit.maximum;
        if maximum.is_some_and(|hard| hard < need) {
            return Err(RuntimeError::Descriptors { need, allowed: maximum.unwrap_or_default() });
        }
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
            .map_err(RuntimeError::os("raise the limit of open files"))?;
    }
    Ok(())
}
