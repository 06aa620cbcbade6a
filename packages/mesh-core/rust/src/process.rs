//! This process as the operating system sees it, and programs that it starts.

use crate::door::outside;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

/// Has the kernel kill this process when its parent ends; exits at once if its parent is no longer `parent`.
#[pyfunction]
pub(crate) fn die_with_parent(parent: u32) {
    mesh_runtime::die_with_parent(parent);
}

/// Makes this process exit with `status`, whatever status the interpreter ends with.
#[pyfunction]
pub(crate) fn exit_with(status: i32) {
    mesh_runtime::exit_with(status);
}

/// Sets the name of this process: `title` in `ps`, `short` in `top`.
#[pyfunction]
pub(crate) fn name_process(title: &str, short: &str) {
    mesh_runtime::name_process(title, short);
}

/// Makes orphaned descendants of this process its children.
#[pyfunction]
pub(crate) fn adopt_orphans() -> PyResult<()> {
    Ok(mesh_runtime::adopt_orphans()?)
}

/// Starts a program in its own session and returns its pid. `mark` is the soft limit, to which the pid is added, and
/// the hard one.
#[pyfunction]
pub(crate) fn start_marked(
    py: Python<'_>,
    argv: Vec<OsString>,
    env: Option<Vec<(OsString, OsString)>>,
    cwd: Option<PathBuf>,
    mark: Option<(u64, u64)>,
    stdio: [i32; 3],
) -> PyResult<u32> {
    let name = argv.first().cloned();
    let program = mesh_runtime::Program { argv, env, cwd, mark };
    // SAFETY: the caller's three descriptors stay open during this call.
    let stdio = stdio.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
    outside(py, || mesh_runtime::start_marked(program, stdio)).map_err(|error| {
        let text = error.to_string();
        // The interpreter chooses the class by the number, and adds the number itself.
        let said = text.split(" (os error").next().unwrap_or_default().to_owned();
        PyOSError::new_err((error.raw_os_error(), said, name))
    })
}
