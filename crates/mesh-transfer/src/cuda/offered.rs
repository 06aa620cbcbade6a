//! What an owner says of GPU memory that it offers.

use super::Cuda;
use super::driver::{About, Device, IpcHandle};
use crate::error::TransferError;
use crate::segments::{Segment, Segments, Space};
use std::sync::Arc;

const MAGIC: u64 = u64::from_le_bytes(*b"MXCUDA\0\x01");

/// Why others cannot map GPU memory, so that its owner copies it for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It was not made by `cuMemAlloc`.
    Kind = 1,
    /// It spans several allocations.
    Several = 2,
    /// The driver refused to share it.
    Refused = 3,
}

impl Why {
    pub(crate) const ALL: [Self; 3] = [Self::Kind, Self::Several, Self::Refused];

    /// The reason in words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Kind => {
                "its memory is of a kind that CUDA IPC cannot share: of a memory pool (cudaMallocAsync), managed, or of \
                 cuMemCreate, as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; its owner copies it through host memory"
            }
            Self::Several => "it lies in several allocations of GPU memory; its owner copies it through host memory",
            Self::Refused => {
                "the owner's driver refuses to share it (in a container, run with --ipc=host); its owner copies it through host memory"
            }
        }
    }
}

/// What others need to map it; they read it from the owner's memory under a lease. Words only, so any content is valid.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    magic: u64,
    pub(crate) uuid: [u64; 2],
    /// The allocation, in its owner.
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) id: u64,
    /// Not 0 if others cannot map it.
    why: u64,
    ipc: [u64; 8],
    /// The address of the list of pieces, and their number.
    pub(crate) pieces_at: u64,
    pub(crate) pieces: u64,
}

impl Record {
    fn new(about: &About, uuid: &[u8; 16], ipc: Result<IpcHandle, Why>, pieces: &[Segment]) -> Self {
        let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(std::array::from_fn(|i| bytes[8 * at + i]));
        Self {
            magic: MAGIC,
            uuid: std::array::from_fn(|at| word(uuid, at)),
            base: about.base,
            len: about.len,
            id: about.id,
            why: ipc.err().map_or(0, |why| why as u64),
            ipc: ipc.map_or([0; 8], |ipc| std::array::from_fn(|at| word(&ipc, at))),
            pieces_at: pieces.as_ptr() as u64,
            pieces: pieces.len() as u64,
        }
    }

    /// A record to fill in from another process's memory.
    pub(crate) fn empty() -> Self {
        Self { magic: 0, uuid: [0; 2], base: 0, len: 0, id: 0, why: 0, ipc: [0; 8], pieces_at: 0, pieces: 0 }
    }

    pub(crate) fn is_one(&self) -> bool {
        self.magic == MAGIC
    }

    /// The handle to map it by, if that is possible.
    pub(crate) fn ipc(&self) -> Option<IpcHandle> {
        if self.why != 0 {
            return None;
        }
        let mut bytes = [0; 64];
        for (part, word) in bytes.chunks_exact_mut(8).zip(self.ipc) {
            part.copy_from_slice(&word.to_ne_bytes());
        }
        Some(bytes)
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (part, word) in bytes.chunks_exact_mut(8).zip(self.uuid) {
            part.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// An export of GPU memory, on the owner's side.
#[derive(Debug)]
pub(crate) struct OnDevice {
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) device: Device,
    pub(crate) uuid: [u8; 16],
    /// Why others cannot map it.
    pub(crate) why: Option<Why>,
    record: Box<Record>,
    /// The pieces that the record refers to.
    _pieces: Box<[Segment]>,
}

impl OnDevice {
    /// The address of the record.
    pub(crate) fn record(&self) -> u64 {
        std::ptr::from_ref::<Record>(&self.record) as u64
    }
}

impl Cuda {
    /// Describes memory to offer, after waiting for its stream. None if it is not a GPU's.
    pub(crate) fn offer(self: &Arc<Self>, segments: &Segments) -> Result<Option<OnDevice>, TransferError> {
        let Space::Cuda { .. } = segments.space() else { return Ok(None) };
        let Some(about) = self.about(segments)? else {
            // It has no bytes, so nobody asks the driver about it, here or elsewhere.
            let (cuda, record) = (Arc::clone(self), Box::new(Record::empty()));
            return Ok(Some(OnDevice { cuda, device: 0, uuid: [0; 16], why: None, record, _pieces: Box::default() }));
        };
        self.settle(segments)?;
        let driver = self.driver()?;
        let uuid = driver.uuids().get(about.device).copied().unwrap_or_default();
        let pieces: Box<[Segment]> = segments.list().into();
        let inside = |piece: &Segment| piece.addr >= about.base && piece.addr + piece.len <= about.base + about.len;
        let ipc = if !about.shareable {
            Err(Why::Kind)
        } else if !pieces.iter().all(inside) {
            Err(Why::Several)
        } else {
            driver.share(about.device, about.base).map_err(|_| Why::Refused)
        };
        let (why, record) = (ipc.as_ref().err().copied(), Box::new(Record::new(&about, &uuid, ipc, &pieces)));
        Ok(Some(OnDevice { cuda: Arc::clone(self), device: about.device, uuid, why, record, _pieces: pieces }))
    }
}
