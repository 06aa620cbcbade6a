//! The runtime object, and sending.

use crate::call::PyCall;
use crate::completion::PyCompletion;
use crate::door::{self, deadline, duration, leave, outside, raise};
use crate::flow::{Gate, millis};
use crate::inbox::{PyInbox, PyMessage, PyWaker};
use crate::logs::PyLogs;
use crate::port::{Packing, PyAddress, PyMailbox, PyOutlet};
use crate::topology::PyRegion;
use bytes::Bytes;
use mesh_proto::{ActorId, EndReason, Kind, Placement, ProcAddr, Target};
use mesh_runtime::{Callee, NurserySpec, Options, Outgoing, Packed, Runtime, RuntimeError, SpawnSpec, Terms};
use mesh_topology::{Region, Wire};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages with this much out of band are copied outside the interpreter.
const LARGE: usize = 256 * 1024;

/// Out-of-band buffers of one message; the envelope is a part too, and a frame counts its parts in 16 bits.
const MOST_BUFFERS: usize = u16::MAX as usize - 1;

static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A pickled object: its envelope and the buffers beside it, which stay the caller's memory.
pub(crate) struct Payload<'py> {
    envelope: Bound<'py, PyBytes>,
    buffers: Vec<PyBuffer<u8>>,
    /// The ports of calls in it.
    ports: Vec<Packed>,
}

impl<'py> Payload<'py> {
    pub(crate) fn new(envelope: Bound<'py, PyBytes>, buffers: &Bound<'py, PyAny>) -> PyResult<Self> {
        let count = buffers.len()?;
        if count > MOST_BUFFERS {
            return Err(PyValueError::new_err(format!(
                "a message carries at most {MOST_BUFFERS} out-of-band buffers, not {count}; join small arrays into larger ones"
            )));
        }
        let buffers = if count == 0 {
            Vec::new()
        } else {
            buffers.try_iter()?.map(|one| PyBuffer::get(&one?)).collect::<PyResult<Vec<_>>>()?
        };
        if buffers.iter().any(|buffer| !buffer.is_c_contiguous()) {
            return Err(PyValueError::new_err("an out-of-band buffer must be contiguous"));
        }
        Ok(Self { envelope, buffers, ports: Vec::new() })
    }

    pub(crate) fn dump(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = value.py();
        let dumps = DUMPS
            .get_or_try_init(py, || Ok::<_, PyErr>(py.import("mesh_core._serialize")?.getattr("dumps")?.unbind()))?
            .bind(py);
        Self::pack(|| dumps.call1((value,)))
    }

    /// Pickles `value`, which an error is to call `root`.
    pub(crate) fn dump_as(value: &Bound<'py, PyAny>, root: &str) -> PyResult<Self> {
        let py = value.py();
        let named = PyDict::new(py);
        named.set_item("root", root)?;
        let dumps = py.import("mesh_core._serialize")?.getattr("dumps")?;
        Self::pack(|| dumps.call((value,), Some(&named)))
    }

    fn pack(dump: impl FnOnce() -> PyResult<Bound<'py, PyAny>>) -> PyResult<Self> {
        let packing = Packing::begin();
        let (envelope, buffers): (Bound<'py, PyBytes>, Bound<'py, PyAny>) = dump()?.extract()?;
        let ports = packing.end();
        Ok(Self { ports, ..Self::new(envelope, &buffers)? })
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        self.envelope.as_bytes().len() + self.buffers.iter().map(|buffer| buffer.len_bytes()).sum::<usize>()
    }

    /// Sends it to `to`, which people call `who`, by `send`: as [`Self::send`].
    pub(crate) fn ship<T: Send>(
        &self,
        py: Python<'py>,
        to: &Target,
        who: impl FnOnce() -> String,
        send: impl FnOnce(&[u8], &[&[u8]]) -> Result<T, RuntimeError> + Send,
    ) -> PyResult<T> {
        self.ports.iter().for_each(Packed::begin);
        let sent = self.send(py, send);
        if !self.ports.is_empty() {
            match &sent {
                Ok(_) => {
                    let who = who();
                    self.ports.iter().for_each(|port| port.sent(to, &who));
                }
                Err(_) => self.ports.iter().for_each(Packed::unsent),
            }
        }
        sent.map_err(|error| raise(py, &error))
    }

    /// Hands the bytes to `send`, outside the interpreter if there are many.
    pub(crate) fn send<T: Send>(&self, py: Python<'py>, send: impl FnOnce(&[u8], &[&[u8]]) -> T + Send) -> T {
        let envelope = self.envelope.as_bytes();
        let buffers: Vec<&[u8]> = self
            .buffers
            .iter()
            // SAFETY: the buffer is contiguous bytes and stays exported, hence in place, while `self` lives. Should
            // another thread write into it meanwhile, what is sent is a mixture, as with any buffer.
            .map(|buffer| unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) })
            .map(|slice| if slice.is_empty() { &[][..] } else { slice })
            .collect();
        if buffers.iter().map(|b| b.len()).sum::<usize>() >= LARGE {
            outside(py, || send(envelope, &buffers))
        } else {
            send(envelope, &buffers)
        }
    }
}

/// On which host each rank of a mesh lives.
#[pyclass(name = "Placement", module = "mesh_core._native", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyPlacement(pub(crate) Placement);

#[pymethods]
impl PyPlacement {
    /// All ranks on one host.
    #[staticmethod]
    fn on(host: u32) -> Self {
        Self(Placement::On(host))
    }

    /// `per_host` ranks on each host of a region.
    #[staticmethod]
    fn spread(hosts: &PyRegion, per_host: u32) -> PyResult<Self> {
        if per_host == 0 || hosts.inner().is_empty() {
            return Err(PyValueError::new_err("a mesh has at least one rank on at least one host"));
        }
        Ok(Self(Placement::spread(hosts.inner().clone(), per_host)))
    }

    /// The mesh of the host agents themselves.
    #[staticmethod]
    fn agents() -> Self {
        Self(Placement::Agents)
    }

    /// The number of the host that a rank is on.
    fn host_of(&self, rank: u32) -> u32 {
        self.0.host_of(rank)
    }

    /// The number of the one host, where there is but one.
    #[getter]
    fn only(&self) -> Option<u32> {
        self.0.only()
    }

    /// The numbers of the hosts, in the order of the ranks; none of the mesh of agents.
    fn hosts(&self) -> Vec<u32> {
        match &self.0 {
            Placement::On(host) => vec![*host],
            Placement::Agents => Vec::new(),
            Placement::Spread(spread) => spread.hosts.iter().filter_map(|host| u32::try_from(host).ok()).collect(),
        }
    }

    /// The ranks on a host, of a mesh of `size`: the first, and the one after the last.
    fn ranks_on(&self, host: u32, size: usize) -> (usize, usize) {
        let ranks = self.0.ranks_on(host, size);
        (ranks.start, ranks.end)
    }

    /// For pickling.
    fn to_wire<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_wire())
    }

    /// What [`Self::to_wire`] has made.
    #[staticmethod]
    fn from_wire(raw: &[u8]) -> PyResult<Self> {
        Placement::from_wire(raw).map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, (Py<PyBytes>,))> {
        let revive = py.get_type::<Self>().getattr("from_wire")?.unbind();
        Ok((revive, (PyBytes::new(py, &self.0.to_wire()).unbind(),)))
    }
}

/// Who a message is for.
#[pyclass(name = "Target", module = "mesh_core._native", frozen)]
pub(crate) struct PyTarget {
    target: Arc<Target>,
    placement: Placement,
    /// The dimensions of the view that is messaged, as receivers are told them: `hosts=2,gpus=8`.
    shape: String,
}

impl PyTarget {
    fn shape_of(region: &Region) -> String {
        let extent = region.extent();
        let dims: Vec<String> =
            extent.labels().zip(extent.sizes()).map(|(label, size)| format!("{label}={size}")).collect();
        dims.join(",")
    }
}

#[pymethods]
impl PyTarget {
    /// One proc, messaged as such or as a `view` of one rank, which may have dimensions all the same.
    #[staticmethod]
    #[pyo3(signature = (mesh, rank, placement, view=None))]
    fn one(mesh: u64, rank: u32, placement: &PyPlacement, view: Option<&PyRegion>) -> Self {
        let target = Arc::new(Target::One(placement.0.addr(mesh, rank as usize)));
        let shape = view.map(|view| Self::shape_of(view.inner())).unwrap_or_default();
        Self { target, placement: placement.0.clone(), shape }
    }

    /// The ranks of a region of a mesh.
    #[staticmethod]
    fn many(mesh: u64, region: &PyRegion, placement: &PyPlacement) -> Self {
        let region = region.inner();
        let target = Arc::new(Target::Many(mesh, region.clone(), placement.0.clone()));
        Self { target, placement: placement.0.clone(), shape: Self::shape_of(region) }
    }

    fn __len__(&self) -> usize {
        self.target.len()
    }
}

/// The way to one endpoint of some actors: everything about a message but its arguments.
#[pyclass(name = "Sender", module = "mesh_core._native", frozen)]
pub(crate) struct PySender {
    runtime: Arc<Runtime>,
    target: Arc<Target>,
    actor: ActorId,
    name: Vec<u8>,
    kind: Kind,
    block: bool,
    /// Whether the receivers combine their replies on the way up.
    reduce: bool,
    /// Its calls note when they have finished, for a span.
    timed: bool,
    /// Whom people are to be told of when a call fails and nobody looks.
    callee: Option<Arc<Callee>>,
    gate: Gate,
}

impl PySender {
    fn outgoing<'a>(&'a self, kind: Kind, payload: &'a [u8], buffers: &'a [&'a [u8]]) -> Outgoing<'a> {
        Outgoing { kind, target: &self.target, actor: self.actor, name: &self.name, payload, buffers }
    }

    /// Counts the message against its receivers' budgets; a sender that outruns one of them waits here.
    fn admit(&self, py: Python<'_>, payload: &Payload<'_>, until: Option<Instant>) -> PyResult<Terms> {
        if !self.block {
            self.runtime.admit(&self.target).map_err(|error| raise(py, &error))?;
        }
        // Spawns and stops are not an actor's messages, and never wait behind them.
        let bytes = self.name.len() + payload.len();
        let charged =
            self.kind == Kind::Call && self.gate.pass(py, &self.runtime, &self.target, bytes, self.block, until)?;
        Ok(Terms { charged, deadline_ms: until.map_or(0, millis) })
    }

    /// A sender that outruns a link waits here, where Ctrl-C still works.
    fn hold_back(&self, py: Python<'_>, queued: usize) -> PyResult<()> {
        if queued <= self.runtime.link_budget() || !self.block {
            return Ok(());
        }
        while !outside(py, || self.runtime.wait_room(&self.target, Duration::from_millis(100))) {
            py.check_signals()?;
        }
        Ok(())
    }
}

#[pymethods]
impl PySender {
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.gate.traverse(&visit)
    }

    /// The same way, with a trace's context in every message.
    fn traced(&self, py: Python<'_>, context: &str) -> PyResult<Self> {
        let mut name = self.name.clone();
        if !name.contains(&0) {
            // A message to a single actor has no shape; the context stands third all the same.
            name.push(0);
        }
        name.push(0);
        name.extend_from_slice(context.as_bytes());
        if name.len() > usize::from(u16::MAX) {
            return Err(PyValueError::new_err("a trace's context is too long to be sent"));
        }
        Ok(Self {
            runtime: Arc::clone(&self.runtime),
            target: Arc::clone(&self.target),
            actor: self.actor,
            name,
            kind: self.kind,
            block: self.block,
            reduce: self.reduce,
            timed: true,
            callee: self.callee.clone(),
            gate: self.gate.again(py),
        })
    }

    /// Sends `value` and returns the call that waits for the replies; after `limit` seconds nobody wants them.
    #[pyo3(signature = (value, stream=false, limit=None))]
    fn call(&self, py: Python<'_>, value: &Bound<'_, PyAny>, stream: bool, limit: Option<f64>) -> PyResult<PyCall> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let terms = self.admit(py, &payload, deadline(limit)?)?;
        let (call, queued) = payload.ship(
            py,
            &self.target,
            || self.gate.called(py),
            |bytes, buffers| {
                let out = self.outgoing(self.kind, bytes, buffers);
                if self.reduce {
                    self.runtime.call_reduced(&out, terms)
                } else {
                    self.runtime.call_on(&out, stream, terms)
                }
            },
        )?;
        if self.timed {
            call.keep_time();
        }
        if let Some(callee) = &self.callee {
            call.describe(callee);
        }
        self.hold_back(py, queued)?;
        Ok(PyCall {
            runtime: Arc::clone(&self.runtime),
            call,
            target: Arc::clone(&self.target),
            actor: self.actor,
            port: None,
        })
    }

    /// Sends `value`; nobody waits.
    fn tell(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        door::enter(py);
        let payload = Payload::dump(value)?;
        let terms = self.admit(py, &payload, None)?;
        let kind = if self.kind == Kind::Call { Kind::Tell } else { self.kind };
        let queued = payload.ship(
            py,
            &self.target,
            || self.gate.called(py),
            |bytes, buffers| self.runtime.tell_on(&self.outgoing(kind, bytes, buffers), terms),
        )?;
        self.hold_back(py, queued)
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

pub(crate) fn options(
    spin_us: f64,
    link_budget: usize,
    mailbox_budget: u64,
    shm_budget: usize,
    shm_threshold: usize,
    shm_idle: f64,
) -> PyResult<Options> {
    let (spin, shm_idle) = (duration(spin_us * 1e-6)?, duration(shm_idle)?);
    Ok(Options { spin, link_budget, mailbox_budget, shm_budget, shm_threshold, shm_idle })
}

#[pymethods]
impl PyRuntime {
    /// The runtime of a process that runs a script.
    #[staticmethod]
    #[pyo3(signature = (*, spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold, shm_idle))]
    fn controller(
        py: Python<'_>,
        spin_us: f64,
        link_budget: usize,
        mailbox_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
        shm_idle: f64,
    ) -> PyResult<Self> {
        let options = options(spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold, shm_idle)?;
        leave(py, || Runtime::controller(options)).map(Self)
    }

    /// The runtime of a worker. It owns the two descriptors from here on.
    #[staticmethod]
    #[pyo3(signature = (*, mesh, rank, host, link, board, seat, spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold, shm_idle))]
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
        link_budget: usize,
        mailbox_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
        shm_idle: f64,
    ) -> PyResult<Self> {
        let options = options(spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold, shm_idle)?;
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
    #[pyo3(signature = (target, actor, name, kind="call", block=true, who=None))]
    fn sender(
        &self,
        target: &PyTarget,
        actor: u64,
        name: &str,
        kind: &str,
        block: bool,
        who: Option<Bound<'_, PyAny>>,
    ) -> PyResult<PySender> {
        let reduce = kind == "reduce";
        let endpoint = name;
        let kind = match kind {
            "call" | "reduce" => Kind::Call,
            "spawn" => Kind::Spawn,
            "stop_actor" => Kind::StopActor,
            "failure" => Kind::Failure,
            "inspect" => Kind::Inspect,
            "extension" => Kind::Extend,
            other => return Err(PyValueError::new_err(format!("no message of kind {other:?} is sent this way"))),
        };
        let PyTarget { target, placement, shape } = target;
        let last = target.procs().map(|addr| addr.rank as usize).max().unwrap_or(0);
        self.0.note_afar(target.mesh(), placement, last + 1);
        let mut name = name.as_bytes().to_vec();
        if !shape.is_empty() {
            // Receivers are told the shape of what was messaged, so that they know their place in it.
            name.push(0);
            name.extend_from_slice(shape.as_bytes());
        }
        if let Target::Many(_, region, _) = &**target
            && region.to_wire().len() > usize::from(u16::MAX)
        {
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
        let callee = who.as_ref().filter(|_| kind == Kind::Call).map(|who| {
            let actor = who.getattr("name").and_then(|name| name.extract()).unwrap_or_default();
            Arc::new(Callee { actor, endpoint: endpoint.to_owned(), target: Arc::clone(&target) })
        });
        let gate = Gate::new(actor, who.map(Bound::unbind));
        Ok(PySender {
            runtime: Arc::clone(&self.0),
            target,
            actor,
            name,
            kind,
            block,
            reduce,
            timed: false,
            callee,
            gate,
        })
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
            nursery: NurserySpec { argv, env, plan: Bytes::copy_from_slice(plan) },
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

    /// Asks a mesh of processes to end, kills what has not after `within` seconds; completes when all have ended.
    fn stop_procs(
        &self,
        py: Python<'_>,
        mesh: u64,
        region: &PyRegion,
        placement: &PyPlacement,
        within: f64,
    ) -> PyResult<PyCall> {
        let within = duration(within)?;
        let region = region.inner();
        let placement = &placement.0;
        let call = leave(py, || self.0.stop_procs(mesh, region, placement, within))?;
        let target = Arc::new(Target::Many(mesh, region.clone(), placement.clone()));
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
        self.0.pid_of(ProcAddr { mesh, rank, host })
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
        self.0.watch_procs(&target.target, &target.placement);
    }

    /// Whether a process is known here to have ended.
    fn is_gone(&self, mesh: u64, rank: u32, host: u32) -> bool {
        self.0.is_gone(ProcAddr { mesh, rank, host })
    }

    /// What owners at the controller have to hear of.
    fn notices(&self) -> PyInbox {
        PyInbox { runtime: Arc::clone(&self.0), inbox: self.0.notices() }
    }

    /// Announces the next connection to the job's inspection socket, of which this takes a copy, as a notice.
    fn watch_inspection(&self, py: Python<'_>, fd: i32) -> PyResult<()> {
        // SAFETY: the caller owns the descriptor, and keeps it open for the length of this call.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        leave(py, || self.0.watch_knocks(socket, ".inspect"))
    }

    /// Waits for notices, in nobody's way; returns when there are, or never will be again.
    fn wait_notices(&self, py: Python<'_>) {
        door::serves();
        outside(py, || self.0.wait_notices());
    }

    /// Has every call that is waited for here raise what `mesh_core._supervision.alarm` returns.
    fn alarm(&self, py: Python<'_>) {
        py.detach(|| self.0.alarm());
    }

    /// Ends what [`Self::alarm`] began, for waits that begin later.
    fn calm(&self) {
        self.0.calm();
    }

    /// An actor's inbox.
    fn inbox(&self, actor: u64) -> Option<PyInbox> {
        self.0.inbox(actor).map(|inbox| PyInbox { runtime: Arc::clone(&self.0), inbox })
    }

    /// Closes an actor's inbox; what still waits there goes back to its senders.
    fn close_inbox(&self, actor: u64) {
        self.0.close_inbox(actor);
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
        Ok(out)
    }
}
