//! libucp, opened at run time: the functions that we use, and the leading fields of its structures.
//!
//! One declaration serves 1.13 and later: each structure has a mask that says which fields are set, so fields that
//! later versions append are ignored.

use crate::error::TransferError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;

pub(super) type Status = i8;
pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
pub(super) const BUSY: Status = -15;
/// The version whose interface is declared here.
const API: (c_uint, c_uint) = (1, 13);
const FEATURES: u64 = RMA | WAKEUP;
const RMA: u64 = 1 << 1;
const WAKEUP: u64 = 1 << 4;

pub(super) type Handle = *mut c_void;

#[repr(C)]
pub(super) struct Params {
    pub(super) mask: u64,
    pub(super) features: u64,
    request_size: usize,
    request_init: OnRequest,
    request_cleanup: usize,
    tag_sender_mask: u64,
    pub(super) mt_workers_shared: c_int,
    rest: [u64; 16],
}

pub(super) type OnRequest = unsafe extern "C" fn(*mut c_void);

impl Params {
    /// One-sided operations, several workers on several threads, each with a descriptor to sleep on. UCX calls
    /// `on_request` with the end of each request when it is made.
    pub(super) fn new(on_request: OnRequest) -> Self {
        Self {
            mask: 1 | 1 << 2 | 1 << 5,
            features: FEATURES,
            request_size: 0,
            request_init: on_request,
            request_cleanup: 0,
            tag_sender_mask: 0,
            mt_workers_shared: 1,
            rest: [0; 16],
        }
    }
}

/// What a context says about itself.
#[repr(C)]
pub(super) struct ContextAttributes {
    mask: u64,
    /// The length of a request.
    pub(super) request_size: usize,
    rest: [u64; 16],
}

impl ContextAttributes {
    pub(super) fn new() -> Self {
        Self { mask: 1, request_size: 0, rest: [0; 16] }
    }
}

#[repr(C)]
pub(super) struct WorkerParams {
    mask: u64,
    thread_mode: c_int,
    rest: [u64; 48],
}

impl WorkerParams {
    /// Used by one thread at a time.
    pub(super) fn new() -> Self {
        Self { mask: 1, thread_mode: 1, rest: [0; 48] }
    }
}

#[repr(C)]
pub(super) struct MapParams {
    mask: u64,
    address: u64,
    length: usize,
    rest: [u64; 16],
}

impl MapParams {
    pub(super) fn new(address: u64, length: usize) -> Self {
        Self { mask: 0b11, address, length, rest: [0; 16] }
    }
}

pub(super) type OnError = unsafe extern "C" fn(*mut c_void, Handle, Status);

#[repr(C)]
pub(super) struct EndpointParams {
    mask: u64,
    address: *const c_void,
    error_mode: c_int,
    on_error: OnError,
    on_error_argument: *mut c_void,
    rest: [u64; 32],
}

impl EndpointParams {
    /// Connects to this address; on a failure, operations under way end with an error, and `on_error` is called.
    pub(super) fn new(address: *const c_void, on_error: OnError, on_error_argument: *mut c_void) -> Self {
        Self { mask: 0b111, address, error_mode: 1, on_error, on_error_argument, rest: [0; 32] }
    }
}

#[repr(C)]
pub(super) struct RequestParams {
    mask: u32,
    flags: u32,
    rest: [u64; 24],
}

impl RequestParams {
    pub(super) fn new() -> Self {
        Self { mask: 0, flags: 0, rest: [0; 24] }
    }

    /// For closing an endpoint: operations under way end with an error.
    pub(super) fn forced() -> Self {
        Self { mask: 1 << 4, flags: 1, rest: [0; 24] }
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// # Safety
            /// The library must be libucp.
            unsafe fn find(library: Handle) -> Result<Self, TransferError> {
                Ok(Self {
                    $($name: {
                        let found = symbol(library, concat!(stringify!($name), "\0"))?;
                        // SAFETY: the function of that name, which has had this type since version 1.13.
                        unsafe { std::mem::transmute::<Handle, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    ucp_get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint);
    ucp_config_read: fn(*const c_char, *const c_char, *mut Handle) -> Status;
    ucp_config_modify: fn(Handle, *const c_char, *const c_char) -> Status;
    ucp_config_release: fn(Handle);
    ucp_init_version: fn(c_uint, c_uint, *const Params, Handle, *mut Handle) -> Status;
    ucp_context_query: fn(Handle, *mut ContextAttributes) -> Status;
    ucp_cleanup: fn(Handle);
    ucp_worker_create: fn(Handle, *const WorkerParams, *mut Handle) -> Status;
    ucp_worker_destroy: fn(Handle);
    ucp_worker_get_address: fn(Handle, *mut *mut c_void, *mut usize) -> Status;
    ucp_worker_release_address: fn(Handle, *mut c_void);
    ucp_worker_get_efd: fn(Handle, *mut c_int) -> Status;
    ucp_worker_arm: fn(Handle) -> Status;
    ucp_worker_progress: fn(Handle) -> c_uint;
    ucp_mem_map: fn(Handle, *const MapParams, *mut Handle) -> Status;
    ucp_mem_unmap: fn(Handle, Handle) -> Status;
    ucp_rkey_pack: fn(Handle, Handle, *mut *mut c_void, *mut usize) -> Status;
    ucp_rkey_buffer_release: fn(*mut c_void);
    ucp_ep_create: fn(Handle, *const EndpointParams, *mut Handle) -> Status;
    ucp_ep_close_nbx: fn(Handle, *const RequestParams) -> Handle;
    ucp_ep_flush_nbx: fn(Handle, *const RequestParams) -> Handle;
    ucp_ep_print_info: fn(Handle, *mut libc::FILE);
    ucp_ep_rkey_unpack: fn(Handle, *const c_void, *mut Handle) -> Status;
    ucp_rkey_destroy: fn(Handle);
    ucp_get_nbx: fn(Handle, *mut c_void, usize, u64, Handle, *const RequestParams) -> Handle;
    ucp_put_nbx: fn(Handle, *const c_void, usize, u64, Handle, *const RequestParams) -> Handle;
    ucp_request_check_status: fn(Handle) -> Status;
    ucp_request_free: fn(Handle);
}

/// The library, open until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) call: Functions,
    status_string: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Library {
    /// Opens the first of these that works.
    pub(super) fn open(places: &[String]) -> Result<Self, TransferError> {
        let mut reasons = Vec::new();
        for place in places {
            match Self::at(place) {
                Ok(found) => return Ok(found),
                Err(error) => reasons.push(format!("{place}: {error}")),
            }
        }
        Err(TransferError::transport(format!("cannot open libucp: {}", reasons.join("; "))))
    }

    fn at(place: &str) -> Result<Self, TransferError> {
        // Open its dependencies first, from the same folder: others with these names would not match it.
        let folder = Path::new(place).parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder {
            for name in ["libucs.so.0", "libucm.so.0", "libuct.so.0"] {
                let path = folder.join(name);
                if path.exists() {
                    open(&path.to_string_lossy())?;
                }
            }
        }
        let library = open(place)?;
        // SAFETY: the library is libucp, or lacks its functions.
        let call = unsafe { Functions::find(library)? };
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three numbers of this frame.
        unsafe { (call.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut release) };
        if (major, minor) < API || major != API.0 {
            return Err(TransferError::transport(format!(
                "it is version {major}.{minor}.{release}; 1.13 or a later 1.x is needed"
            )));
        }
        // SAFETY: a function of libucs, which libucp needs, with this type in all versions.
        let status_string = unsafe {
            std::mem::transmute::<Handle, unsafe extern "C" fn(Status) -> *const c_char>(symbol(
                library,
                "ucs_status_string\0",
            )?)
        };
        tame(library);
        Ok(Self { call, status_string })
    }

    pub(super) const fn api() -> (c_uint, c_uint) {
        API
    }

    /// What a status means, in UCX's words.
    pub(super) fn say(&self, status: Status) -> String {
        // SAFETY: returns a permanent text, whatever the number.
        let text = unsafe { (self.status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: it ends with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Turns a status into a result that says what failed, and why.
    pub(super) fn check(&self, what: &str, status: Status) -> Result<(), TransferError> {
        if status == OK {
            return Ok(());
        }
        Err(TransferError::transport(format!("UCX cannot {what}: {}", self.say(status))))
    }
}

/// Splits the result of a function that returns either a request or, if there is none, a status.
pub(super) fn split(found: Handle) -> Result<Handle, Status> {
    let number = found as isize;
    // Statuses are -100 to 0, as pointers.
    if (-100..=0).contains(&number) { Err(number as Status) } else { Ok(found) }
}

/// Unless the user has set otherwise, keeps existing signal handlers in force and UCX quiet, since it prints to the
/// program's standard output. Failures are returned as statuses and end up in our errors.
fn tame(library: Handle) {
    if std::env::var_os("UCX_HANDLE_ERRORS").is_none()
        && let Ok(found) = symbol(library, "ucs_debug_disable_signals\0")
    {
        // SAFETY: a function without arguments and result.
        let disable = unsafe { std::mem::transmute::<Handle, unsafe extern "C" fn()>(found) };
        // SAFETY: its library is open.
        unsafe { disable() };
    }
    if std::env::var_os("UCX_LOG_LEVEL").is_none()
        && let Ok(found) = symbol(library, "ucs_global_opts_set_value\0")
    {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char) -> Status;
        // SAFETY: it has this type in all versions.
        let set = unsafe { std::mem::transmute::<Handle, Set>(found) };
        // SAFETY: two constant texts. If refused, UCX prints more than needed.
        let _ = unsafe { set(c"LOG_LEVEL".as_ptr(), c"fatal".as_ptr()) };
    }
}

fn open(path: &str) -> Result<Handle, TransferError> {
    let name = CString::new(path).map_err(|_| TransferError::transport("its path contains a NUL byte"))?;
    // SAFETY: opening a library runs its initialisers, as the user who switched UCX on wants.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_GLOBAL) };
    if library.is_null() { Err(TransferError::transport(last_error())) } else { Ok(library) }
}

/// The name must end with a zero.
fn symbol(library: Handle, name: &str) -> Result<Handle, TransferError> {
    // SAFETY: an open library, and a text that ends with a zero.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    if found.is_null() { Err(TransferError::transport(last_error())) } else { Ok(found) }
}

fn last_error() -> String {
    // SAFETY: the text of this thread's last error, copied before the next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "it has no such function".to_owned();
    }
    // SAFETY: it ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
