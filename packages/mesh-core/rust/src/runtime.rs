//! The runtime object, and sending.

mod copies;
mod payload;
mod spawning;

pub(crate) use payload::Payload;

use crate::call::PyCall;
use crate::codes;
use crate::completion::PyCompletion;
use crate::door::{self, deadline, duration, leave, outside, raise};
use crate::flow::{Bid, Gate, Passage, PyDeferral, in_coroutine};
use crate::inbox::{PyInbox, PyMessage, PyWaker};
use crate::logs::PyLogs;
use crate::port::{PyAddress, PyMailbox, PyOutlet};
use crate::target::{PyPlacement, PyTarget};
use crate::topology::PyRegion;
use bytes::Bytes;
use mesh_proto::control::Inspect;
use mesh_proto::messages::{Name, Request};
use mesh_proto::{ActorId, EndReason, MESSAGE_COST, ProcAddr, Target};
use mesh_runtime::{
    Body, Call, Callee, Calling, ForkServerSpec, Later, Options, Outgoing, Runtime, SpawnSpec, Terms, millis,
};
use pyo3::exceptions::{PyLookupError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The way to one endpoint of some actors: everything about a message but its arguments.
#[pyclass(name = "Sender", module = "mesh_core._native", frozen)]
pub(crate) struct PySender {
    runtime: Arc<Runtime>,
    target: Arc<Target>,
    actor: ActorId,
    name: Vec<u8>,
    request: Request,
    block: bool,
    /// Whether the receivers combine their replies on the way up.
    reduce: bool,
    /// Its calls note when they have finished, for a span.
    timed: bool,
    /// Whom people are to be told of when a call fails and nobody looks.
    callee: Option<Arc<Callee>>,
    /// What generators may be ahead of whoever reads its streams; 0 for what the process has set.
    ahead: u64,
    gate: Gate,
    /// Up to which news of repaired meshes they are known to be where they were.
    as_of: AtomicU64,
    /// Where they are since a mesh was repaired.
    detour: Mutex<Option<Arc<Detour>>>,
}

/// Where some actors are since a mesh was repaired.
pub(crate) struct Detour {
    as_of: u64,
    target: Arc<Target>,
    gate: Gate,
}

/// Where a message goes, as it was from the beginning or as it is by now.
enum Road<'a> {
    First(&'a PySender),
    Detour(Arc<Detour>),
}

impl Road<'_> {
    fn target(&self) -> &Arc<Target> {
        match self {
            Self::First(sender) => &sender.target,
            Self::Detour(detour) => &detour.target,
        }
    }

    /// Whether it leads to the region that was named.
    fn is_whole(&self) -> bool {
        matches!(self, Self::First(sender) if !matches!(&*sender.target, Target::Joined(_)))
    }

    fn gate(&self) -> &Gate {
        match self {
            Self::First(sender) => &sender.gate,
            Self::Detour(detour) => &detour.gate,
        }
    }
}

impl PySender {
    fn new(
        runtime: &Arc<Runtime>,
        target: &PyTarget,
        (actor, endpoint): (ActorId, &str),
        (request, reduce): (Request, bool),
        block: bool,
        who: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let PyTarget { target, shape } = target;
        runtime.note_target(target);
        // Receivers are told the shape of what was messaged, so that they know their place in it.
        let name = Name { shape: shape.as_bytes(), ..Name::of(endpoint.as_bytes()) }.to_bytes();
        let is_long = |one: &Target| one.to_wire().len() > usize::from(u16::MAX);
        let too_long = match &**target {
            Target::Joined(joined) => joined.pieces().iter().any(|piece| is_long(&piece.target)),
            one => is_long(one),
        };
        if too_long {
            return Err(PyValueError::new_err(
                "the labels of the mesh are too long to be sent: 65,535 bytes is the limit",
            ));
        }
        let target = Arc::clone(target);
        if name.len() > usize::from(u16::MAX) {
            return Err(PyValueError::new_err(
                "an endpoint's name and its mesh's labels are at most 65,535 bytes long",
            ));
        }
        // Of messages that name nobody, Mesh's own, no failure is told.
        let actor_id = actor;
        let callee = who.as_ref().filter(|_| request.is_call()).map(|who| {
            let actor = who.getattr("name").and_then(|name| name.extract()).unwrap_or_default();
            Arc::new(Callee { id: actor_id, actor, endpoint: endpoint.to_owned(), target: Arc::clone(&target) })
        });
        let gate = Gate::new(actor, who.map(Bound::unbind));
        Ok(PySender {
            runtime: Arc::clone(runtime),
            target,
            actor,
            name,
            request,
            block,
            reduce,
            timed: false,
            callee,
            ahead: 0,
            gate,
            as_of: AtomicU64::new(0),
            detour: Mutex::new(None),
        })
    }

    /// The way that a message takes just now.
    fn road(&self, py: Python<'_>) -> Road<'_> {
        let news = self.runtime.news();
        if self.as_of.load(Ordering::Acquire) == news { Road::First(self) } else { self.look_up(py, news) }
    }

    #[cold]
    fn look_up(&self, py: Python<'_>, news: u64) -> Road<'_> {
        let mut detour = self.detour.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = detour.as_ref().filter(|known| known.as_of == news) {
            return Road::Detour(Arc::clone(known));
        }
        let target = self.runtime.resolve(&self.target);
        if Arc::ptr_eq(&target, &self.target) {
            self.as_of.store(news, Ordering::Release);
            return Road::First(self);
        }
        let fresh = Arc::new(Detour { as_of: news, target, gate: self.gate.again(py) });
        *detour = Some(Arc::clone(&fresh));
        Road::Detour(fresh)
    }

    fn outgoing<'a>(&'a self, road: &'a Road<'_>, body: Body<'a>) -> Outgoing<'a> {
        Outgoing { request: self.request, target: road.target(), actor: self.actor, name: &self.name, body }
    }

    /// Counts the message against its receivers' budgets. A thread that outruns one of them waits here; what a coroutine
    /// sends is sent later, and nothing is returned but with what.
    fn admit(
        &self,
        py: Python<'_>,
        road: &Road<'_>,
        payload: &Payload<'_>,
        until: Option<Instant>,
    ) -> PyResult<Result<Terms, Later>> {
        if !self.block {
            self.runtime.admit(road.target()).map_err(|error| raise(py, &error))?;
        }
        let deadline_ms = until.map_or(0, millis);
        // Spawns and stops are not an actor's messages, and wait for no room; but a stop overtakes nothing. What Mesh itself
        // says to extensions, and what these say to others of their process, waits for none either.
        let is_extension = self.request == Request::Extend && self.name.first() != Some(&b'.') && self.gate.is_named();
        if !(self.request.is_call() || is_extension && road.target().index_of(self.runtime.me()).is_none()) {
            let later = self.request == Request::StopActor && self.runtime.behind(road.target(), self.actor).is_some();
            return Ok(if later {
                Err(Later { until, ..Later::default() })
            } else {
                Ok(Terms { deadline_ms, ..Terms::default() })
            });
        }
        let (runtime, target) = (&*self.runtime, road.target());
        // As `Outgoing::cost` has it.
        let cost = MESSAGE_COST + (self.name.len() + payload.len()) as u64;
        Ok(match road.gate().pass(py, Bid { runtime, target, cost, block: self.block, until, own: false })? {
            Passage::Now(charged) => Ok(Terms { charged, deadline_ms, ahead: self.ahead }),
            Passage::Later(meters) => Err(Later { meters: Some(meters), cost, until, ..Later::default() }),
        })
    }

    /// A thread that outruns a link waits here, where Ctrl-C still works. For a coroutine there is something to wait for.
    fn hold_back(&self, py: Python<'_>, target: &Arc<Target>, queued: usize) -> PyResult<Option<PyDeferral>> {
        if queued <= self.runtime.link_budget() || !self.block {
            return Ok(None);
        }
        if in_coroutine(py)? {
            // Whatever is sent there next waits behind this.
            let turn = self.runtime.turn(target, self.actor, None, 0).map_err(|error| raise(py, &error))?;
            return Ok(Some(self.deferral(turn, target)));
        }
        while !outside(py, || self.runtime.wait_room(target, Duration::from_millis(100))) {
            py.check_signals()?;
        }
        Ok(None)
    }

    fn deferral(&self, deferral: mesh_runtime::Deferral, target: &Arc<Target>) -> PyDeferral {
        let (runtime, target) = (Arc::clone(&self.runtime), Arc::clone(target));
        PyDeferral { runtime, deferral, target, actor: self.actor }
    }

    fn waited_for(&self, call: Arc<Call>, target: &Arc<Target>) -> PyCall {
        if self.timed {
            call.keep_time();
        }
        if let Some(callee) = &self.callee {
            call.describe(callee);
        }
        let (runtime, target) = (Arc::clone(&self.runtime), Arc::clone(target));
        PyCall { runtime, call, target, actor: self.actor, port: None }
    }
}

impl PySender {
    #[cold]
    fn call_later(
        &self,
        py: Python<'_>,
        road: &Road<'_>,
        payload: Payload<'_>,
        stream: bool,
        later: Later,
    ) -> PyResult<PyCall> {
        let how = match (self.reduce, stream) {
            (true, _) => Calling::Reduced,
            (false, true) => Calling::Stream,
            (false, false) => Calling::Each,
        };
        let call = payload.entrust(
            py,
            later,
            || self.gate.called(py),
            |body, later| self.runtime.call_later(&self.outgoing(road, body), road.target(), how, later),
        )?;
        // It has no room to be sent: nothing has answered so far.
        call.limit_ahead(self.ahead);
        Ok(self.waited_for(call, road.target()))
    }
}

#[pymethods]
impl PySender {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.gate.traverse(&visit)?;
        // Only where nobody holds it: who does keeps the sender, too.
        match self.detour.try_lock() {
            Ok(detour) => detour.as_ref().map_or(Ok(()), |detour| detour.gate.traverse(&visit)),
            Err(_) => Ok(()),
        }
    }

    /// The same way, with a trace's context in every message.
    fn traced(&self, py: Python<'_>, context: &str) -> PyResult<Self> {
        let name = Name { context: Some(context.as_bytes()), ..Name::read(&self.name) }.to_bytes();
        if name.len() > usize::from(u16::MAX) {
            return Err(PyValueError::new_err("a trace's context is too long to be sent"));
        }
        Ok(Self { name, timed: true, ..self.again(py) })
    }

    /// The same way, for streams whose generators are no more than `ahead` bytes ahead of whoever reads.
    fn reading(&self, py: Python<'_>, ahead: u64) -> Self {
        Self { ahead, ..self.again(py) }
    }

    /// Sends `value` and returns the call that waits for the replies; after `limit` seconds nobody wants them.
    #[pyo3(signature = (value, stream=false, limit=None))]
    fn call(&self, py: Python<'_>, value: &Bound<'_, PyAny>, stream: bool, limit: Option<f64>) -> PyResult<PyCall> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let road = self.road(py);
        if self.request == Request::Spawn {
            return self.spawn(py, &road, &payload, deadline(limit)?);
        }
        if self.reduce && !road.is_whole() {
            return Err(PyLookupError::new_err("its receivers are no region of one mesh any more"));
        }
        let terms = match self.admit(py, &road, &payload, deadline(limit)?)? {
            Ok(terms) => terms,
            Err(later) => return self.call_later(py, &road, payload, stream, later),
        };
        let (call, queued) = payload.ship(
            py,
            road.target(),
            || self.gate.called(py),
            |body| {
                let out = self.outgoing(&road, body);
                if self.reduce {
                    self.runtime.call_reduced(&out, terms)
                } else {
                    self.runtime.call_on(&out, stream, terms)
                }
            },
        )?;
        let call = self.waited_for(call, road.target());
        self.hold_back(py, road.target(), queued)?;
        Ok(call)
    }

    /// Sends `value`; nobody waits for an answer. Returns what to wait for where it could not be sent at once.
    fn tell(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Option<PyDeferral>> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let road = self.road(py);
        match self.admit(py, &road, &payload, None)? {
            Ok(terms) => {
                let queued = payload.ship(
                    py,
                    road.target(),
                    || self.gate.called(py),
                    |body| self.runtime.tell_on(&self.outgoing(&road, body), terms),
                )?;
                self.hold_back(py, road.target(), queued)
            }
            Err(later) => {
                let deferral = payload.entrust(
                    py,
                    later,
                    || self.gate.called(py),
                    |body, later| self.runtime.tell_later(&self.outgoing(&road, body), road.target(), later),
                )?;
                Ok(Some(self.deferral(deferral, road.target())))
            }
        }
    }

    /// Whether its receivers are the region that was named, just now: only those can combine their replies on the way up.
    fn is_whole(&self, py: Python<'_>) -> bool {
        self.road(py).is_whole()
    }
}

/// One process's runtime.
#[pyclass(name = "Runtime", module = "mesh_core._native", frozen)]
pub(crate) struct PyRuntime(Arc<Runtime>);

impl PyRuntime {
    pub(crate) fn shared(&self) -> &Arc<Runtime> {
        &self.0
    }
}

#[expect(clippy::too_many_arguments, reason = "one for each option")]
pub(crate) fn options(
    spin_us: f64,
    ref_budget: u64,
    link_budget: usize,
    mailbox_budget: u64,
    reply_budget: u64,
    shm_budget: usize,
    shm_threshold: usize,
    shm_idle: f64,
) -> PyResult<Options> {
    let (spin, shm_idle) = (duration(spin_us * 1e-6)?, duration(shm_idle)?);
    Ok(Options { spin, ref_budget, link_budget, mailbox_budget, reply_budget, shm_budget, shm_threshold, shm_idle })
}

#[pymethods]
impl PyRuntime {
    /// The runtime of a process that runs a script.
    #[staticmethod]
    #[pyo3(signature = (*, spin_us, ref_budget, link_budget, mailbox_budget, reply_budget, shm_budget, shm_threshold, shm_idle))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn controller(
        py: Python<'_>,
        spin_us: f64,
        ref_budget: u64,
        link_budget: usize,
        mailbox_budget: u64,
        reply_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
        shm_idle: f64,
    ) -> PyResult<Self> {
        let options = options(
            spin_us,
            ref_budget,
            link_budget,
            mailbox_budget,
            reply_budget,
            shm_budget,
            shm_threshold,
            shm_idle,
        )?;
        leave(py, || Runtime::controller(options)).map(Self)
    }

    /// The runtime of a worker. It owns the two descriptors from here on.
    #[staticmethod]
    #[pyo3(signature = (*, mesh, rank, host, link, board, seat, spin_us, ref_budget, link_budget, mailbox_budget, reply_budget, shm_budget, shm_threshold, shm_idle))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn worker(
        py: Python<'_>,
        mesh: u64,
        rank: u32,
        host: u32,
        link: i32,
        board: i32,
        seat: u32,
        spin_us: f64,
        ref_budget: u64,
        link_budget: usize,
        mailbox_budget: u64,
        reply_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
        shm_idle: f64,
    ) -> PyResult<Self> {
        let options = options(
            spin_us,
            ref_budget,
            link_budget,
            mailbox_budget,
            reply_budget,
            shm_budget,
            shm_threshold,
            shm_idle,
        )?;
        // SAFETY: the caller, a worker's first lines, gives away descriptors that it alone knows of.
        let (link, board) = unsafe { (OwnedFd::from_raw_fd(link), OwnedFd::from_raw_fd(board)) };
        leave(py, || Runtime::worker(ProcAddr { mesh, rank, host }, link, board, seat, options)).map(Self)
    }

    /// This process's mesh, rank and host.
    #[getter]
    fn me(&self) -> (u64, u32, u32) {
        let me = self.0.me();
        (me.mesh, me.rank, me.host)
    }

    /// An id that nobody else makes.
    fn new_id(&self) -> u64 {
        self.0.new_id()
    }

    /// The way to an endpoint.
    #[pyo3(signature = (target, actor, name, request, block=true, who=None))]
    fn sender(
        &self,
        target: &PyTarget,
        actor: u64,
        name: &str,
        request: &Bound<'_, PyAny>,
        block: bool,
        who: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PySender> {
        PySender::new(&self.0, target, (actor, name), codes::request(request)?, block, who)
    }

    /// The way to a process that is asked about itself.
    fn asker(&self, target: &PyTarget, question: &Bound<'_, PyAny>) -> PyResult<PySender> {
        let question = Inspect::Ask(codes::question(question)?);
        let word = std::str::from_utf8(question.word()).unwrap_or_default();
        PySender::new(&self.0, target, (0, word), (Request::Inspect, false), true, None)
    }

    /// Makes a mesh of processes; the call completes as they come up.
    #[pyo3(signature = (mesh, region, placement, *, argv, env, plan, fresh, config, within, title=""))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn spawn_procs(
        &self,
        py: Python<'_>,
        mesh: u64,
        region: &PyRegion,
        placement: &PyPlacement,
        argv: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        plan: &[u8],
        fresh: bool,
        config: &[u8],
        within: f64,
        title: &str,
    ) -> PyResult<PyCall> {
        let within = duration(within)?;
        let spec = SpawnSpec {
            fork_server: ForkServerSpec { argv, env, plan: Bytes::copy_from_slice(plan) },
            exec: fresh,
            config: Bytes::copy_from_slice(config),
            within,
            title: title.into(),
        };
        let region = region.inner();
        let placement = &placement.0;
        let call = leave(py, || self.0.spawn_procs(mesh, region, placement, &spec))?;
        let target = Arc::new(Target::Many(mesh, region.clone(), placement.clone()));
        Ok(PyCall { runtime: Arc::clone(&self.0), call, target, actor: 0, port: None })
    }

    /// Asks processes to end, kills what has not after `within` seconds; completes when all have ended.
    fn stop_procs(&self, py: Python<'_>, target: &PyTarget, within: f64) -> PyResult<PyCall> {
        let within = duration(within)?;
        let target = self.0.resolve(&target.target);
        let call = leave(py, || self.0.stop_procs(&target, within))?;
        Ok(PyCall { runtime: Arc::clone(&self.0), call, target, actor: 0, port: None })
    }

    /// Waits as the event loop of this process's actors does: for `waker`, for one of the descriptors in the set
    /// `watched`, for a signal, for at most `timeout` seconds.
    #[pyo3(signature = (waker, watched, timeout=None))]
    fn wait_loop(&self, py: Python<'_>, waker: &PyWaker, watched: i32, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(timeout)?;
        door::serves();
        outside(py, || {
            // SAFETY: the caller, a selector, keeps its own set open while it waits on it.
            let watched = unsafe { BorrowedFd::borrow_raw(watched) };
            self.0.wait_loop(&waker.0, watched, until);
        });
        Ok(())
    }

    /// A process's pid, as far as it is known here.
    fn pid_of(&self, mesh: u64, rank: u32, host: u32) -> Option<u32> {
        self.0.pid_of(self.0.locate(ProcAddr { mesh, rank, host }))
    }

    /// Opens a port that is received at here.
    #[pyo3(signature = (once=false))]
    fn open_port(&self, py: Python<'_>, once: bool) -> PyResult<PyMailbox> {
        let mailbox = self.0.open_port(once).map_err(|error| raise(py, &error))?;
        Ok(PyMailbox::new(&self.0, mailbox))
    }

    /// Something that any thread can finish.
    fn completion(&self, py: Python<'_>) -> PyResult<PyCompletion> {
        self.0.original().map_err(|error| raise(py, &error))?;
        Ok(PyCompletion::new(&self.0))
    }

    /// The sending end of a port that came from another process.
    fn outlet(&self, address: PyAddress) -> PyOutlet {
        PyOutlet::from_address(&self.0, address)
    }

    /// The inbox of the process itself.
    fn system_inbox(&self) -> PyInbox {
        PyInbox { runtime: Arc::clone(&self.0), inbox: self.0.system_inbox() }
    }

    /// Has this process told of the ends of others; at once, of those that have ended.
    fn watch_procs(&self, target: &PyTarget) {
        self.0.watch_procs(&self.0.resolve(&target.target));
    }

    /// Whether a process is known here to have ended.
    fn is_gone(&self, mesh: u64, rank: u32, host: u32) -> bool {
        self.0.is_gone(self.0.locate(ProcAddr { mesh, rank, host }))
    }

    /// What owners at the controller have to hear of.
    fn notices(&self) -> PyInbox {
        PyInbox { runtime: Arc::clone(&self.0), inbox: self.0.notices() }
    }

    /// Announces the next connection to the job's inspection socket, of which this takes a copy, as a notice.
    fn watch_inspection(&self, py: Python<'_>, fd: i32) -> PyResult<()> {
        // SAFETY: the caller owns the descriptor, and keeps it open for the length of this call.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        leave(py, || self.0.watch_inspection_socket(socket))
    }

    /// The next connection from another machine of who looks into the job, as a descriptor that is the caller's.
    fn take_visitor(&self) -> Option<i32> {
        self.0.take_visitor().map(IntoRawFd::into_raw_fd)
    }

    /// Which job this is.
    #[getter]
    fn job(&self) -> u64 {
        self.0.job()
    }

    /// Waits for notices, in nobody's way; returns when there are, or never will be again.
    fn wait_notices(&self, py: Python<'_>) {
        door::serves();
        outside(py, || self.0.wait_notices());
    }

    /// Has every call that is waited for here raise what `Callables::alarm` returns.
    fn alarm(&self, py: Python<'_>) {
        outside(py, || self.0.alarm());
    }

    /// Ends what [`Self::alarm`] began, for waits that begin later.
    fn calm(&self) {
        self.0.calm();
    }

    /// An actor's inbox.
    fn inbox(&self, actor: u64) -> Option<PyInbox> {
        self.0.inbox(actor).map(|inbox| PyInbox { runtime: Arc::clone(&self.0), inbox })
    }

    /// The meshes of processes that this one has spawned and that have not all ended, with their sizes.
    fn live_meshes(&self) -> Vec<(u64, usize, PyPlacement)> {
        self.0.live().into_iter().map(|(mesh, n, placement)| (mesh, n, PyPlacement(placement))).collect()
    }

    /// Says that this worker ends in order, or what its bootstrap has raised, and writes out what still waits.
    #[pyo3(signature = (limit, raised=None))]
    fn goodbye(&self, py: Python<'_>, limit: f64, raised: Option<String>) -> PyResult<()> {
        let limit = duration(limit)?;
        let reason = raised.map_or(EndReason::Unstated, EndReason::Bootstrap);
        outside(py, || self.0.goodbye(limit, reason));
        Ok(())
    }

    /// Ends the runtime and everything that it owns.
    fn close(&self, py: Python<'_>, within: f64) -> PyResult<()> {
        let within = duration(within)?.min(Duration::from_secs(3600));
        outside(py, || self.0.close(within));
        Ok(())
    }

    /// Has stacks written to `file` by the handler that is registered for `signal`.
    fn catch_dumps(&self, py: Python<'_>, signal: i32, file: i32) -> PyResult<()> {
        // SAFETY: the caller keeps the descriptor open during this call; what is kept is a copy.
        let file = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned()?;
        self.0.catch_dumps(signal, file).map_err(|error| raise(py, &error))
    }

    /// Notices of calls that have failed and that nobody has looked at, though somebody holds them.
    fn unseen(&self) -> Vec<PyMessage> {
        self.0.unseen().into_iter().map(|message| PyMessage::shared(&self.0, Arc::new(message))).collect()
    }

    /// Puts an event, as JSON, into the controller's journal.
    fn note_text(&self, text: &str, failure: bool) {
        self.0.note_text(text, failure);
    }

    /// Says that this is a copy in a forked child.
    fn mark_forked(&self) {
        self.0.mark_forked();
    }

    /// What the processes of this host print; only the controller has any.
    fn logs(&self, py: Python<'_>) -> PyResult<PyLogs> {
        leave(py, || self.0.logs()).map(PyLogs)
    }

    /// What waits and what lives here.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.0.counts();
        let out = PyDict::new(py);
        out.set_item("links", counts.links)?;
        out.set_item("calls", counts.calls)?;
        out.set_item("actors", counts.actors)?;
        out.set_item("procs", counts.procs)?;
        out.set_item("ports", counts.ports)?;
        out.set_item("shm_bytes", counts.shm_bytes)?;
        out.set_item("meters", counts.meters)?;
        out.set_item("deferred", counts.deferred.0)?;
        out.set_item("deferred_bytes", counts.deferred.1)?;
        out.set_item("replies", counts.replies.0)?;
        out.set_item("reply_bytes", counts.replies.1)?;
        out.set_item("held_reply_bytes", counts.held)?;
        out.set_item("spawns", counts.spawns.0)?;
        out.set_item("spawn_bytes", counts.spawns.1)?;
        out.set_item("kept", counts.kept.0)?;
        out.set_item("kept_bytes", counts.kept.1)?;
        out.set_item("refs", counts.refs)?;
        out.set_item("fetched", counts.fetched.0)?;
        out.set_item("copies", counts.fetched.1)?;
        out.set_item("parts_offered", counts.bypassed.0)?;
        out.set_item("parts_past_gateways", counts.bypassed.1)?;
        out.set_item("landing", counts.landing)?;
        Ok(out)
    }
}
