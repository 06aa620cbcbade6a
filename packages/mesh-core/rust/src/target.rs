//! Who a message is for, and on which hosts they are.

use crate::topology::PyRegion;
use mesh_proto::{ActorId, Joined, Piece, Placement, ProcAddr, Target};
use mesh_topology::Region;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::Arc;

/// The mesh, rank and host of a process.
pub(crate) type Addr = (u64, u32, u32);

pub(crate) fn addr_tuple(addr: ProcAddr) -> Addr {
    (addr.mesh, addr.rank, addr.host)
}

pub(crate) fn proc_addr((mesh, rank, host): Addr) -> ProcAddr {
    ProcAddr { mesh, rank, host }
}

/// The host of each rank of a mesh.
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
            return Err(PyValueError::new_err("a mesh must have at least one rank on at least one host"));
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

    /// The number of the host, if there is only one.
    #[getter]
    fn only(&self) -> Option<u32> {
        self.0.only()
    }

    /// The numbers of the hosts, in the order of the ranks; empty for the mesh of agents.
    fn hosts(&self) -> Vec<u32> {
        match &self.0 {
            Placement::On(host) => vec![*host],
            Placement::Agents => Vec::new(),
            Placement::Spread(spread) => spread.hosts.iter().filter_map(|host| u32::try_from(host).ok()).collect(),
        }
    }

    /// The ranks on a host, for a mesh of `size`: the first, and the one after the last.
    fn ranks_on(&self, host: u32, size: usize) -> (usize, usize) {
        let ranks = self.0.ranks_on(host, size);
        (ranks.start, ranks.end)
    }

    /// For pickling.
    fn to_wire<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_wire())
    }

    /// Undoes [`Self::to_wire`].
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
    pub(crate) target: Arc<Target>,
    /// The dimensions of what is messaged, as sent to receivers: `hosts=2,gpus=8`.
    pub(crate) shape: String,
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
    /// One process, messaged as such, or as a `view` of one rank, which may still have dimensions.
    #[staticmethod]
    #[pyo3(signature = (mesh, rank, placement, view=None))]
    fn one(mesh: u64, rank: u32, placement: &PyPlacement, view: Option<&PyRegion>) -> Self {
        let target = Arc::new(Target::One(placement.0.addr(mesh, rank as usize)));
        let shape = view.map(|view| Self::shape_of(view.inner())).unwrap_or_default();
        Self { target, shape }
    }

    /// The ranks of a region of a mesh.
    #[staticmethod]
    fn many(mesh: u64, region: &PyRegion, placement: &PyPlacement) -> Self {
        let region = region.inner();
        let target = Arc::new(Target::Many(mesh, region.clone(), placement.0.clone()));
        Self { target, shape: Self::shape_of(region) }
    }

    /// Joins other targets into a view. Each comes with the place of its first receiver, and the actor's id if it differs
    /// there. Places without a target are empty.
    #[staticmethod]
    fn joined(pieces: Vec<(usize, PyRef<'_, Self>, Option<ActorId>)>, view: &PyRegion) -> Self {
        let mut flat = Vec::with_capacity(pieces.len());
        for (first, target, actor) in pieces {
            for piece in target.target.pieces().iter() {
                flat.push(Piece {
                    first: first + piece.first,
                    target: piece.target.clone(),
                    // An actor id that the target itself gives takes precedence.
                    actor: piece.actor.or(actor),
                });
            }
        }
        let region = view.inner();
        Self {
            target: Arc::new(Target::Joined(Arc::new(Joined::new(flat, region.len())))),
            shape: Self::shape_of(region),
        }
    }

    fn __len__(&self) -> usize {
        self.target.len()
    }
}
