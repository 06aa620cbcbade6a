//! The runtime object, and sending.

use crate::call::PyCall;
use crate::door::{deadline, duration, leave, raise};
use crate::flow::{Gate, millis};
use crate::inbox::{PyInbox, PyWaker};
use crate::topology::PyRegion;
use bytes::Bytes;
use mesh_proto::{ActorId, Kind, ProcAddr, Target};
use mesh_runtime::{NurserySpec, Options, Outgoing, Runtime, SpawnSpec, Terms};
use mesh_topology::Wire;
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
        Ok(Self { envelope, buffers })
    }

    pub(crate) fn dump(value: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = value.py();
        let dumps = DUMPS
            .get_or_try_init(py, || Ok::<_, PyErr>(py.import("mesh_core._serialize")?.getattr("dumps")?.unbind()))?
            .bind(py);
        let (envelope, buffers): (Bound<'py, PyBytes>, Bound<'py, PyAny>) = dumps.call1((value,))?.extract()?;
        Self::new(envelope, &buffers)
    }

    /// Pickles `value`, which an error is to call `root`.
    pub(crate) fn dump_as(value: &Bound<'py, PyAny>, root: &str) -> PyResult<Self> {
        let py = value.py();
        let named = PyDict::new(py);
        named.set_item("root", root)?;
        let dumped = py.import("mesh_core._serialize")?.getattr("dumps")?.call((value,), Some(&named))?;
        let (envelope, buffers): (Bound<'py, PyBytes>, Bound<'py, PyAny>) = dumped.extract()?;
        Self::new(envelope, &buffers)
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        self.envelope.as_bytes().len() + self.buffers.iter().map(|buffer| buffer.len_bytes()).sum::<usize>()
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
            py.detach(|| send(envelope, &buffers))
        } else {
            send(envelope, &buffers)
        }
    }
}

/// Who a message is for.
#[pyclass(name = "Target", module = "mesh_core._native", frozen)]
pub(crate) struct PyTarget(Arc<Target>);

#[pymethods]
impl PyTarget {
    /// One proc.
    #[staticmethod]
    fn one(mesh: u64, rank: u32) -> Self {
        Self(Arc::new(Target::One(ProcAddr { mesh, rank })))
    }

    /// The ranks of a region of a mesh.
    #[staticmethod]
    fn many(mesh: u64, region: &PyRegion) -> Self {
        Self(Arc::new(Target::Many(mesh, region.inner().clone())))
    }

    fn __len__(&self) -> usize {
        self.0.len()
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
        while !py.detach(|| self.runtime.wait_room(&self.target, Duration::from_millis(100))) {
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

    /// Sends `value` and returns the call that waits for the replies; after `limit` seconds nobody wants them.
    #[pyo3(signature = (value, stream=false, limit=None))]
    fn call(&self, py: Python<'_>, value: &Bound<'_, PyAny>, stream: bool, limit: Option<f64>) -> PyResult<PyCall> {
        let payload = Payload::dump(value)?;
        let terms = self.admit(py, &payload, deadline(limit)?)?;
        let (call, queued) = payload
            .send(py, |bytes, buffers| self.runtime.call_on(&self.outgoing(self.kind, bytes, buffers), stream, terms))
            .map_err(|error| raise(py, &error))?;
        self.hold_back(py, queued)?;
        Ok(PyCall { runtime: Arc::clone(&self.runtime), call, target: Arc::clone(&self.target), actor: self.actor })
    }

    /// Sends `value`; nobody waits.
    fn tell(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let payload = Payload::dump(value)?;
        let terms = self.admit(py, &payload, None)?;
        let queued = payload
            .send(py, |bytes, buffers| self.runtime.tell_on(&self.outgoing(Kind::Tell, bytes, buffers), terms))
            .map_err(|error| raise(py, &error))?;
        self.hold_back(py, queued)
    }
}

/// One process's runtime.
#[pyclass(name = "Runtime", module = "mesh_core._native", frozen)]
pub(crate) struct PyRuntime(Arc<Runtime>);

fn options(
    spin_us: f64,
    link_budget: usize,
    mailbox_budget: u64,
    shm_budget: usize,
    shm_threshold: usize,
) -> PyResult<Options> {
    Ok(Options { spin: duration(spin_us * 1e-6)?, link_budget, mailbox_budget, shm_budget, shm_threshold })
}

#[pymethods]
impl PyRuntime {
    /// The runtime of a process that runs a script.
    #[staticmethod]
    #[pyo3(signature = (*, spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold))]
    fn controller(
        py: Python<'_>,
        spin_us: f64,
        link_budget: usize,
        mailbox_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
    ) -> PyResult<Self> {
        let options = options(spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold)?;
        leave(py, || Runtime::controller(options)).map(Self)
    }

    /// The runtime of a worker. It owns the two descriptors from here on.
    #[staticmethod]
    #[pyo3(signature = (*, mesh, rank, link, board, seat, spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn worker(
        py: Python<'_>,
        mesh: u64,
        rank: u32,
        link: i32,
        board: i32,
        seat: u32,
        spin_us: f64,
        link_budget: usize,
        mailbox_budget: u64,
        shm_budget: usize,
        shm_threshold: usize,
    ) -> PyResult<Self> {
        let options = options(spin_us, link_budget, mailbox_budget, shm_budget, shm_threshold)?;
        // SAFETY: the caller, a worker's first lines, gives away descriptors that it alone knows of.
        let (link, board) = unsafe { (OwnedFd::from_raw_fd(link), OwnedFd::from_raw_fd(board)) };
        leave(py, || Runtime::worker(ProcAddr { mesh, rank }, link, board, seat, options)).map(Self)
    }

    /// This process's mesh and rank.
    #[getter]
    fn me(&self) -> (u64, u32) {
        let me = self.0.me();
        (me.mesh, me.rank)
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
        who: Option<Py<PyAny>>,
    ) -> PyResult<PySender> {
        let kind = match kind {
            "call" => Kind::Call,
            "spawn" => Kind::Spawn,
            "stop_actor" => Kind::StopActor,
            other => return Err(PyValueError::new_err(format!("no message of kind {other:?} is sent this way"))),
        };
        let target = Arc::clone(&target.0);
        let mut name = name.as_bytes().to_vec();
        if let Target::Many(_, region) = &*target {
            // Receivers of a cast are told its shape, so that they know their place in it.
            name.push(0);
            let extent = region.extent();
            let dims: Vec<String> =
                extent.labels().zip(extent.sizes()).map(|(label, size)| format!("{label}={size}")).collect();
            name.extend_from_slice(dims.join(",").as_bytes());
            if region.to_wire().len() > usize::from(u16::MAX) {
                return Err(PyValueError::new_err(
                    "the labels of the mesh are too long to be sent: 65,535 bytes is the limit",
                ));
            }
        }
        if name.len() > usize::from(u16::MAX) {
            return Err(PyValueError::new_err(
                "an endpoint's name and its mesh's labels are at most 65,535 bytes long",
            ));
        }
        let gate = Gate::new(actor, who);
        Ok(PySender { runtime: Arc::clone(&self.0), target, actor, name, kind, block, gate })
    }

    /// Makes a mesh of processes; the call completes as they come up.
    #[pyo3(signature = (mesh, region, *, argv, env, fresh, config, within))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn spawn_procs(
        &self,
        py: Python<'_>,
        mesh: u64,
        region: &PyRegion,
        argv: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        fresh: bool,
        config: &[u8],
        within: f64,
    ) -> PyResult<PyCall> {
        let within = duration(within)?;
        let spec = SpawnSpec {
            nursery: NurserySpec { argv, env },
            exec: fresh,
            config: Bytes::copy_from_slice(config),
            within,
        };
        let region = region.inner();
        let call = leave(py, || self.0.spawn_procs(mesh, region, &spec))?;
        let target = Arc::new(Target::Many(mesh, region.clone()));
        Ok(PyCall { runtime: Arc::clone(&self.0), call, target, actor: 0 })
    }

    /// Asks a mesh of processes to end, kills what has not after `within` seconds; completes when all have ended.
    fn stop_procs(&self, py: Python<'_>, mesh: u64, region: &PyRegion, within: f64) -> PyResult<PyCall> {
        let within = duration(within)?;
        let region = region.inner();
        let call = leave(py, || self.0.stop_procs(mesh, region, within))?;
        let target = Arc::new(Target::Many(mesh, region.clone()));
        Ok(PyCall { runtime: Arc::clone(&self.0), call, target, actor: 0 })
    }

    /// Waits as the event loop of this process's actors does: for `waker`, for one of the descriptors in the set
    /// `watched`, for a signal, for at most `timeout` seconds.
    #[pyo3(signature = (waker, watched, timeout=None))]
    fn wait_loop(&self, py: Python<'_>, waker: &PyWaker, watched: i32, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(timeout)?;
        py.detach(|| {
            // SAFETY: the caller, a selector, keeps its own set open while it waits on it.
            let watched = unsafe { BorrowedFd::borrow_raw(watched) };
            self.0.wait_loop(&waker.0, watched, until);
        });
        Ok(())
    }

    /// A process's pid, as far as it is known here.
    fn pid_of(&self, mesh: u64, rank: u32) -> Option<u32> {
        self.0.pid_of(ProcAddr { mesh, rank })
    }

    /// The inbox of the process itself.
    fn system_inbox(&self) -> PyInbox {
        PyInbox { runtime: Arc::clone(&self.0), inbox: self.0.system_inbox() }
    }

    /// An actor's inbox.
    fn inbox(&self, actor: u64) -> Option<PyInbox> {
        self.0.inbox(actor).map(|inbox| PyInbox { runtime: Arc::clone(&self.0), inbox })
    }

    /// Closes an actor's inbox; what still waits there goes back to its senders.
    fn close_inbox(&self, actor: u64) {
        self.0.close_inbox(actor);
    }

    /// Says that this worker ends in order, and writes out what still waits.
    fn goodbye(&self, py: Python<'_>, limit: f64) -> PyResult<()> {
        let limit = duration(limit)?;
        py.detach(|| self.0.goodbye(limit));
        Ok(())
    }

    /// Ends the runtime and everything that it owns.
    fn close(&self, py: Python<'_>, within: f64) -> PyResult<()> {
        let within = duration(within)?.min(Duration::from_secs(3600));
        py.detach(|| self.0.close(within));
        Ok(())
    }

    /// Says that this is a copy in a forked child.
    fn mark_forked(&self) {
        self.0.mark_forked();
    }

    /// What waits and what lives here.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.0.counts();
        let out = PyDict::new(py);
        out.set_item("links", counts.links)?;
        out.set_item("calls", counts.calls)?;
        out.set_item("actors", counts.actors)?;
        out.set_item("procs", counts.procs)?;
        out.set_item("shm_bytes", counts.shm_bytes)?;
        out.set_item("meters", counts.meters)?;
        Ok(out)
    }
}
