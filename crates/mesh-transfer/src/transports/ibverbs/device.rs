//! Devices, registered memory and queue pairs, none of which is used after it ends.
//!
//! FRK-1: a fork shares the devices that its parent opened, and leaves them alone.

use super::scan::{Gid, Link, Port};
use super::sys::{
    self, AddressHandle, CompChannel, Completion, Context, Cq, DeviceAttr, Library, Mr, Pd, PortAttr, Qp, QpAttr,
    QpCap, QpInitAttr, SendRequest, access, mask, state,
};
use super::wire::End;
use crate::error::TransferError;
use crate::realm::pid;
use crate::registry::{Registrar, Registry};
use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// The most requests under way on one queue pair.
const DEPTH: c_int = 64;
/// The most pieces of memory in one request.
const PIECES: c_int = 16;
/// The most reads and atomic operations of one queue pair under way in the network.
const READS: c_int = 16;
/// About 0.07 s until a packet is sent again.
const TIMEOUT: u8 = 14;
/// The number of retries. Not 7, the field's maximum, which Soft-RoCE takes as unlimited.
const RETRIES: u8 = 6;
const HOPS: u8 = 64;

/// An open device.
pub(super) struct Device {
    library: Arc<Library>,
    context: NonNull<Context>,
    pd: NonNull<Pd>,
    pub(super) name: String,
    pub(super) limits: Limits,
    /// FRK-1
    pid: u32,
}

/// A device's limits, as far as we use them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) depth: u32,
    pub(super) pieces: u32,
    /// The most reads that it requests at once, and serves at once.
    pub(super) asks: u8,
    pub(super) serves: u8,
    /// Whether its atomic operations are atomic with respect to each other.
    pub(super) atomics: bool,
}

// SAFETY: any thread may call the library's functions, also several at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name)
    }
}

/// The error of this thread's last call that returned no pointer.
fn failed(what: &str) -> TransferError {
    told(what, io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// The error of a call that returned an error number, or -1 with the number in `errno`.
fn told(what: &str, code: c_int) -> TransferError {
    let error = if code < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(code) };
    TransferError::transport(format!("cannot {what}: {error}"))
}

fn check(what: &str, code: c_int) -> Result<(), TransferError> {
    if code == 0 { Ok(()) } else { Err(told(what, code)) }
}

impl Device {
    /// Opens the devices with these names.
    pub(super) fn open_all(library: &Arc<Library>, names: &[&str]) -> Result<Vec<Arc<Self>>, TransferError> {
        let mut count = 0;
        // SAFETY: the library is open; `count` is ours.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        let Some(list) = NonNull::new(list) else {
            return Err(failed("list the RDMA devices"));
        };
        let mut opened = Vec::new();
        let mut last = None;
        for at in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` devices; a device's name lives as long as the list.
            let (device, name) = unsafe {
                let device = *list.as_ptr().add(at);
                (device, CStr::from_ptr((library.ibv_get_device_name)(device)).to_string_lossy().into_owned())
            };
            if !names.contains(&name.as_str()) {
                continue;
            }
            // SAFETY: from the list, which is freed below.
            match unsafe { Self::open(library, device, name) } {
                Ok(device) => opened.push(Arc::new(device)),
                Err(error) => last = Some(error),
            }
        }
        // SAFETY: made by the library and freed once; opened devices do not need it.
        unsafe { (library.ibv_free_device_list)(list.as_ptr()) };
        match (opened.is_empty(), last) {
            (true, Some(error)) => Err(error),
            (true, None) => Err(TransferError::transport(
                "libibverbs has no driver for the RDMA devices of this machine. Install the package ibverbs-providers.",
            )),
            _ => Ok(opened),
        }
    }

    /// # Safety
    /// `device` must be from a list that has not been freed yet.
    unsafe fn open(library: &Arc<Library>, device: *mut sys::Device, name: String) -> Result<Self, TransferError> {
        // SAFETY: as the caller vouches.
        let context = NonNull::new(unsafe { (library.ibv_open_device)(device) }).ok_or_else(|| {
            let error = failed(&format!("open the RDMA device {name}"));
            TransferError::transport(format!("{error}. Allow this user, or container, to use /dev/infiniband."))
        })?;
        let close = || {
            // SAFETY: open, and not used afterwards.
            unsafe { (library.ibv_close_device)(context.as_ptr()) };
        };
        // SAFETY: open.
        let Some(pd) = NonNull::new(unsafe { (library.ibv_alloc_pd)(context.as_ptr()) }) else {
            let error = failed("make a protection domain");
            close();
            return Err(error);
        };
        let mut attr = MaybeUninit::<DeviceAttr>::zeroed();
        // SAFETY: open; filled in by the library, and made of numbers, for which zeros are valid too.
        let (code, attr) = unsafe {
            let code = (library.ibv_query_device)(context.as_ptr(), attr.as_mut_ptr());
            (code, attr.assume_init())
        };
        let limits = Limits {
            depth: attr.max_qp_wr.clamp(1, DEPTH) as u32,
            pieces: attr.max_sge.min(if attr.max_sge_rd > 0 { attr.max_sge_rd } else { attr.max_sge }).clamp(1, PIECES)
                as u32,
            asks: attr.max_qp_init_rd_atom.clamp(1, READS) as u8,
            serves: attr.max_qp_rd_atom.clamp(1, READS) as u8,
            atomics: attr.atomic_cap > 0,
        };
        let made = Self { library: Arc::clone(library), context, pd, name, limits, pid: pid() };
        check("ask the device for its limits", code)?;
        Ok(made)
    }

    /// A port's MTU, as the library encodes it, and its longest message.
    pub(super) fn port(&self, number: u8) -> Result<(u8, u32), TransferError> {
        let mut attr = PortAttr::default();
        // SAFETY: open; filled in by the library.
        let code = unsafe { (self.library.ibv_query_port)(self.context.as_ptr(), number, &raw mut attr) };
        check("ask the device for its port", code)?;
        Ok((attr.active_mtu.clamp(1, 5) as u8, attr.max_msg_sz))
    }

    /// What others may do with an export.
    pub(super) fn rights(&self, writable: bool) -> c_int {
        let atomics = if self.limits.atomics { access::REMOTE_ATOMIC } else { 0 };
        access::REMOTE_READ | if writable { access::LOCAL_WRITE | access::REMOTE_WRITE | atomics } else { 0 }
    }

    /// Registers memory with the device.
    pub(super) fn register(self: &Arc<Self>, start: u64, len: u64, access: c_int) -> Result<Region, TransferError> {
        let bytes = usize::try_from(len).map_err(|_| TransferError::invalid("more than the address space holds"))?;
        // SAFETY: open; the kernel checks that the memory exists and permits this access.
        let mr = unsafe { (self.library.ibv_reg_mr)(self.pd.as_ptr(), start as *mut c_void, bytes, access) };
        self.known(mr, len)
    }

    /// Registers GPU memory through a dma-buf of its pages: `len` bytes, `skip` bytes into the buffer, with address
    /// `start`.
    pub(super) fn register_dma_buf(
        self: &Arc<Self>,
        buffer: BorrowedFd<'_>,
        (start, skip, len): (u64, u64, u64),
        access: c_int,
    ) -> Result<Region, TransferError> {
        let Some(register) = self.library.ibv_reg_dmabuf_mr else {
            return Err(TransferError::transport("libibverbs is older than version 34, which memory of GPUs needs"));
        };
        let bytes = usize::try_from(len).map_err(|_| TransferError::invalid("more than the address space holds"))?;
        // SAFETY: open; the kernel checks the buffer's size, and keeps the buffer while it is registered.
        let mr = unsafe { register(self.pd.as_ptr(), skip, bytes, start, buffer.as_raw_fd(), access) };
        self.known(mr, len)
    }

    fn known(self: &Arc<Self>, mr: *mut Mr, len: u64) -> Result<Region, TransferError> {
        let Some(mr) = NonNull::new(mr) else {
            let errno = io::Error::last_os_error();
            let more = match errno.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN) => {
                    ". Raise the limit of locked memory (ulimit -l; in a container --ulimit memlock=-1)"
                }
                _ => "",
            };
            let name = &self.name;
            return Err(TransferError::transport(format!(
                "cannot register {len} bytes with the RDMA device {name}: {errno}{more}"
            )));
        };
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Region { device: Arc::clone(self), mr, lkey, rkey })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // FRK-1
        if pid() != self.pid {
            return;
        }
        // SAFETY: all objects made from it keep it alive, so none is left.
        unsafe {
            (self.library.ibv_dealloc_pd)(self.pd.as_ptr());
            (self.library.ibv_close_device)(self.context.as_ptr());
        }
    }
}

/// Memory registered with a device, until dropped.
pub(super) struct Region {
    device: Arc<Device>,
    mr: NonNull<Mr>,
    /// The key for this process.
    pub(super) lkey: u32,
    /// The key for others.
    pub(super) rkey: u32,
}

// SAFETY: as for the device.
unsafe impl Send for Region {}
// SAFETY: as for the device.
unsafe impl Sync for Region {}

impl Region {
    pub(super) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x} of {})", self.lkey, self.device.name)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // FRK-1
        if pid() == self.device.pid {
            // SAFETY: made by `register`, and deregistered once. After this the device no longer touches the memory.
            unsafe { (self.device.library.ibv_dereg_mr)(self.mr.as_ptr()) };
        }
    }
}

/// Registers memory of this process with a device for its own transfers.
#[derive(Debug)]
pub(super) struct Local(Arc<Device>);

impl Registrar for Local {
    type Region = Region;

    fn register(&self, start: u64, len: u64, writable: bool) -> Result<Region, TransferError> {
        self.0.register(start, len, if writable { access::LOCAL_WRITE } else { 0 })
    }
}

/// A port, its device, and the memory registered there.
#[derive(Clone, Debug)]
pub(super) struct Rail {
    pub(super) device: Arc<Device>,
    pub(super) memory: Arc<Registry<Local>>,
    pub(super) port: Port,
    pub(super) mtu: u8,
    /// The most that one request moves.
    pub(super) longest: u32,
}

impl Rail {
    /// Opens the devices of these ports. Skips ports whose device cannot be opened, unless none can.
    pub(super) fn open_all(library: &Arc<Library>, ports: Vec<Port>) -> Result<Vec<Self>, TransferError> {
        let names: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
        let page = rustix::param::page_size() as u64;
        let devices: Vec<_> = Device::open_all(library, &names)?
            .into_iter()
            .map(|device| (Arc::new(Registry::new(Local(Arc::clone(&device)), page)), device))
            .collect();
        let mut rails = Vec::new();
        for port in ports {
            if let Some((memory, device)) = devices.iter().find(|(_, device)| device.name == port.device) {
                let (mtu, longest) = device.port(port.number)?;
                rails.push(Self { device: Arc::clone(device), memory: Arc::clone(memory), port, mtu, longest });
            }
        }
        Ok(rails)
    }
}

/// The other end of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct There {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) end: End,
}

/// A queue pair with its completion queue. Used by one thread at a time.
pub(super) struct Queue {
    device: Arc<Device>,
    qp: NonNull<Qp>,
    cq: NonNull<Cq>,
    channel: NonNull<CompChannel>,
    unacknowledged: u32,
}

// SAFETY: any thread may call the library's functions.
unsafe impl Send for Queue {}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} of {})", self.number(), self.device.name)
    }
}

impl Queue {
    /// Makes one with room for `depth` requests.
    pub(super) fn make(device: &Arc<Device>, depth: u32) -> Result<Self, TransferError> {
        let (library, context) = (&device.library, device.context.as_ptr());
        // SAFETY: open.
        let channel = NonNull::new(unsafe { (library.ibv_create_comp_channel)(context) })
            .ok_or_else(|| failed("make a channel for completions"))?;
        let drop_channel = || {
            // SAFETY: just made, and used by nothing.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
        };
        // One completion for each request, and one to spare for failures.
        let room = c_int::try_from(depth).unwrap_or(DEPTH) + 1;
        // SAFETY: both are open.
        let cq = unsafe { (library.ibv_create_cq)(context, room, null_mut(), channel.as_ptr(), 0) };
        let Some(cq) = NonNull::new(cq) else {
            let error = failed("make a queue of completions");
            drop_channel();
            return Err(error);
        };
        let mut init = QpInitAttr {
            context: null_mut(),
            send_cq: cq.as_ptr(),
            recv_cq: cq.as_ptr(),
            srq: null_mut(),
            cap: QpCap {
                max_send_wr: depth,
                max_recv_wr: 1,
                max_send_sge: device.limits.pieces,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            kind: sys::RC,
            all_signalled: 0,
        };
        // SAFETY: all of it is open; the library writes back what it granted.
        let Some(qp) = NonNull::new(unsafe { (library.ibv_create_qp)(device.pd.as_ptr(), &raw mut init) }) else {
            let error = failed("make a queue pair");
            // SAFETY: just made, and used by nothing.
            unsafe { (library.ibv_destroy_cq)(cq.as_ptr()) };
            drop_channel();
            return Err(error);
        };
        let made = Self { device: Arc::clone(device), qp, cq, channel, unacknowledged: 0 };
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(made.as_fd(), flags)
            .map_err(TransferError::os("set up the channel for completions"))?;
        Ok(made)
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: made by `make`.
        unsafe { self.qp.as_ref().number }
    }

    fn modify(&self, what: &str, mut attr: QpAttr, mask: c_int) -> Result<(), TransferError> {
        // SAFETY: made by `make`; the attributes live throughout the call.
        let code = unsafe { (self.device.library.ibv_modify_qp)(self.qp.as_ptr(), &raw mut attr, mask) };
        check(what, code)
    }

    /// Binds it to a port, and sets what others may do through it.
    pub(super) fn bind(&self, rail: &Rail, serves: bool) -> Result<(), TransferError> {
        let atomics = if self.device.limits.atomics { access::REMOTE_ATOMIC } else { 0 };
        let allowed = if serves { access::REMOTE_READ | access::REMOTE_WRITE | atomics } else { 0 };
        let attr =
            QpAttr { state: state::INIT, port: rail.port.number, access: allowed.cast_unsigned(), ..QpAttr::default() };
        self.modify("bind a queue pair to its port", attr, mask::STATE | mask::PKEY | mask::PORT | mask::ACCESS)
    }

    /// Makes it accept packets from the other end.
    pub(super) fn receive(&self, rail: &Rail, there: &There) -> Result<(), TransferError> {
        let half = |gid: &Gid, at: usize| u64::from_ne_bytes(std::array::from_fn(|i| gid[at + i]));
        let is_near = rail.port.link == Link::InfiniBand && there.lid != 0 && rail.port.gid[..8] == there.gid[..8];
        let address = AddressHandle {
            gid: [half(&there.gid, 0), half(&there.gid, 8)],
            sgid_index: rail.port.gid_index,
            hop_limit: HOPS,
            lid: there.lid,
            is_global: u8::from(!is_near),
            port: rail.port.number,
            ..AddressHandle::default()
        };
        let attr = QpAttr {
            state: state::RTR,
            path_mtu: there.end.mtu.into(),
            dest_qp: there.end.number,
            rq_psn: there.end.first,
            max_dest_rd_atomic: there.end.reads,
            min_rnr_timer: 12,
            address,
            ..QpAttr::default()
        };
        let fields = mask::STATE | mask::ADDRESS | mask::MTU | mask::DEST_QP | mask::RQ_PSN | mask::DEST_RD_ATOMIC;
        self.modify("connect a queue pair", attr, fields | mask::RNR_TIMER)
    }

    /// Makes it send.
    pub(super) fn send(&self, first: u32, reads: u8) -> Result<(), TransferError> {
        let attr = QpAttr {
            state: state::RTS,
            sq_psn: first,
            max_rd_atomic: reads,
            timeout: TIMEOUT,
            retry_count: RETRIES,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        let fields = mask::STATE | mask::SQ_PSN | mask::RD_ATOMIC | mask::TIMEOUT | mask::RETRIES | mask::RNR_RETRIES;
        self.modify("have a queue pair send", attr, fields)
    }

    /// Stops it: everything under way completes as failed.
    pub(super) fn fail(&self) -> Result<(), TransferError> {
        self.modify("stop a queue pair", QpAttr { state: state::ERR, ..QpAttr::default() }, mask::STATE)
    }

    /// Posts a linked list of requests.
    ///
    /// # Safety
    /// The requests and their lists must be valid during the call; the memory that they name must be this process's,
    /// and writable where it is written to, until they have completed or the queue pair has ended.
    pub(super) unsafe fn post(&self, first: *mut SendRequest) -> Result<(), TransferError> {
        // SAFETY: the context lives as long as the device.
        let post = unsafe { self.device.context.as_ref().ops.post_send };
        let post = post.ok_or_else(|| TransferError::transport("the device's driver cannot send"))?;
        let mut bad = null_mut();
        // SAFETY: as the caller vouches.
        let code = unsafe { post(self.qp.as_ptr(), first, &raw mut bad) };
        check("give a request to the RDMA device", code)
    }

    /// Takes the completions that are there, as many as fit.
    pub(super) fn poll(&self, into: &mut [Completion]) -> Result<usize, TransferError> {
        // SAFETY: as above.
        let poll = unsafe { self.device.context.as_ref().ops.poll_cq };
        let poll = poll.ok_or_else(|| TransferError::transport("the device's driver cannot poll"))?;
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: there is room for that many.
        let count = unsafe { poll(self.cq.as_ptr(), room, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| TransferError::transport("the RDMA device lost completions"))
    }

    /// Makes its descriptor readable on the next completion. Poll once more afterwards.
    pub(super) fn arm(&self) -> Result<(), TransferError> {
        // SAFETY: as above.
        let notify = unsafe { self.device.context.as_ref().ops.req_notify_cq };
        let notify = notify.ok_or_else(|| TransferError::transport("the device's driver gives no notice"))?;
        // SAFETY: made by `make`.
        check("ask for notice of completions", unsafe { notify(self.cq.as_ptr(), 0) })
    }

    /// Takes the notices that have arrived.
    pub(super) fn hear(&mut self) {
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: made by `make`; it does not block.
        while unsafe { (self.device.library.ibv_get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut context) }
            == 0
        {
            self.unacknowledged += 1;
        }
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel, which ends with this.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // FRK-1
        if pid() != self.device.pid {
            return;
        }
        let library = &self.device.library;
        // SAFETY: all made by `make`, and destroyed users first. Once the queue pair is destroyed, the device no longer
        // touches its requests' memory.
        unsafe {
            (library.ibv_destroy_qp)(self.qp.as_ptr());
            if self.unacknowledged > 0 {
                (library.ibv_ack_cq_events)(self.cq.as_ptr(), self.unacknowledged);
            }
            (library.ibv_destroy_cq)(self.cq.as_ptr());
            (library.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}
