//! Memory of messages as DLPack tensors, from which array libraries make theirs: each has memory of its own or keeps its block.

use crate::block::COPIED;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView, PyTuple};
use std::ffi::{CStr, c_void};

/// What a capsule is called that nobody has taken the tensor of.
const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;

/// `DLTensor`, see dlpack.h.
#[repr(C)]
struct RawTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, see dlpack.h.
#[repr(C)]
struct RawManaged {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut RawManaged)>,
}

/// The memory of a tensor. Neither field is read: they are where the tensor's pointer points to.
enum Memory {
    /// In words, so that it is aligned.
    Own {
        _words: Vec<u128>,
    },
    Of {
        object: Py<PyAny>,
    },
}

/// A tensor with what its pointers refer to.
#[repr(C)]
struct Managed {
    raw: RawManaged,
    /// Lengths, then strides.
    dims: Vec<i64>,
    memory: Option<Memory>,
}

/// # Safety
/// `raw` came from [`dlpack`] and is not used again.
unsafe extern "C" fn delete(raw: *mut RawManaged) {
    // SAFETY: the first field of a `Managed` that was boxed.
    let mut managed = unsafe { Box::from_raw(raw.cast::<Managed>()) };
    if let Some(Memory::Of { object }) = managed.memory.take() {
        // Its library frees a tensor on any thread, and while the interpreter ends. Then the memory stays until the process does.
        let mut object = Some(object);
        let _ = Python::try_attach(|_| drop(object.take()));
        std::mem::forget(object);
    }
}

/// # Safety
/// Called by the interpreter with a capsule of [`dlpack`].
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: attached. Under this name nobody has taken the tensor; otherwise it is its taker's.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

fn wrong(what: &str) -> PyErr {
    PyValueError::new_err(format!("a tensor in a message cannot be rebuilt: {what}"))
}

/// How many elements a tensor of these lengths and strides reaches over.
fn reach(lengths: &[i64], strides: &[i64]) -> Option<usize> {
    if lengths.iter().any(|length| *length < 0) {
        return None;
    }
    if lengths.contains(&0) {
        return Some(0);
    }
    let mut last = 0_i64;
    for (length, stride) in lengths.iter().zip(strides) {
        let stride = Some(*stride).filter(|stride| *stride >= 0)?;
        last = last.checked_add((length - 1).checked_mul(stride)?)?;
    }
    usize::try_from(last).ok()?.checked_add(1)
}

/// Fills in the strides of contiguous elements.
fn contiguous(dims: &mut [i64], ndim: usize) {
    let mut step = 1_i64;
    for i in (0..ndim).rev() {
        dims[ndim + i] = step;
        step = step.saturating_mul(dims[i].max(1));
    }
}

/// Returns a capsule with a tensor of elements that begin at `at` in `data`, which is kept unless it is copied: bytes, what cannot be
/// written to, and what is small. `kind` is DLPack's code of the type of element, and its bits.
#[pyfunction]
#[pyo3(signature = (data, at, kind, shape, strides=None))]
pub(crate) fn dlpack<'py>(
    data: &Bound<'py, PyAny>,
    at: usize,
    kind: u16,
    shape: &Bound<'py, PyTuple>,
    strides: Option<&Bound<'py, PyTuple>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = data.py();
    let ndim = shape.len();
    let [bits, code] = kind.to_le_bytes();
    let mut dims = vec![0; 2 * ndim];
    for (i, length) in shape.iter().enumerate() {
        dims[i] = length.extract()?;
    }
    match strides {
        None => contiguous(&mut dims, ndim),
        Some(strides) if strides.len() == ndim => {
            for (i, stride) in strides.iter().enumerate() {
                dims[ndim + i] = stride.extract()?;
            }
        }
        Some(_) => return Err(wrong("it has not as many strides as dimensions")),
    }
    let (lengths, steps) = dims.split_at(ndim);
    let len = reach(lengths, steps)
        .and_then(|count| count.checked_mul(usize::from(bits.div_ceil(8))))
        .ok_or_else(|| wrong("its shape or its strides are impossible"))?;
    let find = |base: *mut u8, room: usize| {
        let fits = at.checked_add(len).is_some_and(|end| end <= room);
        // SAFETY: inside the memory, or one past its end.
        if fits { Ok(unsafe { base.add(at) }) } else { Err(wrong("its elements are not in the message")) }
    };
    let (place, memory) = if let Ok(bytes) = data.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        copy(find(bytes.as_ptr().cast_mut(), bytes.len())?, len)
    } else {
        let view = match data.cast::<PyMemoryView>() {
            Ok(view) => view.clone(),
            Err(_) => PyMemoryView::from(data)?,
        };
        let mut raw = ffi::Py_buffer::new();
        // SAFETY: attached, and `raw` is valid for writing.
        if unsafe { ffi::PyObject_GetBuffer(view.as_ptr(), &raw mut raw, ffi::PyBUF_SIMPLE) } == -1 {
            return Err(PyErr::fetch(py));
        }
        let found = find(raw.buf.cast(), usize::try_from(raw.len).unwrap_or_default());
        let copied = len < COPIED || raw.readonly != 0;
        let made = found.map(|place| {
            if copied { copy(place, len) } else { (place, Memory::Of { object: view.clone().into_any().unbind() }) }
        });
        // SAFETY: filled above, and released once. The memoryview itself keeps the memory in place.
        unsafe { ffi::PyBuffer_Release(&raw mut raw) };
        made?
    };
    let ndim = i32::try_from(ndim).map_err(|_| wrong("it has too many dimensions"))?;
    let tensor = RawTensor {
        data: place.cast(),
        device_type: CPU,
        device_id: 0,
        ndim,
        code,
        bits,
        lanes: 1,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let raw = RawManaged { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let mut managed = Box::new(Managed { raw, dims, memory: Some(memory) });
    managed.raw.tensor.shape = managed.dims.as_mut_ptr();
    managed.raw.tensor.strides = managed.dims.as_mut_ptr().wrapping_add(managed.dims.len() / 2);
    let managed = Box::into_raw(managed);
    // SAFETY: attached; the pointer is not null, and the name lives as long as the process.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(drop_capsule)) };
    // SAFETY: a new reference, or null with an error set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: made above, and in no capsule.
        unsafe { delete(managed.cast()) };
    }
    capsule
}

/// Copies elements to memory of their own.
fn copy(from: *const u8, len: usize) -> (*mut u8, Memory) {
    let mut words = Vec::<u128>::with_capacity(len.div_ceil(size_of::<u128>()).max(1));
    let to = words.as_mut_ptr().cast::<u8>();
    // SAFETY: both are at least as long, and the new one is nobody else's.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    (to, Memory::Own { _words: words })
}
