//! Promises of mesh-core, finished through its C interface: two wheels share no Rust types.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ptr::NonNull;

const VERSION: u32 = 1;

/// `struct mesh_promise` of `mesh_core/promise.h`.
#[repr(C)]
struct Raw {
    version: u32,
    finish: unsafe extern "C" fn(*const Raw, i32) -> i32,
    retain: unsafe extern "C" fn(*const Raw),
    release: unsafe extern "C" fn(*const Raw),
}

/// A promise made by this process. Dropped without an outcome, it is broken.
pub(crate) struct NativePromise(NonNull<Raw>);

// SAFETY: all three functions may be called on any thread, as the header says.
unsafe impl Send for NativePromise {}

impl NativePromise {
    pub(crate) fn of(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        let raw = capsule.pointer_checked(Some(c"mesh_core.promise"))?.cast::<Raw>();
        // SAFETY: a capsule of this name points to a structure that begins with the version, in every version.
        let version = unsafe { raw.cast::<u32>().read() };
        if version != VERSION {
            return Err(PyRuntimeError::new_err(format!(
                "mesh-core speaks version {version} of its interface for promises, and mesh-rdma version {VERSION}. \
                 Install versions of both that belong together."
            )));
        }
        // SAFETY: of this version; the capsule keeps it until we do.
        unsafe { (raw.as_ref().retain)(raw.as_ptr()) };
        Ok(Self(raw))
    }

    pub(crate) fn finish(&self) {
        // SAFETY: retained in `of`. An earlier outcome is no error: the promise was cancelled.
        let _ = unsafe { (self.0.as_ref().finish)(self.0.as_ptr(), 0) };
    }
}

impl Drop for NativePromise {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        unsafe { (self.0.as_ref().release)(self.0.as_ptr()) };
    }
}
