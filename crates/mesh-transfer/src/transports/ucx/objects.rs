//! UCX objects and their destruction: contexts, workers, endpoints, registered memory and keys.

use super::library::{
    BUSY, ContextAttributes, EndpointParams, Handle, IN_PROGRESS, Library, MapParams, OK, Params, RequestParams,
    Status, WorkerParams, split,
};
use crate::error::TransferError;
use crate::segments::Segment;
use std::ffi::{CStr, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long requests may take to end while their endpoint is closed.
const CLOSING: Duration = Duration::from_secs(2);
/// An endpoint that reports failures accepts only transports that can do so: shared memory if configured to, and `cma`
/// if it claims that it can revoke keys, which our leases do for it (LSE-1). Version 1.13 knows the first of these
/// settings, later ones the others.
const SETTINGS: [&CStr; 4] =
    [c"MM_ERROR_HANDLING", c"POSIX_ERROR_HANDLING", c"SYSV_ERROR_HANDLING", c"CMA_MEMORY_INVALIDATE"];

/// One for each process. Several threads use it at once, as UCX was told.
#[derive(Debug)]
pub(super) struct Context {
    library: Arc<Library>,
    raw: Handle,
}

// SAFETY: made with `mt_workers_shared`: UCX locks what workers of several threads share.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Configured by the environment (`UCX_*`) and UCX's own files.
    pub(super) fn new(library: Arc<Library>) -> Result<Self, TransferError> {
        let (mut config, mut raw) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: without prefix and file; the result is of this frame.
        let status = unsafe { (library.call.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
        library.check("read its settings (UCX_*)", status)?;
        let is_users = |name: &CStr| std::env::var_os(format!("UCX_{}", name.to_string_lossy())).is_some();
        // What the user has set is not changed.
        for name in SETTINGS.into_iter().filter(|name| !is_users(name)) {
            // SAFETY: two constant texts. A version that does not know the setting works without.
            let _ = unsafe { (library.call.ucp_config_modify)(config, name.as_ptr(), c"y".as_ptr()) };
        }
        if !is_users(c"TLS") {
            // UCX-5. If UCX has nothing else, reaching an owner fails with an error.
            // SAFETY: as above.
            let _ = unsafe { (library.call.ucp_config_modify)(config, c"TLS".as_ptr(), c"^tcp".as_ptr()) };
        }
        let (major, minor) = Library::api();
        let params = Params::new(clear);
        // SAFETY: all of this frame; the configuration is released once.
        let status = unsafe {
            let status = (library.call.ucp_init_version)(major, minor, &raw const params, config, &raw mut raw);
            (library.call.ucp_config_release)(config);
            status
        };
        library.check("start with the settings of the environment (UCX_*)", status)?;
        let (made, mut attributes) = (Self { library, raw }, ContextAttributes::new());
        // SAFETY: all of this frame.
        let status = unsafe { (made.library.call.ucp_context_query)(raw, &raw mut attributes) };
        made.library.check("say how long a request is", status)?;
        REQUEST.store(attributes.request_size, Ordering::SeqCst);
        Ok(made)
    }

    pub(super) fn library(&self) -> &Arc<Library> {
        &self.library
    }
}

/// The length of the library's requests. It is the same for all contexts of a library, and a process opens only one.
static REQUEST: AtomicUsize = AtomicUsize::new(0);

/// UCX makes requests without setting all of their bytes (UCX-6). When a worker is destroyed, UCX drops answers that it
/// could not send, and looks at their data type, which was never set: it would follow whatever was in that memory
/// before as pointers. Zeros are harmless.
///
/// # Safety
/// UCX calls it with the end of a request that it has not yet used.
unsafe extern "C" fn clear(end: *mut c_void) {
    let len = REQUEST.load(Ordering::SeqCst);
    // SAFETY: a request lies before its end, as UCX promises to those who allocate their own requests.
    unsafe { std::ptr::write_bytes(end.cast::<u8>().sub(len), 0, len) };
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from it holds it.
        unsafe { (self.library.call.ucp_cleanup)(self.raw) };
    }
}

/// Used by one thread at a time.
#[derive(Debug)]
pub(super) struct Worker {
    context: Arc<Context>,
    raw: Handle,
    efd: RawFd,
}

// SAFETY: made for threads that use it in turn, which `!Sync` enforces.
unsafe impl Send for Worker {}

impl Worker {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, TransferError> {
        let (library, params, mut raw) = (context.library(), WorkerParams::new(), std::ptr::null_mut());
        // SAFETY: all of this frame.
        let status = unsafe { (library.call.ucp_worker_create)(context.raw, &raw const params, &raw mut raw) };
        library.check("make a worker", status)?;
        let mut made = Self { context: Arc::clone(context), raw, efd: -1 };
        // SAFETY: as above.
        let status = unsafe { (library.call.ucp_worker_get_efd)(raw, &raw mut made.efd) };
        library.check("sleep until there is something to do; leave out of UCX_TLS what cannot", status)?;
        Ok(made)
    }

    /// Where others reach it.
    pub(super) fn address(&self) -> Result<Vec<u8>, TransferError> {
        let library = self.context.library();
        let (mut address, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: all of this frame.
        let status = unsafe { (library.call.ucp_worker_get_address)(self.raw, &raw mut address, &raw mut len) };
        library.check("tell a worker's address", status)?;
        // SAFETY: `len` bytes, which are UCX's until released.
        let copied = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: released once.
        unsafe { (library.call.ucp_worker_release_address)(self.raw, address) };
        Ok(copied)
    }

    /// Does pending work; returns whether there was any.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: by one thread at a time.
        unsafe { (self.context.library.call.ucp_worker_progress)(self.raw) != 0 }
    }

    /// Whether the caller may sleep until the descriptor is readable.
    pub(super) fn arm(&self) -> Result<bool, TransferError> {
        // SAFETY: by one thread at a time.
        let status = unsafe { (self.context.library.call.ucp_worker_arm)(self.raw) };
        match status {
            OK => Ok(true),
            BUSY => Ok(false),
            status => self.context.library.check("sleep", status).map(|()| false),
        }
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the worker's own, open as long as the worker.
        unsafe { BorrowedFd::borrow_raw(self.efd) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: endpoints and keys borrow it for their lifetime, or are gone.
        unsafe { (self.context.library.call.ucp_worker_destroy)(self.raw) };
    }
}

/// Registered memory of this process.
#[derive(Debug)]
pub(super) struct Mapped {
    context: Arc<Context>,
    raw: Handle,
    key: Vec<u8>,
}

// SAFETY: registered with a context that several threads use.
unsafe impl Send for Mapped {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// # Safety
    /// It must be memory of this process for as long as this lives.
    unsafe fn new(context: &Arc<Context>, addr: u64, len: u64) -> Result<Self, TransferError> {
        let library = context.library();
        let len = usize::try_from(len).map_err(|_| TransferError::invalid("more than the address space holds"))?;
        let (params, mut raw) = (MapParams::new(addr, len), std::ptr::null_mut());
        // SAFETY: as the caller vouches.
        let status = unsafe { (library.call.ucp_mem_map)(context.raw, &raw const params, &raw mut raw) };
        library.check("register the memory", status)?;
        let mut made = Self { context: Arc::clone(context), raw, key: Vec::new() };
        let (mut key, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: of this frame.
        let status = unsafe { (library.call.ucp_rkey_pack)(context.raw, raw, &raw mut key, &raw mut size) };
        library.check("make a key of the memory", status)?;
        // SAFETY: `size` bytes, which are UCX's until released, once.
        unsafe {
            made.key = std::slice::from_raw_parts(key.cast::<u8>(), size).to_vec();
            (library.call.ucp_rkey_buffer_release)(key);
        }
        Ok(made)
    }

    /// Registers everything from the first of these pieces to the last, if there are any.
    ///
    /// # Safety
    /// As for `new`.
    pub(super) unsafe fn covering(context: &Arc<Context>, list: &[Segment]) -> Result<Option<Self>, TransferError> {
        let begin = list.iter().map(|piece| piece.addr).min();
        let end = list.iter().map(|piece| piece.addr + piece.len).max();
        let (Some(begin), Some(end)) = (begin, end) else { return Ok(None) };
        // SAFETY: as the caller vouches.
        unsafe { Self::new(context, begin, end - begin) }.map(Some)
    }

    /// What others need to reach it.
    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: registered once, unregistered once.
        let _ = unsafe { (self.context.library.call.ucp_mem_unmap)(self.context.raw, self.raw) };
    }
}

/// A route to another worker. Its keys and requests belong to the thread that has it.
#[derive(Debug)]
pub(super) struct Endpoint<'a> {
    worker: &'a Worker,
    raw: Handle,
    failed: Box<AtomicBool>,
}

/// Called by UCX when the other end can no longer be reached.
unsafe extern "C" fn on_error(argument: *mut c_void, _endpoint: Handle, _status: Status) {
    // SAFETY: the endpoint's flag, which outlives the endpoint.
    unsafe { &*argument.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(worker: &'a Worker, address: &[u8]) -> Result<Self, TransferError> {
        let library = worker.context.library();
        let failed = Box::new(AtomicBool::new(false));
        let argument = (&raw const *failed).cast_mut().cast::<c_void>();
        let params = EndpointParams::new(address.as_ptr().cast(), on_error, argument);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the address is from this library, since its owner has proved who it is; the flag has its own box.
        let status = unsafe { (library.call.ucp_ep_create)(worker.raw, &raw const params, &raw mut raw) };
        library.check("reach the owner's worker with the transports of both (UCX_TLS)", status)?;
        Ok(Self { worker, raw, failed })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Whether TCP is among the ways to the other end; none if UCX does not say.
    pub(super) fn uses_tcp(&self) -> Option<bool> {
        let (mut text, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: two variables of this frame, which outlive the stream.
        let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut len) };
        if stream.is_null() {
            return None;
        }
        // SAFETY: an endpoint of this thread, and a stream that is closed once.
        let closed = unsafe {
            (self.worker.context.library.call.ucp_ep_print_info)(self.raw, stream);
            libc::fclose(stream)
        };
        // SAFETY: what the stream left there: a text that ends with a zero, or nothing.
        let said = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        // SAFETY: the stream's memory, freed once.
        unsafe { libc::free(text.cast()) };
        let lanes: Vec<_> = said.iter().flat_map(|said| said.lines()).filter(|line| line.contains("lane[")).collect();
        let is_known = closed == 0 && !lanes.is_empty();
        is_known.then(|| lanes.iter().any(|lane| lane.contains(":tcp/")))
    }

    /// Makes a key usable.
    pub(super) fn unpack(&self, key: &[u8]) -> Result<Key, TransferError> {
        let library = Arc::clone(self.worker.context.library());
        let mut raw = std::ptr::null_mut();
        // SAFETY: a key packed by its owner.
        let status = unsafe { (library.call.ucp_ep_rkey_unpack)(self.raw, key.as_ptr().cast(), &raw mut raw) };
        library.check("use the key of the owner's memory", status)?;
        Ok(Key { library, raw })
    }

    /// # Safety
    /// `here` must be writable memory of this process until the request has ended.
    pub(super) unsafe fn get(&self, here: u64, there: u64, len: u64, key: &Key) -> Result<Option<Request>, Status> {
        let params = RequestParams::new();
        // SAFETY: as the caller vouches.
        let found = unsafe {
            (key.library.call.ucp_get_nbx)(
                self.raw,
                here as *mut c_void,
                len as usize,
                there,
                key.raw,
                &raw const params,
            )
        };
        begun(found)
    }

    /// # Safety
    /// `here` must be memory of this process until the request has ended.
    pub(super) unsafe fn put(&self, here: u64, there: u64, len: u64, key: &Key) -> Result<Option<Request>, Status> {
        let params = RequestParams::new();
        // SAFETY: as the caller vouches.
        let found = unsafe {
            (key.library.call.ucp_put_nbx)(
                self.raw,
                here as *const c_void,
                len as usize,
                there,
                key.raw,
                &raw const params,
            )
        };
        begun(found)
    }

    /// The request ends when all earlier writes are in the owner's memory.
    pub(super) fn flush(&self) -> Result<Option<Request>, Status> {
        let params = RequestParams::new();
        // SAFETY: by one thread at a time.
        let found = unsafe { (self.worker.context.library.call.ucp_ep_flush_nbx)(self.raw, &raw const params) };
        begun(found)
    }

    /// How a request ended, if it has.
    pub(super) fn ended(&self, request: &Request) -> Option<Status> {
        let call = &self.worker.context.library.call;
        // SAFETY: a request of this endpoint that has not been freed yet.
        let status = unsafe { (call.ucp_request_check_status)(request.0) };
        if status == IN_PROGRESS {
            return None;
        }
        // SAFETY: as above; its owner forgets it.
        unsafe { (call.ucp_request_free)(request.0) };
        Some(status)
    }

    /// Closes it by force, with everything under way: afterwards UCX touches none of the memory.
    pub(super) fn close(self, under_way: &mut Vec<Request>) {
        let params = RequestParams::forced();
        let call = &self.worker.context.library.call;
        // SAFETY: closed once, by the thread that has it.
        if let Ok(raw) = split(unsafe { (call.ucp_ep_close_nbx)(self.raw, &raw const params) }) {
            under_way.push(Request(raw));
        }
        let end = Instant::now() + CLOSING;
        while !under_way.is_empty() && Instant::now() < end {
            self.worker.progress();
            under_way.retain(|request| self.ended(request).is_none());
        }
        if !under_way.is_empty() {
            // What has not ended by now ends with the worker, which may still set the flag.
            under_way.clear();
            Box::leak(self.failed);
        }
    }
}

/// An operation under way.
#[derive(Debug)]
pub(super) struct Request(Handle);

fn begun(found: Handle) -> Result<Option<Request>, Status> {
    match split(found) {
        Ok(raw) => Ok(Some(Request(raw))),
        Err(OK) => Ok(None),
        Err(status) => Err(status),
    }
}

/// Gives access to memory of another process.
#[derive(Debug)]
pub(super) struct Key {
    library: Arc<Library>,
    raw: Handle,
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: unpacked once, destroyed once, with no operation under way that uses it.
        unsafe { (self.library.call.ucp_rkey_destroy)(self.raw) };
    }
}
