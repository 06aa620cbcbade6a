//! Namespaces, mounts and privileges: what isolates a process from others.

use pyo3::prelude::*;
use std::ffi::CString;
use std::os::fd::BorrowedFd;

/// Moves this process into new namespaces. A new pid namespace applies to its children.
#[pyfunction]
pub(crate) fn unshare(kinds: i32) -> PyResult<()> {
    Ok(mesh_runtime::unshare(kinds)?)
}

/// Makes children of this process start in a pid namespace.
#[pyfunction]
pub(crate) fn beget_in(pids: i32) -> PyResult<()> {
    // SAFETY: the caller's descriptor stays open during this call.
    Ok(mesh_runtime::beget_in(unsafe { BorrowedFd::borrow_raw(pids) })?)
}

/// `mount(2)`.
#[pyfunction]
pub(crate) fn mount(
    source: Option<CString>,
    target: CString,
    kind: Option<CString>,
    flags: u64,
    data: Option<CString>,
) -> PyResult<()> {
    Ok(mesh_runtime::mount(source.as_deref(), &target, kind.as_deref(), flags, data.as_deref())?)
}

/// Adds and removes attributes of a mount, optionally also of all mounts below it.
#[pyfunction]
pub(crate) fn change_mount(path: CString, add: u64, remove: u64, below: bool) -> PyResult<()> {
    Ok(mesh_runtime::change_mount(&path, add, remove, below)?)
}

/// Gives up all capabilities, and the means to gain any by running a program.
#[pyfunction]
pub(crate) fn give_up_privileges() -> PyResult<()> {
    Ok(mesh_runtime::give_up_privileges()?)
}

/// Leaves the session's keyring for an empty one that nobody can use.
#[pyfunction]
pub(crate) fn leave_keyring() -> PyResult<()> {
    Ok(mesh_runtime::leave_keyring()?)
}

/// Has the kernel refuse sockets that a network namespace does not keep apart, such as those to the host of a virtual machine, and
/// changes of the first process of a namespace of processes, such as of its priority; in any case keys and new user namespaces.
#[pyfunction]
pub(crate) fn filter_calls(sockets: bool, first_process: bool) -> PyResult<()> {
    Ok(mesh_runtime::filter_calls(sockets, first_process)?)
}

/// Sets whether other processes of the user may inspect this one.
#[pyfunction]
pub(crate) fn let_look(allowed: bool) -> PyResult<()> {
    Ok(mesh_runtime::let_look(allowed)?)
}

/// Has the kernel kill this process when its parent ends. The parent may be in another pid namespace.
#[pyfunction]
pub(crate) fn ask_to_die_with_parent() -> PyResult<()> {
    Ok(mesh_runtime::ask_to_die_with_parent()?)
}
