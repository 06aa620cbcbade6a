//! What processes have written that was not shown yet, for those who wait for a result and want to see that first.
//!
//! LOG-8: once a result has been waited for, everything that its processes wrote before it has been shown, or has been
//! waited for as long as the settings say. A process that has written nothing costs its callers nothing, where the poll of
//! the links has seen that (LOG-9); elsewhere one system call, and less if several results are there: the first look that
//! finds nothing serves all of them ([`Looks`]).
//!
//! Lines of a process are *on their way* from the moment when they are read from its pipes until they have been shown;
//! on other hosts, until the controller has taken the batch that they are in. Before that they are in the pipes.
//!
//! | who waits for | is told by |
//! | --- | --- |
//! | a process of this host | the pipes and [`Behind`], when the result is there |
//! | a process of another host | a mark on its reply ([`mesh_proto::Header::has_printed`]), from that host's [`Behind`] |
//! | processes whose values are combined on the way | marks on their shares, of which the combined reply has one |

use crate::completion::Completion;
use crate::locks::lock;
use mesh_proto::{HostNo, MeshId, ProcAddr, Target};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

/// Where lines come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// A process of this host.
    Proc(ProcAddr),
    /// Processes of a mesh on another host.
    Host(MeshId, HostNo),
}

impl Source {
    pub(super) fn mesh(self) -> MeshId {
        match self {
            Self::Proc(addr) => addr.mesh,
            Self::Host(mesh, _) => mesh,
        }
    }

    pub(super) fn is_of(self, target: &Target) -> bool {
        match self {
            Self::Proc(addr) => target.index_of(addr).is_some(),
            Self::Host(mesh, host) => {
                target.pieces().iter().any(|piece| piece.target.mesh() == mesh && piece.target.hosts().contains(host))
            }
        }
    }
}

/// Until which chunk, or batch, the lines of a source are on their way, while that is not known.
const UNKNOWN: u64 = u64::MAX;

#[derive(Debug, Default)]
struct State {
    /// The processes of this host, by the tokens of their pipes.
    procs: HashMap<u64, ProcAddr>,
    /// Whose lines are on their way, and until which chunk or batch.
    sources: HashMap<Source, u64>,
    /// Those of which that is not known, by mesh.
    unknown: HashMap<MeshId, Vec<Source>>,
    /// How many chunks were shown, or batches taken.
    shown: u64,
    /// How many were when somebody waited in vain: nobody waits again before there are more.
    stuck: Option<u64>,
    /// Somebody shows lines, or is about to.
    watched: bool,
    /// The thread that does, once it has begun.
    shower: Option<ThreadId>,
}

/// See the module. Its lock is taken last, and held briefly.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// How many sources there are. Usually none, and then the lock need not be taken.
    count: AtomicUsize,
    state: Mutex<State>,
}

impl Behind {
    /// A process has these pipes from now on.
    pub(super) fn opened(&self, token: u64, addr: ProcAddr) {
        lock(&self.state).procs.insert(token, addr);
    }

    pub(super) fn closed(&self, token: u64) {
        lock(&self.state).procs.remove(&token);
    }

    /// Notes that something is about to be read. Must come before: whoever finds the pipe empty looks here next. Returns
    /// what was known of the source, for [`Behind::read_nothing`].
    pub(super) fn reading(&self, source: Source) -> Option<u64> {
        let mut state = lock(&self.state);
        let before = state.sources.insert(source, UNKNOWN);
        if before != Some(UNKNOWN) {
            state.unknown.entry(source.mesh()).or_default().push(source);
        }
        self.count.store(state.sources.len(), Ordering::SeqCst);
        before
    }

    /// There was nothing to read, so that all is as it was before.
    pub(super) fn read_nothing(&self, source: Source, before: Option<u64>) {
        let mut state = lock(&self.state);
        let State { sources, shown, .. } = &mut *state;
        match before.filter(|last| *last > *shown) {
            Some(last) => sources.insert(source, last),
            None => sources.remove(&source),
        };
        self.count.store(state.sources.len(), Ordering::SeqCst);
    }

    /// What was read of the meshes and sources that these functions accept is in chunks, or batches, up to `last`.
    pub(super) fn settle(&self, last: u64, is_quiet: impl Fn(MeshId) -> bool, is_whole: impl Fn(Source) -> bool) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut state = lock(&self.state);
        let State { sources, unknown, shown, .. } = &mut *state;
        unknown.retain(|mesh, those| {
            if !is_quiet(*mesh) {
                return true;
            }
            those.retain(|source| {
                let is_open = sources.get(source) == Some(&UNKNOWN);
                if is_open && !is_whole(*source) {
                    return true;
                }
                if is_open && last > *shown {
                    sources.insert(*source, last);
                } else if is_open {
                    sources.remove(source);
                }
                false
            });
            !those.is_empty()
        });
        self.count.store(sources.len(), Ordering::SeqCst);
    }

    /// So many chunks were shown, or batches taken.
    pub(super) fn shown(&self, count: u64) {
        let mut state = lock(&self.state);
        state.shown = count;
        state.sources.retain(|_, last| *last > count);
        self.count.store(state.sources.len(), Ordering::SeqCst);
    }

    /// Somebody will show lines.
    pub(super) fn watched(&self) {
        lock(&self.state).watched = true;
    }

    /// The calling thread shows lines.
    pub(super) fn showing(&self) {
        lock(&self.state).shower = Some(std::thread::current().id());
    }

    /// Somebody has waited in vain.
    pub(super) fn stuck(&self) {
        let mut state = lock(&self.state);
        state.stuck = Some(state.shown);
    }

    /// Whether lines of a source that this function accepts are on their way or in these pipes.
    pub(super) fn look(&self, is_wanted: impl Fn(Source) -> bool, pipes: impl IntoIterator<Item = u64>) -> Look {
        let mut pipes = pipes.into_iter().peekable();
        // After a look at the pipes: what was taken out of them since is noted here.
        if pipes.peek().is_none() && self.count.load(Ordering::SeqCst) == 0 {
            return Look::Nothing;
        }
        let state = lock(&self.state);
        let mut written = pipes.filter_map(|token| state.procs.get(&(token / 2)));
        match written.any(|addr| is_wanted(Source::Proc(*addr)))
            || state.sources.keys().any(|source| is_wanted(*source))
        {
            true => Look::OfThese,
            false => Look::OfOthers,
        }
    }

    /// Whether it is of use that the calling thread waits.
    pub(super) fn can_wait(&self) -> bool {
        let state = lock(&self.state);
        // A handler of the program may itself wait for a call.
        let is_shower = state.shower == Some(std::thread::current().id());
        state.watched && !is_shower && state.stuck != Some(state.shown)
    }
}

/// What a look for lines of some processes has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// No process of this host has written anything that was not shown.
    Nothing,
    /// Others have.
    OfOthers,
    /// One of them has, or may have.
    OfThese,
}

/// The looks of a process, in order: one that found nothing serves all results that were there before it began.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    begun: AtomicU64,
    /// The last that has found nothing.
    clean: AtomicU64,
}

impl Looks {
    /// How many have begun. Those to come see whatever was written before a result that is there by now.
    pub(crate) fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// Whether one that began after so many has found nothing.
    pub(crate) fn have_served(&self, begun: u64) -> bool {
        self.clean.load(Ordering::SeqCst) > begun
    }

    /// Looks, and returns whether what was looked for is there.
    pub(crate) fn take(&self, look: impl FnOnce() -> Look) -> bool {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let found = look();
        if found == Look::Nothing {
            self.clean.fetch_max(number, Ordering::SeqCst);
        }
        found == Look::OfThese
    }
}

/// A wait for the lines of some processes to be shown.
#[derive(Debug)]
pub(crate) struct CatchUp {
    pub(super) target: Target,
    /// Other hosts to ask for what processes of a mesh have written there.
    pub(super) ask: Vec<(HostNo, MeshId)>,
    /// When it is given up, on the clock of the logs.
    pub(super) until: Duration,
    pub(super) done: Arc<Completion>,
    pub(super) stage: Stage,
}

/// How far such a wait has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The pipes are to be read, and other hosts to be asked.
    Begun,
    /// These hosts have not answered yet.
    Asked(u64, HashSet<HostNo>),
    /// All of it is in chunks up to this one.
    Found(u64),
}

impl CatchUp {
    /// The meshes whose lines are waited for.
    pub(super) fn meshes(&self) -> HashSet<MeshId> {
        self.target.pieces().iter().map(|piece| piece.target.mesh()).collect()
    }
}
