//! The runtime of a process: how it is created, closed and identified.

use crate::door::{leave, outside};
use crate::target::{Addr, addr_tuple, proc_addr};
use crate::time::{duration, end_limit};
use mesh_proto::EndReason;
use mesh_runtime::{Options, Runtime, Standby};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict as _, PyDict};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// One process's runtime.
#[pyclass(name = "Runtime", module = "mesh_core._native", frozen)]
pub(crate) struct PyRuntime(pub(crate) Arc<Runtime>);

/// The settings of a runtime, as a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct PyOptions {
    spin_us: f64,
    ref_budget: u64,
    link_budget: usize,
    mailbox_budget: u64,
    reply_budget: u64,
    shm_budget: usize,
    shm_threshold: usize,
    shm_idle: f64,
    direct_links: usize,
}

impl PyOptions {
    pub(crate) fn read(&self) -> PyResult<Options> {
        let &Self {
            spin_us,
            ref_budget,
            link_budget,
            mailbox_budget,
            reply_budget,
            shm_budget,
            shm_threshold,
            shm_idle,
            direct_links,
        } = self;
        let (spin, shm_idle) = (duration(spin_us * 1e-6)?, duration(shm_idle)?);
        Ok(Options {
            spin,
            ref_budget,
            link_budget,
            mailbox_budget,
            reply_budget,
            shm_budget,
            shm_threshold,
            shm_idle,
            direct_links,
        })
    }
}

#[pymethods]
impl PyRuntime {
    /// Creates the runtime of a process that runs a script.
    #[staticmethod]
    #[pyo3(signature = (options, standby=None))]
    fn controller(py: Python<'_>, options: PyOptions, standby: Option<(u32, i32)>) -> PyResult<Self> {
        let options = options.read()?;
        // SAFETY: the caller gives away a descriptor that only it knows of.
        let standby = standby.and_then(|(pid, fd)| Standby::new(pid, unsafe { OwnedFd::from_raw_fd(fd) }));
        let runtime = leave(py, || Runtime::controller(options))?;
        if let Some(standby) = standby {
            runtime.stand_by(standby);
        }
        Ok(Self(runtime))
    }

    /// Creates the runtime of a worker. It takes ownership of the two descriptors.
    #[staticmethod]
    fn worker(py: Python<'_>, addr: Addr, link: i32, board: i32, seat: u32, options: PyOptions) -> PyResult<Self> {
        let options = options.read()?;
        // SAFETY: the caller, at the start of a worker, gives away descriptors that only it knows of.
        let (link, board) = unsafe { (OwnedFd::from_raw_fd(link), OwnedFd::from_raw_fd(board)) };
        leave(py, || Runtime::worker(proc_addr(addr), link, board, seat, options)).map(Self)
    }

    /// The mesh, rank and host of this process.
    #[getter]
    fn me(&self) -> Addr {
        addr_tuple(self.0.me())
    }

    /// Returns an id that no other process returns.
    fn new_id(&self) -> u64 {
        self.0.new_id()
    }

    /// The job that this process belongs to.
    #[getter]
    fn job(&self) -> u64 {
        self.0.job()
    }

    /// Tells the agent that this worker ends in order, or what its bootstrap raised, and sends what is queued.
    #[pyo3(signature = (limit, raised=None))]
    fn goodbye(&self, py: Python<'_>, limit: f64, raised: Option<String>) -> PyResult<()> {
        let limit = duration(limit)?;
        let reason = raised.map_or(EndReason::Unstated, EndReason::Bootstrap);
        outside(py, || self.0.goodbye(limit, reason));
        Ok(())
    }

    /// Ends the runtime and everything that it owns.
    fn close(&self, py: Python<'_>, within: f64) -> PyResult<()> {
        let within = end_limit(within)?;
        outside(py, || self.0.close(within));
        Ok(())
    }

    /// Marks this as the copy in a forked child, where it cannot be used.
    fn mark_forked(&self) {
        self.0.mark_forked();
    }

    /// Returns how many objects of each kind exist in this process.
    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.0.counts();
        [
            ("links", counts.links as u64),
            ("calls", counts.calls as u64),
            ("actors", counts.actors as u64),
            ("procs", counts.procs as u64),
            ("ports", counts.ports as u64),
            ("shm_bytes", counts.shm_bytes as u64),
            ("meters", counts.meters as u64),
            ("deferred", counts.deferred.0 as u64),
            ("deferred_bytes", counts.deferred.1),
            ("replies", counts.replies.0 as u64),
            ("reply_bytes", counts.replies.1),
            ("held_reply_bytes", counts.held),
            ("spawns", counts.spawns.0 as u64),
            ("spawn_bytes", counts.spawns.1),
            ("kept", counts.kept.0 as u64),
            ("kept_bytes", counts.kept.1),
            ("refs", counts.refs as u64),
            ("fetched", counts.fetched.0),
            ("copies", counts.fetched.1 as u64),
            ("parts_offered", counts.bypassed.0),
            ("parts_past_gateways", counts.bypassed.1),
            ("landing", counts.landing as u64),
        ]
        .into_py_dict(py)
    }
}
