//! libibverbs as C declares it, opened when first needed, so that it need not exist at build time.
//!
//! Only what we use is declared, from the stable interface of `libibverbs.so.1` (symbol versions IBVERBS_1.0 and 1.1).
//! Posting, polling and arming are not symbols: C programs call them through a table in the context, [`ContextOps`].

use crate::error::TransferError;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;

pub(super) const LIBRARY: &CStr = c"libibverbs.so.1";

/// Opaque to us.
#[repr(C)]
pub(super) struct Device {
    _private: [u8; 0],
}

/// The beginning of `struct ibv_context`.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
}

type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int;
type NotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int;

#[repr(C)]
pub(super) struct ContextOps {
    _before: [*mut c_void; 11],
    pub(super) poll_cq: Option<PollCq>,
    pub(super) req_notify_cq: Option<NotifyCq>,
    _between: [*mut c_void; 12],
    pub(super) post_send: Option<PostSend>,
    _after: [*mut c_void; 6],
}

/// Opaque to us.
#[repr(C)]
pub(super) struct Pd {
    _private: [u8; 0],
}

#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// The beginning of `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct CompChannel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
}

/// The beginning of `struct ibv_cq`.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

/// The beginning of `struct ibv_qp`.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    _context: *mut c_void,
    _pd: *mut Pd,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut c_void,
    _handle: u32,
    pub(super) number: u32,
}

#[repr(C)]
pub(super) struct DeviceAttr {
    _firmware: [u8; 64],
    _guids: [u64; 2],
    pub(super) max_mr_size: u64,
    _page_size_cap: u64,
    _vendor: [u32; 3],
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    _capabilities: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    _max_cq: c_int,
    pub(super) max_cqe: c_int,
    _max_mr: c_int,
    _max_pd: c_int,
    /// The most reads of one peer served at once.
    pub(super) max_qp_rd_atom: c_int,
    _more: [c_int; 2],
    /// The most reads of one queue pair under way at once.
    pub(super) max_qp_init_rd_atom: c_int,
    _init: c_int,
    pub(super) atomic_cap: c_int,
    _rest: [c_int; 14],
    _end: [u8; 8],
}

#[repr(C)]
#[derive(Default)]
pub(super) struct PortAttr {
    pub(super) state: c_int,
    _max_mtu: c_int,
    pub(super) active_mtu: c_int,
    _gids: c_int,
    _capabilities: u32,
    pub(super) max_msg_sz: u32,
    _counters: [u32; 2],
    _pkeys: u16,
    pub(super) lid: u16,
    _sm_lid: u16,
    _bytes: [u8; 10],
    _capabilities2: u16,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) kind: c_int,
    pub(super) all_signalled: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AddressHandle {
    pub(super) gid: [u64; 2],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) lid: u16,
    pub(super) service_level: u8,
    pub(super) source_path: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

#[repr(C)]
#[derive(Default)]
pub(super) struct QpAttr {
    pub(super) state: c_int,
    pub(super) _current_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) _migration: c_int,
    pub(super) _qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp: u32,
    pub(super) access: c_uint,
    pub(super) _cap: QpCap,
    pub(super) address: AddressHandle,
    pub(super) _alternative: AddressHandle,
    pub(super) pkey_index: u16,
    pub(super) _alternative_pkey: u16,
    pub(super) _drain: [u8; 2],
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) _alternative_port: [u8; 2],
    pub(super) _rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) key: u32,
}

/// `struct ibv_send_wr`; its unions as used by the operations that we post.
#[repr(C)]
pub(super) struct SendRequest {
    pub(super) id: u64,
    pub(super) next: *mut SendRequest,
    pub(super) list: *mut Sge,
    pub(super) count: c_int,
    pub(super) opcode: c_int,
    pub(super) flags: c_uint,
    pub(super) immediate: u32,
    pub(super) remote: u64,
    /// The key, for reads and writes; the summand or the expected value, for atomic operations.
    pub(super) key_or_first: u64,
    pub(super) second: u64,
    /// For atomic operations.
    pub(super) key: u32,
    /// For other kinds of queue pairs.
    pub(super) rest: [u64; 7],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: c_int,
    pub(super) opcode: c_int,
    pub(super) vendor: u32,
    pub(super) len: u32,
    _immediate: u32,
    pub(super) qp: u32,
    _source: u32,
    _flags: c_uint,
    _pkey: u16,
    _lid: u16,
    _sl: u8,
    _path: u8,
}

pub(super) const RC: c_int = 2;

pub(super) mod opcode {
    use super::c_int;
    pub(crate) const WRITE: c_int = 0;
    pub(crate) const READ: c_int = 4;
    pub(crate) const COMPARE_AND_SWAP: c_int = 5;
    pub(crate) const FETCH_ADD: c_int = 6;
}

pub(super) const SIGNALLED: c_uint = 2;

pub(super) mod access {
    use super::c_int;
    pub(crate) const LOCAL_WRITE: c_int = 1;
    pub(crate) const REMOTE_WRITE: c_int = 2;
    pub(crate) const REMOTE_READ: c_int = 4;
    pub(crate) const REMOTE_ATOMIC: c_int = 8;
}

pub(super) mod state {
    use super::c_int;
    pub(crate) const INIT: c_int = 1;
    pub(crate) const RTR: c_int = 2;
    pub(crate) const RTS: c_int = 3;
    pub(crate) const ERR: c_int = 6;
}

/// Which fields of [`QpAttr`] are set.
pub(super) mod mask {
    use super::c_int;
    pub(crate) const STATE: c_int = 1;
    pub(crate) const ACCESS: c_int = 1 << 3;
    pub(crate) const PKEY: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const ADDRESS: c_int = 1 << 7;
    pub(crate) const MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRIES: c_int = 1 << 10;
    pub(crate) const RNR_RETRIES: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QP: c_int = 1 << 20;
}

/// The outcome of a request, as far as we distinguish it.
pub(super) mod status {
    use super::c_int;
    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const FLUSHED: c_int = 5;
    pub(crate) const REMOTE_INVALID: c_int = 9;
    pub(crate) const REMOTE_ACCESS: c_int = 10;
    pub(crate) const REMOTE_OPERATION: c_int = 11;
    pub(crate) const RETRIES_EXCEEDED: c_int = 12;

    /// The status in words.
    pub(crate) fn word(status: c_int) -> String {
        let word = match status {
            SUCCESS => "success",
            1 => "a request of the wrong length",
            2 | 3 => "a fault of the queue pair",
            4 | 8 => "local memory is not registered for it",
            FLUSHED => "the queue pair has failed",
            REMOTE_INVALID => "the owner's device refuses the request",
            REMOTE_ACCESS => "the owner's device refuses the key or the address",
            REMOTE_OPERATION => "a fault of the owner's device",
            RETRIES_EXCEEDED => "the owner's device does not answer",
            13 => "the owner's device is not ready",
            19 => "a fatal fault of the device",
            other => return format!("completion status {other}"),
        };
        word.to_owned()
    }
}

/// Protection domain, offset in the buffer, length, address for others, the buffer's descriptor, and access rights.
type RegisterDmaBuf = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

macro_rules! library {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are symbols.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Since version 34.
            pub(super) ibv_reg_dmabuf_mr: Option<RegisterDmaBuf>,
        }

        impl Library {
            /// Opens the library; it stays open, because the drivers that it loads expect that.
            pub(super) fn open(path: Option<&str>) -> Result<Self, TransferError> {
                let not_opened = |why: String| TransferError::transport(format!("libibverbs cannot be opened: {why}"));
                let path = path.map(CString::new).transpose().map_err(|_| not_opened("its path contains a NUL byte".to_owned()))?;
                let name = path.as_deref().unwrap_or(LIBRARY);
                // SAFETY: a name that ends with a zero; the library's initialisation has no requirements.
                let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if handle.is_null() {
                    return Err(not_opened(last_error()));
                }
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: the handle is open, and the name ends with a zero.
                        let found = unsafe { libc::dlsym(handle, symbol.as_ptr().cast()) };
                        if found.is_null() {
                            return Err(TransferError::transport(format!(
                                "libibverbs has no {}: it is older than version 17", stringify!($name)
                            )));
                        }
                        // SAFETY: a function of this signature, by the library's headers.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found)
                        }
                    },)*
                    ibv_reg_dmabuf_mr: {
                        // SAFETY: the handle is open, and the name ends with a zero.
                        let found = unsafe { libc::dlsym(handle, c"ibv_reg_dmabuf_mr".as_ptr()) };
                        // SAFETY: a function of this signature, by the library's headers.
                        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, RegisterDmaBuf>(found) })
                    },
                })
            }
        }
    };
}

library! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list: fn(*mut *mut Device);
    ibv_get_device_name: fn(*mut Device) -> *const c_char;
    ibv_open_device: fn(*mut Device) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut Cq, c_uint);
    ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

fn last_error() -> String {
    // SAFETY: returns null or a text that lives until this thread's next call.
    let text = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text)) }
    };
    text.map_or_else(|| "no reason given".to_owned(), |text| text.to_string_lossy().into_owned())
}

// The layout in the library's headers, on 64-bit machines.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ContextOps>() == 256 && offset_of!(Context, ops) == 8);
    assert!(offset_of!(ContextOps, poll_cq) == 88 && offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(Qp, number) == 52 && offset_of!(CompChannel, fd) == 8);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156 && offset_of!(DeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(DeviceAttr, max_sge) == 120 && offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, lid) == 34);
    assert!(offset_of!(PortAttr, active_mtu) == 8 && offset_of!(PortAttr, max_msg_sz) == 20);
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, kind) == 52);
    assert!(size_of::<AddressHandle>() == 32 && offset_of!(AddressHandle, lid) == 24);
    assert!(offset_of!(AddressHandle, is_global) == 29 && offset_of!(AddressHandle, port) == 30);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, address) == 56);
    assert!(offset_of!(QpAttr, access) == 32 && offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126 && offset_of!(QpAttr, port) == 129);
    assert!(offset_of!(QpAttr, timeout) == 130 && offset_of!(QpAttr, rnr_retry) == 132);
    assert!(size_of::<SendRequest>() == 128 && offset_of!(SendRequest, list) == 16);
    assert!(offset_of!(SendRequest, remote) == 40 && offset_of!(SendRequest, key_or_first) == 48);
    assert!(offset_of!(SendRequest, second) == 56 && offset_of!(SendRequest, key) == 64);
    assert!(size_of::<Completion>() == 48 && offset_of!(Completion, qp) == 28);
    assert!(size_of::<Sge>() == 16);
};
