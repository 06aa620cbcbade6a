//! Other hosts: attaching them, and being one.

use crate::call::PyCall;
use crate::codes;
use crate::door::{leave, outside};
use crate::runtime::{PyOptions, PyRuntime};
use crate::time::{duration, end_limit};
use crate::topology::PyRegion;
use mesh_proto::control::Traits;
use mesh_proto::hosts::Fate;
use mesh_proto::{Placement, Target};
use mesh_runtime::tls::{Identity, Role, split_address};
use mesh_runtime::{GatewayOptions, Host, HostOptions, RuntimeError, Standby};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

fn load(dir: &std::path::Path, role: Role) -> Result<Arc<Identity>, RuntimeError> {
    Identity::load_as(dir, role).map_err(RuntimeError::from)
}

/// Rejects an invalid address where it is given.
fn check(address: &str) -> PyResult<()> {
    split_address(address).map(drop).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Attaches hosts: the number of the first, and the call that completes as they come up. If an address is not known yet,
/// [`place_host`] gives it later.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "called in one place")]
pub(crate) fn attach(
    runtime: &PyRuntime,
    py: Python<'_>,
    addresses: Vec<Option<String>>,
    credentials: PathBuf,
    window: f64,
    fan_out: u32,
    patience: f64,
    hold: f64,
) -> PyResult<(u32, PyCall)> {
    let (window, patience, hold) = (duration(window)?, duration(patience)?, duration(hold)?);
    addresses.iter().flatten().try_for_each(|address| check(address))?;
    let runtime = &runtime.0;
    let identity = move || load(&credentials, Role::Controller);
    let (base, call) =
        leave(py, || runtime.attach(&addresses, identity, GatewayOptions { window, fan_out, patience, hold }))?;
    let count = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    Ok((base, PyCall::of(runtime, call, mesh_runtime::agents(base, count))))
}

/// Gives the address of a host that was attached without one.
#[pyfunction]
pub(crate) fn place_host(runtime: &PyRuntime, py: Python<'_>, host: u32, address: String) -> PyResult<()> {
    check(&address)?;
    let runtime = &runtime.0;
    outside(py, || runtime.place_host(host, address));
    Ok(())
}

/// Reports that a host attached without an address will get none, and why.
#[pyfunction]
pub(crate) fn displace_host(runtime: &PyRuntime, py: Python<'_>, host: u32, why: &str) {
    let runtime = &runtime.0;
    outside(py, || runtime.displace_host(host, why));
}

/// Listens for hosts that connect by themselves. Returns the number of the first, and the call that completes as they connect.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "called in one place")]
pub(crate) fn attach_dialers(
    runtime: &PyRuntime,
    py: Python<'_>,
    address: String,
    count: u32,
    credentials: PathBuf,
    window: f64,
    fan_out: u32,
    hold: f64,
) -> PyResult<(u32, PyCall)> {
    let (window, hold) = (duration(window)?, duration(hold)?);
    check(&address)?;
    let runtime = &runtime.0;
    let identity = move || load(&credentials, Role::Controller);
    let (base, call) = leave(py, || {
        runtime.attach_dialers(&address, count, identity, GatewayOptions { window, fan_out, patience: window, hold })
    })?;
    Ok((base, PyCall::of(runtime, call, mesh_runtime::agents(base, count))))
}

/// Sets the name of the controller's own host, and the interpreter and environment of processes that others spawn there.
#[pyfunction]
pub(crate) fn be_host(runtime: &PyRuntime, name: String, python: Vec<OsString>, env: Vec<(OsString, OsString)>) {
    runtime.0.be_host(name, python, env, None);
}

/// This host's addresses, except for loopback and link-local ones.
#[pyfunction]
pub(crate) fn interfaces(py: Python<'_>) -> PyResult<Vec<String>> {
    Ok(outside(py, mesh_runtime::interfaces)?.iter().map(ToString::to_string).collect())
}

/// The other hosts: their numbers, whether they are connected, and how many bytes are in flight to them.
#[pyfunction]
pub(crate) fn peers(runtime: &PyRuntime) -> Vec<(u32, bool, u64)> {
    runtime.0.peers()
}

/// The numbers of the hosts that are attached and not dead.
#[pyfunction]
pub(crate) fn live_hosts(runtime: &PyRuntime) -> Vec<u32> {
    runtime.0.live_hosts()
}

/// A host: its number, name, address, its agent's pid, its state, and why: one word if it is dead, and a text.
type Entry = (u32, String, String, u64, Py<PyAny>, &'static str, String);

/// All hosts that were ever attached. The controller knows them.
#[pyfunction]
pub(crate) fn roll(py: Python<'_>, runtime: &PyRuntime) -> PyResult<Vec<Entry>> {
    let all = runtime.0.roll().into_iter();
    all.map(|one| {
        let state = codes::host_state(py, one.state)?;
        Ok((one.host, one.name, one.address, one.pid, state, one.fate.map_or("", Fate::word), one.why))
    })
    .collect()
}

/// What a host reported about itself: CPUs, labels, resources.
type Said = (u64, Vec<(String, String)>, Vec<(String, f64)>);

/// What these hosts reported about themselves; `None` for those that are not attached. Known to the controller.
#[pyfunction]
pub(crate) fn introductions(runtime: &PyRuntime, hosts: Vec<u32>) -> Vec<Option<Said>> {
    let all = runtime.0.introductions(&hosts).into_iter();
    all.map(|one| one.map(|said| (said.cpus, said.traits.labels().to_vec(), said.traits.resources().to_vec())))
        .collect()
}

/// Releases hosts: processes there have `within` seconds to end, besides those that the calls `ending` stop already. The call
/// completes when they are gone, at the latest after `limit` seconds. A whole mesh of hosts is stopped, a part is detached.
#[pyfunction]
pub(crate) fn release_hosts(
    runtime: &PyRuntime,
    py: Python<'_>,
    hosts: &PyRegion,
    ending: Vec<PyRef<'_, PyCall>>,
    within: f64,
    limit: f64,
    whole: bool,
) -> PyResult<PyCall> {
    let longest = Duration::from_secs(100_000);
    let (within, limit) = (duration(within)?.min(longest), duration(limit)?.min(longest));
    let runtime = &runtime.0;
    let ending = ending.iter().map(|one| Arc::clone(&one.call)).collect();
    let why = if whole { "its mesh of hosts was stopped" } else { "the script has detached it" };
    let region = hosts.inner();
    let call = leave(py, || runtime.release_hosts(region, ending, within, limit, why))?;
    Ok(PyCall::of(runtime, call, Target::Many(0, region.clone(), Placement::Agents)))
}

/// The name of a host, if it is known here.
#[pyfunction]
pub(crate) fn host_name(runtime: &PyRuntime, host: u32) -> Option<String> {
    runtime.0.host_called(host)
}

/// A host that serves jobs.
#[pyclass(name = "HostServer", module = "mesh_core._native", frozen)]
pub(crate) struct PyHost {
    host: Arc<Host>,
    told: Arc<Mutex<Vec<String>>>,
}

#[pymethods]
impl PyHost {
    /// Listens at `address`, if given, with the credentials in a folder.
    #[new]
    #[pyo3(signature = (address, *, credentials, name, labels, resources, python, env, scratch, once, options, standby=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, and called in one place")]
    fn new(
        py: Python<'_>,
        address: Option<String>,
        credentials: PathBuf,
        name: String,
        labels: Vec<(String, String)>,
        resources: Vec<(String, f64)>,
        python: Vec<OsString>,
        env: Vec<(OsString, OsString)>,
        scratch: PathBuf,
        once: bool,
        options: PyOptions,
        standby: Option<(u32, i32)>,
    ) -> PyResult<Self> {
        // SAFETY: the caller gives the descriptor away.
        let standby = standby.and_then(|(pid, fd)| Standby::new(pid, unsafe { OwnedFd::from_raw_fd(fd) }));
        let standby = Arc::new(Mutex::new(standby));
        let traits = Traits::new(labels, resources)
            .ok_or_else(|| PyValueError::new_err("labels or resources of the host are too many, or too long"))?;
        let runtime = options.read()?;
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let tell = Arc::clone(&told);
        let host = leave(py, || {
            let identity = load(&credentials, Role::Host)?;
            let options = HostOptions { name, traits, python, env, scratch, once, runtime, standby };
            let tell = Box::new(move |line: &str| {
                tell.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
            });
            Host::start(address.as_deref(), identity, options, tell)
        })?;
        Ok(Self { host, told })
    }

    /// Where it listens.
    #[getter]
    fn address(&self) -> Option<String> {
        self.host.addrs().first().map(ToString::to_string)
    }

    /// How many jobs it serves.
    #[getter]
    fn jobs(&self) -> usize {
        self.host.jobs()
    }

    /// Waits for the end of the host, at most `limit` seconds. Returns whether it ended, and what to tell people
    /// that is new since the last call.
    fn wait(&self, py: Python<'_>, limit: f64) -> PyResult<(bool, Vec<String>)> {
        let limit = end_limit(limit)?;
        let closed = outside(py, || self.host.wait(limit));
        Ok((closed, std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner))))
    }

    /// Offers the host to a controller that listens at `address`, on a separate thread, until the host is closed.
    fn dial_out(&self, address: String) -> PyResult<()> {
        // The thread would report the error once and retry forever.
        check(&address)?;
        let host = Arc::clone(&self.host);
        std::thread::Builder::new()
            .name("mesh-offer".to_owned())
            .spawn(move || host.dial_out(&address))
            .map(drop)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Tells all jobs that the host goes away in that many seconds, and why.
    fn leave(&self, py: Python<'_>, grace: f64, why: &str) -> PyResult<()> {
        let grace = duration(grace)?;
        outside(py, || self.host.leave(grace, why));
        Ok(())
    }

    /// Whether no job has processes here.
    #[getter]
    fn is_vacant(&self) -> bool {
        self.host.is_vacant()
    }

    /// Ends the host and everything that runs on it.
    fn close(&self, py: Python<'_>) {
        outside(py, || self.host.close());
    }
}
