//! The right to finish a promise, and the handle by which native code of other extensions finishes it.

use mesh_runtime::{Fate, Finisher};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;

/// The right to finish a promise. When the last reference is dropped, including those of native code, the promise is broken.
#[pyclass(name = "Finisher", module = "mesh_core._native", frozen)]
pub(crate) struct PyFinisher(Arc<Finisher>);

impl PyFinisher {
    pub(crate) fn new(finisher: Arc<Finisher>) -> Self {
        Self(finisher)
    }

    pub(crate) fn inner(&self) -> &Arc<Finisher> {
        &self.0
    }
}

/// The handle by which native code of other extensions finishes a promise. The fields up to `release` are public: the
/// documentation describes them in C.
#[repr(C)]
struct Handle {
    version: u32,
    finish: unsafe extern "C" fn(*const Handle, i32) -> i32,
    retain: unsafe extern "C" fn(*const Handle),
    release: unsafe extern "C" fn(*const Handle),
    finisher: Arc<Finisher>,
}

const VERSION: u32 = 1;
const NAME: &CStr = c"mesh_core.promise";

const FINISHED: i32 = 0;
const HAD_AN_OUTCOME: i32 = 1;
const IN_A_FORKED_COPY: i32 = -1;

unsafe extern "C" fn finish(handle: *const Handle, status: i32) -> i32 {
    // SAFETY: the caller holds a reference to the handle, which keeps it alive and unchanged.
    let finisher = unsafe { &(*handle).finisher };
    if finisher.is_copy() {
        IN_A_FORKED_COPY
    } else if finisher.finish(Fate::Status(status)) {
        FINISHED
    } else {
        HAD_AN_OUTCOME
    }
}

unsafe extern "C" fn retain(handle: *const Handle) {
    // SAFETY: handles come from `Arc::into_raw`, and the caller holds a reference.
    unsafe { Arc::increment_strong_count(handle) };
}

unsafe extern "C" fn release(handle: *const Handle) {
    // SAFETY: handles come from `Arc::into_raw`, and the caller gives away its own reference.
    unsafe { Arc::decrement_strong_count(handle) };
}

unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that is being destroyed is valid, and only capsules with this name have this destructor.
    let handle = unsafe { ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
    if !handle.is_null() {
        // SAFETY: the capsule has held one reference since it was created.
        unsafe { release(handle.cast_const().cast()) };
    }
}

#[pymethods]
impl PyFinisher {
    /// Returns a capsule with a handle for native code.
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let handle = Arc::new(Handle { version: VERSION, finish, retain, release, finisher: Arc::clone(&self.0) });
        let raw = Arc::into_raw(handle);
        let Some(pointer) = NonNull::new(raw.cast_mut().cast()) else {
            return Err(PyMemoryError::new_err("out of memory for a handle of a promise"));
        };
        // SAFETY: the pointer is valid until its last reference is dropped. The capsule holds one, released by `drop_capsule` on
        // any thread.
        let made = unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, NAME, Some(drop_capsule)) };
        if made.is_err() {
            // SAFETY: no capsule took the reference.
            unsafe { release(raw) };
        }
        made
    }
}
