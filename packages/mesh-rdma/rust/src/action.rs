//! Many operations submitted together.

use crate::door::raise;
use crate::handle::PyHandle;
use crate::memory::PyMemory;
use mesh_transfer::{Op, Ops, Work};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// Operations, and the objects that own their memory.
#[derive(Default)]
pub(crate) struct List {
    ops: Vec<Op>,
    keep: Vec<Py<PyAny>>,
}

/// The list at the time of submission.
#[derive(Clone)]
pub(crate) struct Listed(pub(crate) Arc<List>);

impl Ops for Listed {
    fn ops(&self) -> &[Op] {
        &self.0.ops
    }
}

/// Operations that are submitted together, any number of times.
#[pyclass(name = "Action", module = "mesh_rdma._native", frozen)]
#[derive(Default)]
pub(crate) struct PyAction(Mutex<Arc<List>>);

impl PyAction {
    pub(crate) fn listed(&self) -> Listed {
        Listed(Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn add(&self, py: Python<'_>, handle: &PyHandle, work: Work, keep: [Option<&Py<PyAny>>; 2]) -> PyResult<()> {
        let op = Op::new(&handle.0, work).map_err(|error| raise(py, &error))?;
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if Arc::get_mut(&mut list).is_none() {
            // A submission is under way: leave its list unchanged.
            let keep = list.keep.iter().map(|each| each.clone_ref(py)).collect();
            *list = Arc::new(List { ops: list.ops.clone(), keep });
        }
        if let Some(list) = Arc::get_mut(&mut list) {
            list.ops.push(op);
            list.keep.extend(keep.into_iter().flatten().map(|each| each.clone_ref(py)));
        }
        Ok(())
    }
}

#[pymethods]
impl PyAction {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __len__(&self) -> usize {
        self.listed().0.ops.len()
    }

    /// `keep` keeps the remote memory offered, if that is this process's own.
    fn read(&self, py: Python<'_>, handle: &PyHandle, memory: &PyMemory, offset: u64, keep: Py<PyAny>) -> PyResult<()> {
        let work = Work::Read { local: memory.segments.clone(), offset };
        self.add(py, handle, work, [Some(&memory.keep), Some(&keep)])
    }

    fn write(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        memory: &PyMemory,
        offset: u64,
        keep: Py<PyAny>,
    ) -> PyResult<()> {
        let work = Work::Write { local: memory.segments.clone(), offset };
        self.add(py, handle, work, [Some(&memory.keep), Some(&keep)])
    }

    fn fetch_add(&self, py: Python<'_>, handle: &PyHandle, value: u64, offset: u64, keep: Py<PyAny>) -> PyResult<()> {
        self.add(py, handle, Work::FetchAdd { offset, value }, [None, Some(&keep)])
    }

    fn compare_and_swap(
        &self,
        py: Python<'_>,
        handle: &PyHandle,
        numbers: (u64, u64),
        offset: u64,
        keep: Py<PyAny>,
    ) -> PyResult<()> {
        let (expected, desired) = numbers;
        self.add(py, handle, Work::CompareAndSwap { offset, expected, desired }, [None, Some(&keep)])
    }
}
