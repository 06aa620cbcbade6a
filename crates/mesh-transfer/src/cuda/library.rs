//! libcuda, which comes with the driver, opened at run time: the functions that we use.

use super::driver::{About, Device, Driver, Failure, INVALID_CONTEXT, INVALID_VALUE, IpcHandle, NOT_READY, Rows};
use crate::error::TransferError;
use crate::lock;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

/// The library that the driver installs.
pub(super) const NAME: &str = "libcuda.so.1";
/// One of these exists where a driver is loaded: the first on Linux, the second on Windows' subsystem for Linux.
const DEVICES: [&str; 2] = ["/dev/nvidiactl", "/dev/dxg"];

const MEMORY_TYPE: c_int = 2;
const BUFFER_ID: c_int = 7;
const DEVICE_ORDINAL: c_int = 9;
const IS_IPC_CAPABLE: c_int = 10;
const TYPE_DEVICE: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_BLOCKING_SYNC: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const IPC_LAZY_PEER_ACCESS: c_uint = 1;
const HOST_PORTABLE: c_uint = 1;
const TYPE_UNIFIED: c_uint = 4;
const DMA_BUF: c_int = 1;

type Result_ = c_int;
type Pointer = *mut c_void;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Copy2d {
    from_x: usize,
    from_y: usize,
    from_type: c_uint,
    from_host: *const c_void,
    from: u64,
    from_array: Pointer,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_type: c_uint,
    to_host: Pointer,
    to: u64,
    to_array: Pointer,
    to_pitch: usize,
    width: usize,
    height: usize,
}

macro_rules! functions {
    ($($field:ident: $symbol:literal fn($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Result_,)*
        }

        impl Functions {
            /// # Safety
            /// The library must be libcuda, or have its interface.
            unsafe fn find(library: Pointer) -> Result<Self, TransferError> {
                Ok(Self {
                    $($field: {
                        let found = symbol(library, concat!($symbol, "\0"))?;
                        // SAFETY: it has this type in libcuda's stable interface.
                        unsafe { std::mem::transmute::<Pointer, unsafe extern "C" fn($($argument),*) -> Result_>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init: "cuInit" fn(c_uint);
    error_name: "cuGetErrorName" fn(Result_, *mut *const c_char);
    error_string: "cuGetErrorString" fn(Result_, *mut *const c_char);
    device_count: "cuDeviceGetCount" fn(*mut c_int);
    device_get: "cuDeviceGet" fn(*mut c_int, c_int);
    device_uuid: "cuDeviceGetUuid_v2" fn(*mut [u8; 16], c_int);
    primary_state: "cuDevicePrimaryCtxGetState" fn(c_int, *mut c_uint, *mut c_int);
    primary_retain: "cuDevicePrimaryCtxRetain" fn(*mut Pointer, c_int);
    push: "cuCtxPushCurrent_v2" fn(Pointer);
    pop: "cuCtxPopCurrent_v2" fn(*mut Pointer);
    attribute: "cuPointerGetAttribute" fn(Pointer, c_int, u64);
    range: "cuMemGetAddressRange_v2" fn(*mut u64, *mut usize, u64);
    ipc_get: "cuIpcGetMemHandle" fn(*mut IpcHandle, u64);
    ipc_open: "cuIpcOpenMemHandle_v2" fn(*mut u64, IpcHandleByValue, c_uint);
    ipc_close: "cuIpcCloseMemHandle" fn(u64);
    stream_create: "cuStreamCreate" fn(*mut Pointer, c_uint);
    stream_destroy: "cuStreamDestroy_v2" fn(Pointer);
    stream_synchronize: "cuStreamSynchronize" fn(Pointer);
    event_create: "cuEventCreate" fn(*mut Pointer, c_uint);
    event_destroy: "cuEventDestroy_v2" fn(Pointer);
    event_record: "cuEventRecord" fn(Pointer, Pointer);
    event_query: "cuEventQuery" fn(Pointer);
    event_synchronize: "cuEventSynchronize" fn(Pointer);
    copy: "cuMemcpyAsync" fn(u64, u64, usize, Pointer);
    copy_2d: "cuMemcpy2DAsync_v2" fn(*const Copy2d, Pointer);
    host_alloc: "cuMemHostAlloc" fn(*mut Pointer, usize, c_uint);
    host_free: "cuMemFreeHost" fn(Pointer);
}

/// `CUipcMemHandle` as it is passed: a structure, by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandleByValue(IpcHandle);

type DmaBuf = unsafe extern "C" fn(*mut c_void, u64, usize, c_int, u64) -> Result_;

/// The library, not yet initialised.
pub(super) struct Found {
    call: Functions,
    /// Since driver 11.7.
    dma_buf: Option<DmaBuf>,
}

impl Found {
    /// Opens the library at that path, or the system's where there is a driver. Does not initialise CUDA.
    pub(super) fn open(path: Option<&str>) -> Result<Self, TransferError> {
        if path.is_none() && !DEVICES.iter().any(|device| Path::new(device).exists()) {
            return Err(TransferError::transport(
                "this machine has no NVIDIA GPU, or its driver is not loaded: there is no /dev/nvidiactl",
            ));
        }
        let path = path.unwrap_or(NAME);
        let not_opened = |why: String| TransferError::transport(format!("cannot open CUDA's driver, {path}: {why}"));
        let name = CString::new(path).map_err(|_| not_opened("its path contains a NUL byte".to_owned()))?;
        // SAFETY: opening it runs its initialisers; only `cuInit` initialises CUDA itself.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(not_opened(last_error()));
        }
        // SAFETY: the library is libcuda, or lacks its functions.
        let call = unsafe { Functions::find(library) }.map_err(|error| not_opened(error.message))?;
        let dma_buf = symbol(library, "cuMemGetHandleForAddressRange\0").ok();
        // SAFETY: it has this type in libcuda's stable interface.
        let dma_buf = dma_buf.map(|found| unsafe { std::mem::transmute::<Pointer, DmaBuf>(found) });
        Ok(Self { call, dma_buf })
    }

    /// Initialises CUDA in this process and lists the GPUs. Makes no context on any of them.
    pub(super) fn start(self) -> Result<Library, Failure> {
        let mut made = Library { call: self.call, dma_buf: self.dma_buf, devices: Vec::new(), uuids: Vec::new() };
        // SAFETY: takes a number that must be 0.
        made.check("start", unsafe { (made.call.init)(0) })?;
        let mut count = 0;
        // SAFETY: fills in a number of this frame.
        made.check("count its devices", unsafe { (made.call.device_count)(&raw mut count) })?;
        for ordinal in 0..count {
            let (mut device, mut uuid) = (0, [0; 16]);
            // SAFETY: fills in a number of this frame.
            made.check("find a device", unsafe { (made.call.device_get)(&raw mut device, ordinal) })?;
            // SAFETY: fills in 16 bytes of this frame.
            made.check("name a device", unsafe { (made.call.device_uuid)(&raw mut uuid, device) })?;
            made.devices.push(Gpu { device, context: Mutex::new(0) });
            made.uuids.push(uuid);
        }
        Ok(made)
    }
}

#[derive(Debug)]
struct Gpu {
    device: c_int,
    /// Its primary context, which PyTorch and others in this process share; 0 until needed.
    context: Mutex<usize>,
}

/// The driver, through libcuda.
pub(super) struct Library {
    call: Functions,
    dma_buf: Option<DmaBuf>,
    devices: Vec<Gpu>,
    uuids: Vec<[u8; 16]>,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Library({} devices)", self.devices.len())
    }
}

/// Makes a context current on this thread until dropped, which restores the previous one.
struct Entered<'a>(&'a Library);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread.
        let _ = unsafe { (self.0.call.pop)(&raw mut popped) };
    }
}

impl Library {
    fn check(&self, what: &'static str, code: Result_) -> Result<(), Failure> {
        if code == 0 { Ok(()) } else { Err(self.failure(what, code)) }
    }

    fn failure(&self, what: &'static str, code: Result_) -> Failure {
        let say = |function: unsafe extern "C" fn(Result_, *mut *const c_char) -> Result_| {
            let mut text = std::ptr::null();
            // SAFETY: fills in a pointer of this frame to a permanent text; null if the code is unknown.
            let _ = unsafe { function(code, &raw mut text) };
            if text.is_null() {
                return format!("error {code}");
            }
            // SAFETY: it ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Failure { what, code, text: format!("{} ({})", say(self.call.error_string), say(self.call.error_name)) }
    }

    fn gpu(&self, device: Device) -> Result<&Gpu, Failure> {
        self.devices.get(device).ok_or_else(|| Failure {
            what: "use a device",
            code: INVALID_VALUE,
            text: format!("this process has no GPU number {device}"),
        })
    }

    /// Makes the device's primary context current on this thread.
    fn enter(&self, device: Device) -> Result<Entered<'_>, Failure> {
        let gpu = self.gpu(device)?;
        let mut context = lock(&gpu.context);
        if *context == 0 {
            let mut made: Pointer = std::ptr::null_mut();
            // SAFETY: fills in a pointer of this frame. It is kept as long as the process lives.
            let code = unsafe { (self.call.primary_retain)(&raw mut made, gpu.device) };
            self.check("make a context on the GPU", code)?;
            *context = made as usize;
        }
        // SAFETY: a retained context.
        let code = unsafe { (self.call.push)(*context as Pointer) };
        match self.check("use its context", code) {
            Ok(()) => Ok(Entered(self)),
            Err(failure) => {
                // Somebody in this process reset it: make it again next time.
                *context = 0;
                Err(failure)
            }
        }
    }

    /// Describes an address, in the context that is current on this thread.
    fn look(&self, addr: u64) -> Result<About, Failure> {
        let ask = |attribute: c_int, into: Pointer| {
            // SAFETY: fills in what `into` points to, a word of this frame or of `look`'s.
            self.check("look at memory", unsafe { (self.call.attribute)(into, attribute, addr) })
        };
        let (mut kind, mut ordinal, mut shareable): (c_uint, c_int, c_int) = (0, 0, 0);
        let mut id = 0_u64;
        ask(MEMORY_TYPE, (&raw mut kind).cast())?;
        if kind != TYPE_DEVICE {
            return Err(self.failure("look at memory", INVALID_VALUE));
        }
        ask(DEVICE_ORDINAL, (&raw mut ordinal).cast())?;
        // The driver lacks some of these for memory pools and managed memory; such memory is not shared.
        let is_known = ask(BUFFER_ID, (&raw mut id).cast()).is_ok();
        let is_told = ask(IS_IPC_CAPABLE, (&raw mut shareable).cast()).is_ok();
        let (mut base, mut len) = (0, 0);
        // SAFETY: fills in two words of this frame.
        let ranged = unsafe { (self.call.range)(&raw mut base, &raw mut len, addr) } == 0;
        if !ranged {
            (base, len) = (addr, 0);
        }
        let shareable = is_known && is_told && ranged && shareable != 0;
        Ok(About { device: usize::try_from(ordinal).unwrap_or(usize::MAX), base, len: len as u64, id, shareable })
    }
}

impl Driver for Library {
    fn uuids(&self) -> &[[u8; 16]] {
        &self.uuids
    }

    fn about(&self, addr: u64) -> Result<About, Failure> {
        match self.look(addr) {
            // Some drivers need a context for that, any one. A new one would cost GPU memory, so use an active one.
            Err(failure) if failure.code == INVALID_CONTEXT => {
                for (number, gpu) in self.devices.iter().enumerate() {
                    let (mut flags, mut is_active) = (0, 0);
                    // SAFETY: fills in two numbers of this frame.
                    let code = unsafe { (self.call.primary_state)(gpu.device, &raw mut flags, &raw mut is_active) };
                    if code == 0 && is_active != 0 {
                        let _entered = self.enter(number)?;
                        return self.look(addr);
                    }
                }
                Err(failure)
            }
            found => found,
        }
    }

    fn share(&self, device: Device, base: u64) -> Result<IpcHandle, Failure> {
        let _entered = self.enter(device)?;
        let mut handle = [0; 64];
        // SAFETY: fills in 64 bytes of this frame.
        self.check("share memory", unsafe { (self.call.ipc_get)(&raw mut handle, base) })?;
        Ok(handle)
    }

    fn open(&self, device: Device, handle: &IpcHandle) -> Result<(u64, u64), Failure> {
        let _entered = self.enter(device)?;
        let mut at = 0;
        let handle = IpcHandleByValue(*handle);
        // SAFETY: fills in a word of this frame; the driver checks the handle.
        let code = unsafe { (self.call.ipc_open)(&raw mut at, handle, IPC_LAZY_PEER_ACCESS) };
        self.check("open memory of another process", code)?;
        let (mut base, mut len) = (0, 0);
        // SAFETY: fills in two words of this frame.
        let code = unsafe { (self.call.range)(&raw mut base, &raw mut len, at) };
        if let Err(failure) = self.check("measure memory of another process", code) {
            // SAFETY: opened above.
            let _ = unsafe { (self.call.ipc_close)(at) };
            return Err(failure);
        }
        // CUD-4: memory beyond is this process's own.
        Ok((at, (base + len as u64).saturating_sub(at)))
    }

    fn close(&self, device: Device, base: u64) {
        if let Ok(_entered) = self.enter(device) {
            // SAFETY: opened by `open`, and closed once. If this fails, it has gone with its context.
            let _ = unsafe { (self.call.ipc_close)(base) };
        }
    }

    fn make_stream(&self, device: Device) -> Result<u64, Failure> {
        let _entered = self.enter(device)?;
        let mut made: Pointer = std::ptr::null_mut();
        // SAFETY: fills in a pointer of this frame.
        self.check("make a stream", unsafe { (self.call.stream_create)(&raw mut made, STREAM_NON_BLOCKING) })?;
        Ok(made as u64)
    }

    fn end_stream(&self, device: Device, stream: u64) {
        if let Ok(_entered) = self.enter(device) {
            // SAFETY: made by `make_stream`, and ended once.
            let _ = unsafe { (self.call.stream_destroy)(stream as Pointer) };
        }
    }

    fn await_stream(&self, device: Device, stream: u64) -> Result<(), Failure> {
        let _entered = self.enter(device)?;
        // SAFETY: a stream of ours.
        self.check("finish the work of a stream", unsafe { (self.call.stream_synchronize)(stream as Pointer) })
    }

    fn make_event(&self, device: Device) -> Result<u64, Failure> {
        let _entered = self.enter(device)?;
        let mut made: Pointer = std::ptr::null_mut();
        let flags = EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING;
        // SAFETY: fills in a pointer of this frame.
        self.check("make an event", unsafe { (self.call.event_create)(&raw mut made, flags) })?;
        Ok(made as u64)
    }

    fn end_event(&self, device: Device, event: u64) {
        if let Ok(_entered) = self.enter(device) {
            // SAFETY: made by `make_event`, and ended once.
            let _ = unsafe { (self.call.event_destroy)(event as Pointer) };
        }
    }

    unsafe fn copy(&self, device: Device, stream: u64, rows: &Rows) -> Result<(), Failure> {
        let _entered = self.enter(device)?;
        let stream = stream as Pointer;
        if rows.rows > 1 {
            let copy = Copy2d {
                from_x: 0,
                from_y: 0,
                from_type: TYPE_UNIFIED,
                from_host: std::ptr::null(),
                from: rows.from,
                from_array: std::ptr::null_mut(),
                from_pitch: rows.from_pitch as usize,
                to_x: 0,
                to_y: 0,
                to_type: TYPE_UNIFIED,
                to_host: std::ptr::null_mut(),
                to: rows.to,
                to_array: std::ptr::null_mut(),
                to_pitch: rows.to_pitch as usize,
                width: rows.width as usize,
                height: rows.rows as usize,
            };
            // SAFETY: as the caller vouches; the description is read before the call returns.
            match unsafe { (self.call.copy_2d)(&raw const copy, stream) } {
                // Some devices take only pitches that they chose.
                INVALID_VALUE => {}
                code => return self.check("copy memory in pieces", code),
            }
        }
        for row in 0..rows.rows {
            let (to, from) = (rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch);
            // SAFETY: as the caller vouches.
            self.check("copy memory", unsafe { (self.call.copy)(to, from, rows.width as usize, stream) })?;
        }
        Ok(())
    }

    fn record(&self, device: Device, event: u64, stream: u64) -> Result<(), Failure> {
        let _entered = self.enter(device)?;
        // SAFETY: an event of ours; the stream is ours, or checked by the driver.
        self.check("note the work of a stream", unsafe {
            (self.call.event_record)(event as Pointer, stream as Pointer)
        })
    }

    fn is_reached(&self, device: Device, event: u64) -> Result<bool, Failure> {
        let _entered = self.enter(device)?;
        // SAFETY: an event of ours.
        match unsafe { (self.call.event_query)(event as Pointer) } {
            NOT_READY => Ok(false),
            code => self.check("finish the work of a stream", code).map(|()| true),
        }
    }

    fn await_event(&self, device: Device, event: u64) -> Result<(), Failure> {
        let _entered = self.enter(device)?;
        // SAFETY: an event of ours.
        self.check("finish the work of a stream", unsafe { (self.call.event_synchronize)(event as Pointer) })
    }

    fn allocate_pinned(&self, device: Device, len: u64) -> Result<u64, Failure> {
        let _entered = self.enter(device)?;
        let mut made: Pointer = std::ptr::null_mut();
        // SAFETY: fills in a pointer of this frame.
        let code = unsafe { (self.call.host_alloc)(&raw mut made, len as usize, HOST_PORTABLE) };
        self.check("allocate pinned memory", code)?;
        Ok(made as u64)
    }

    fn free_pinned(&self, device: Device, addr: u64) {
        if let Ok(_entered) = self.enter(device) {
            // SAFETY: allocated by `allocate_pinned`, and freed once.
            let _ = unsafe { (self.call.host_free)(addr as Pointer) };
        }
    }

    fn dma_buf(&self, device: Device, addr: u64, len: u64) -> Result<OwnedFd, Failure> {
        let Some(call) = self.dma_buf else {
            let text = "the driver is older than 11.7".to_owned();
            return Err(Failure { what: "name memory to other devices", code: INVALID_VALUE, text });
        };
        let _entered = self.enter(device)?;
        let mut fd: c_int = -1;
        // SAFETY: fills in a number of this frame.
        let code = unsafe { call((&raw mut fd).cast(), addr, len as usize, DMA_BUF, 0) };
        self.check("name memory to other devices", code)?;
        // SAFETY: a new descriptor, which is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// The name must end with a zero.
fn symbol(library: Pointer, name: &str) -> Result<Pointer, TransferError> {
    // SAFETY: an open library, and a text that ends with a zero.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    if found.is_null() {
        let name = name.trim_end_matches('\0');
        return Err(TransferError::transport(format!("it has no {name}; driver 470 or a later one is needed")));
    }
    Ok(found)
}

fn last_error() -> String {
    // SAFETY: the text of this thread's last error, copied before the next call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: it ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
