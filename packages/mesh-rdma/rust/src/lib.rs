//! The Python face of mesh-transfer: conversions, leaving the interpreter, errors; no decisions.

mod action;
mod boxes;
mod bypass;
mod delta;
mod door;
mod engine;
mod handle;
mod memory;
mod operation;
mod promise;
mod transport;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::bypass::bypass_of;
    #[pymodule_export]
    use crate::delta::{apply_changes, find_changes};

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        m.add("QUICK", mesh_transfer::QUICK)?;
        m.add("ERROR_KINDS", mesh_transfer::ErrorKind::ALL.map(mesh_transfer::ErrorKind::word).to_vec())?;
        m.add_class::<action::PyAction>()?;
        m.add_class::<boxes::PyBoxes>()?;
        m.add_class::<engine::PyEngine>()?;
        m.add_class::<engine::PyExport>()?;
        m.add_class::<engine::PyTie>()?;
        m.add_class::<handle::PyHandle>()?;
        m.add_class::<memory::PyBlock>()?;
        m.add_class::<memory::PyMemory>()?;
        m.add_class::<operation::PyOperation>()?;
        m.add_class::<transport::PyWatch>()?;
        m.add_class::<transport::PyWindow>()?;
        Ok(())
    }
}
