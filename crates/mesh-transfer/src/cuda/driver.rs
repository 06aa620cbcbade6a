//! The parts of the CUDA driver that we use, as a trait, so that tests can replace it.

use crate::error::TransferError;
use std::fmt::Debug;
use std::os::fd::OwnedFd;

/// A GPU, by its number in this process.
pub(crate) type Device = usize;
/// Names memory to other processes, by `cuIpcGetMemHandle`.
pub(crate) type IpcHandle = [u8; 64];

pub(crate) const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;
pub(crate) const INVALID_CONTEXT: i32 = 201;
const PEER_ACCESS_UNSUPPORTED: i32 = 217;
pub(crate) const NOT_READY: i32 = 600;
const SYSTEM_DRIVER_MISMATCH: i32 = 803;

/// A call that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What the call should do.
    pub(crate) what: &'static str,
    /// Its `CUresult`.
    pub(crate) code: i32,
    /// The driver's text for the code.
    pub(crate) text: String,
}

impl From<Failure> for TransferError {
    fn from(failure: Failure) -> Self {
        let advice = match failure.code {
            OUT_OF_MEMORY => ". Free memory of the GPU, or have fewer processes use it.",
            NO_DEVICE => ". Check nvidia-smi and CUDA_VISIBLE_DEVICES.",
            PEER_ACCESS_UNSUPPORTED => ". The two GPUs cannot reach each other.",
            SYSTEM_DRIVER_MISMATCH => ". Reboot, or load the kernel module that belongs to the installed driver.",
            _ => "",
        };
        TransferError::transport(format!("CUDA cannot {}: {}{advice}", failure.what, failure.text))
    }
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) device: Device,
    /// The allocation that contains it.
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// Distinguishes the allocation from others of this process that had the same addresses.
    pub(crate) id: u64,
    /// Whether `cuIpcGetMemHandle` takes it.
    pub(crate) shareable: bool,
}

/// A copy of pieces of equal length and spacing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) width: u64,
    pub(crate) rows: u64,
    /// The distance between the starts of neighbouring rows; meaningless for a single row.
    pub(crate) to_pitch: u64,
    pub(crate) from_pitch: u64,
}

impl Rows {
    pub(crate) fn one(to: u64, from: u64, len: u64) -> Self {
        Self { to, from, width: len, rows: 1, to_pitch: len, from_pitch: len }
    }

    pub(crate) fn len(&self) -> u64 {
        self.width * self.rows
    }
}

/// The driver. Its functions may be called on any thread, but never in a forked copy of the process (CUD-3).
pub(crate) trait Driver: Debug + Send + Sync {
    /// The GPUs that this process may use, by number.
    fn uuids(&self) -> &[[u8; 16]];

    /// Describes an address; fails with [`INVALID_VALUE`] if it is not GPU memory.
    fn about(&self, addr: u64) -> Result<About, Failure>;

    /// Names an allocation of this process to others.
    fn share(&self, device: Device, base: u64) -> Result<IpcHandle, Failure>;

    /// Maps another process's allocation. Returns its address here, and its length.
    fn open(&self, device: Device, handle: &IpcHandle) -> Result<(u64, u64), Failure>;

    /// Unmaps it.
    fn close(&self, device: Device, base: u64);

    /// Makes a stream that waits for no other.
    fn make_stream(&self, device: Device) -> Result<u64, Failure>;

    fn end_stream(&self, device: Device, stream: u64);

    /// Waits for all its work.
    fn await_stream(&self, device: Device, stream: u64) -> Result<(), Failure>;

    fn make_event(&self, device: Device) -> Result<u64, Failure>;

    fn end_event(&self, device: Device, event: u64);

    /// Starts a copy.
    ///
    /// # Safety
    /// Both sides must be memory of this process, including mapped memory, that stays until the stream has finished.
    unsafe fn copy(&self, device: Device, stream: u64, rows: &Rows) -> Result<(), Failure>;

    /// Makes the event mark the work that the stream has been given so far.
    fn record(&self, device: Device, event: u64, stream: u64) -> Result<(), Failure>;

    /// Whether the work that the event marks is done.
    fn is_reached(&self, device: Device, event: u64) -> Result<bool, Failure>;

    /// Waits for the event.
    fn await_event(&self, device: Device, event: u64) -> Result<(), Failure>;

    /// Allocates host memory that GPUs access directly.
    fn allocate_pinned(&self, device: Device, len: u64) -> Result<u64, Failure>;

    fn free_pinned(&self, device: Device, addr: u64);

    /// Exports whole pages of a GPU's memory to other devices.
    fn dma_buf(&self, device: Device, addr: u64, len: u64) -> Result<OwnedFd, Failure>;
}
