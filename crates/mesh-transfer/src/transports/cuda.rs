//! GPU memory of other processes on this host, mapped by CUDA IPC: the reader's driver copies it without involving the
//! owner.
//!
//! The handle says where the owner's control page is (see `shm.rs`) and which GPU holds the memory. The data needed to
//! map it is in the owner's memory and is read from there under a lease, so a forged handle opens nothing.

use super::same_host::{Here, Known, Owner, check, damaged, page};
use super::{Capabilities, Peer, Transport};
use crate::bytes::Reader;
use crate::cma::Other;
use crate::control::{Control, Held, Offered};
use crate::cuda::{Cuda, Device, Driver, Record, STEP, Why, rows_of};
use crate::error::{ErrorKind, TransferError};
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::lock;
use crate::operation::Op;
use crate::operation::Work;
use crate::realm::Realm;
use crate::segments::{Segment, Segments};
use crate::watch::Watch;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

pub(crate) const NAME: &str = "cuda";
const VERSION: u8 = 1;
/// The most allocations of a peer mapped at once.
const MAPPED: usize = 64;
/// The most copies under one lease, and roughly the most bytes.
const GROUP: usize = 1000;
const TOGETHER: u64 = 256 << 20;
/// A copy of at least this size has its own lease.
const LARGE: u64 = 8 << 20;
/// How often to check that the owner of mapped memory is alive.
const LOOK: Duration = Duration::from_millis(500);

/// The transport in this process.
#[derive(Debug)]
pub(crate) struct CudaIpc {
    here: Here,
    cuda: Arc<Cuda>,
}

impl CudaIpc {
    pub(crate) fn new(realm: &Realm, cuda: &Arc<Cuda>) -> Self {
        Self { here: Here::new(realm), cuda: Arc::clone(cuda) }
    }
}

/// The contents of a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    why: Option<Why>,
    fd: u32,
    namespace: u64,
    uuid: [u8; 16],
}

impl Place {
    fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION, self.why.map_or(0, |why| why as u8)];
        out.extend_from_slice(&self.fd.to_le_bytes());
        out.extend_from_slice(&self.namespace.to_le_bytes());
        out.extend_from_slice(&self.uuid);
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let damaged = || TransferError::invalid("the handle's part for the transport cuda is damaged");
        if bytes.first().is_some_and(|version| *version > VERSION) {
            return Err(TransferError::transport("its owner has a later version of mesh-rdma; install that here too"));
        }
        let mut rest = Reader::new(bytes, damaged);
        let [version, word] = rest.array()?;
        let why = match word {
            0 => None,
            word => Some(Why::ALL.into_iter().find(|why| *why as u8 == word).ok_or_else(damaged)?),
        };
        let ((fd, namespace), uuid) = (page(&mut rest)?, rest.array()?);
        rest.end()?;
        if version == VERSION { Ok(Self { why, fd, namespace, uuid }) } else { Err(damaged()) }
    }
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

fn not_visible(uuid: &[u8; 16]) -> String {
    format!(
        "this process does not see the GPU that it lies on, {}. Add it to CUDA_VISIBLE_DEVICES, or have the owner copy it",
        uuid_text(uuid)
    )
}

impl Transport for CudaIpc {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: false, remote: false, one_sided: true }
    }

    fn probe(&self) -> Result<(), TransferError> {
        self.here.probe()?;
        self.cuda.probe()
    }

    fn takes_cuda(&self) -> bool {
        true
    }

    fn takes_host(&self) -> bool {
        false
    }

    fn offer(&self, exports: &Arc<Exports>, export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        let Some(on) = &export.on_device else {
            return Err(TransferError::transport("it only transfers GPU memory"));
        };
        let fd = exports.descriptor();
        Ok(Place { why: on.why, fd, namespace: self.here.namespace, uuid: on.uuid }.encode())
    }

    fn why_not(&self, handle: &Handle, section: &[u8]) -> Option<String> {
        let place = match Place::decode(section) {
            Ok(place) => place,
            Err(error) => return Some(error.message),
        };
        if handle.realm == self.here.realm.id || handle.length == 0 {
            return None;
        }
        if let Some(why) = self.here.why_apart(place.namespace) {
            return Some(why.to_owned());
        }
        if let Some(why) = place.why {
            return Some(why.words().to_owned());
        }
        match self.cuda.find(&place.uuid) {
            Ok(Some(_)) => None,
            Ok(None) => Some(not_visible(&place.uuid)),
            Err(error) => Some(error.message),
        }
    }

    fn connect(&self, handle: &Handle, section: &[u8], _watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let place = Place::decode(section)?;
        let owner = self.here.attach(handle, (place.fd, place.namespace))?;
        let is_own = handle.realm == self.here.realm.id;
        let (cuda, maps) = (Arc::clone(&self.cuda), Arc::default());
        Ok(Arc::new(CudaPeer { cuda, owner, is_own, known: Known::default(), maps }))
    }
}

#[derive(Debug)]
struct CudaPeer {
    cuda: Arc<Cuda>,
    owner: Owner,
    /// The owner is this process, which needs no mapping.
    is_own: bool,
    /// What the owner says of its exports.
    known: Known<Recorded>,
    maps: Arc<Mutex<Maps>>,
}

#[derive(Debug)]
struct Recorded {
    record: Record,
    segments: Segments,
}

/// Allocations of the owner that are mapped here.
#[derive(Debug, Default)]
struct Maps {
    by_name: HashMap<(u64, u64), Arc<Map>>,
    is_watched: bool,
}

#[derive(Debug)]
struct Map {
    driver: Arc<dyn Driver>,
    device: Device,
    base: u64,
    len: u64,
    /// CUD-2
    held: Held,
    pid: u32,
}

impl Drop for Map {
    fn drop(&mut self) {
        // CUD-3
        if crate::realm::pid() == self.pid {
            self.driver.close(self.device, self.base);
        }
    }
}

/// Unmaps what the owner no longer offers, so that it can free it. Returns after the last mapping.
fn watch_over(control: &Control, other: Other, maps: &Weak<Mutex<Maps>>) {
    loop {
        let seen = control.drained();
        let Some(table) = maps.upgrade() else { return };
        let is_gone = matches!(other.check(), Err(error) if error.kind == ErrorKind::Gone);
        let (gone, is_last) = {
            let mut table = lock(&table);
            let names: Vec<_> = table.by_name.iter().filter(|(_, map)| is_gone || !map.held.is_offered()).collect();
            let names: Vec<_> = names.into_iter().map(|(name, _)| *name).collect();
            let gone: Vec<_> = names.iter().filter_map(|name| table.by_name.remove(name)).collect();
            table.is_watched = !table.by_name.is_empty();
            (gone, !table.is_watched)
        };
        // Not under the lock, because unmapping waits for the GPU. A transfer that uses a mapping keeps it.
        drop(gone);
        drop(table);
        if is_last {
            return;
        }
        control.await_change(seen, LOOK);
    }
}

/// Where an operation's bytes are.
struct Found {
    device: Device,
    /// Mapped here, or this process's own.
    there: Segments,
    map: Option<Arc<Map>>,
}

/// Translates a piece of the owner's allocation, which begins at `base` there, to its mapping here.
fn moved_to(piece: Segment, base: u64, (here, len): (u64, u64)) -> Result<Segment, TransferError> {
    // CUD-4
    let at = piece.addr.checked_sub(base).ok_or_else(damaged)?;
    if at.checked_add(piece.len).is_none_or(|end| end > len) {
        return Err(damaged());
    }
    Ok(Segment { addr: here + at, len: piece.len })
}

impl CudaPeer {
    /// What the owner says of an export; read from its memory the first time. Needs a lease.
    fn known(&self, op: &Op, offered: Offered) -> Result<Arc<Recorded>, TransferError> {
        self.known.get(op, offered, || {
            let mut record = Record::empty();
            // SAFETY: the address of a record of this frame.
            unsafe { self.owner.read(offered.pieces_at, (&raw mut record) as u64, size_of::<Record>() as u64)? };
            let record = std::hint::black_box(record);
            if record.pieces == 0 || !record.is_one() {
                return Err(damaged());
            }
            let segments = self.owner.read_list(record.pieces_at, record.pieces)?;
            if segments.len() == offered.length { Ok(Recorded { record, segments }) } else { Err(damaged()) }
        })
    }

    /// Maps the allocation. Needs a lease of the export.
    fn map(&self, op: &Op, record: &Record) -> Result<Arc<Map>, TransferError> {
        let name = (record.base, record.id);
        let mut table = lock(&self.maps);
        if let Some(map) = table.by_name.get(&name)
            && map.held.is_offered()
        {
            return Ok(Arc::clone(map));
        }
        let device = self.cuda.find(&record.uuid())?;
        let device = device.ok_or_else(|| TransferError::transport(not_visible(&record.uuid())))?;
        // CUD-2: hold it before mapping it.
        let (held, _) = self.owner.control.hold(self.owner.me, op.handle.slot, op.handle.generation)?;
        let driver = Arc::clone(self.cuda.driver()?);
        let refused = || TransferError::refused("the owner does not share this memory of its GPU");
        let (base, len) = driver.open(device, &record.ipc().ok_or_else(refused)?)?;
        let map = Arc::new(Map { driver, device, base, len, held, pid: crate::realm::pid() });
        // Mappings in use are kept by their users.
        let full = if table.by_name.len() >= MAPPED { std::mem::take(&mut table.by_name) } else { HashMap::new() };
        let before = table.by_name.insert(name, Arc::clone(&map));
        if !table.is_watched {
            let (control, other, maps) =
                (Arc::clone(&self.owner.control), self.owner.other, Arc::downgrade(&self.maps));
            let watcher = std::thread::Builder::new().name("mesh-cuda".to_owned()).stack_size(128 * 1024);
            table.is_watched = watcher.spawn(move || watch_over(&control, other, &maps)).is_ok();
            if !table.is_watched {
                // Nobody would unmap it, so use it only this once.
                table.by_name.remove(&name);
            }
        }
        drop(table);
        drop((full, before));
        Ok(map)
    }

    /// Finds the memory of the operation's export, after all checks that the owner would make. Needs a lease of it.
    fn find(&self, op: &Op, offered: Offered) -> Result<Found, TransferError> {
        check(op, &offered)?;
        let (offset, len) = op.work.span();
        if !offered.cuda {
            return Err(TransferError::refused("the handle names memory of a GPU, but the owner's is not"));
        }
        if len == 0 {
            return Ok(Found { device: 0, there: Segments::default(), map: None });
        }
        let known = self.known(op, offered)?;
        let place = op.handle.start + offset;
        if self.is_own {
            let device = self.cuda.find(&known.record.uuid())?.ok_or_else(damaged)?;
            return Ok(Found { device, there: known.segments.cut(place, len), map: None });
        }
        let map = self.map(op, &known.record)?;
        let moved = known.segments.window(place, len);
        let moved = moved.map(|piece| moved_to(piece, known.record.base, (map.base, map.len)));
        let there = Segments::new(moved.collect::<Result<Vec<_>, _>>()?)?;
        Ok(Found { device: map.device, there, map: Some(map) })
    }

    /// Copies under leases that the caller holds.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn copy(&self, ops: &[(&Op, Found)], watch: &Watch) -> Result<(), TransferError> {
        let some = ops.iter().filter(|(_, found)| !found.there.is_empty());
        let mut devices: Vec<Device> = some.map(|(_, found)| found.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let mut lane = self.cuda.lane(device)?;
            let copies = ops.iter().filter(|(_, found)| found.device == device).flat_map(|(op, found)| {
                let (there, len) = (&found.there, found.there.len());
                let rows: Box<dyn Iterator<Item = _>> = match &op.work {
                    Work::Read { local, .. } => Box::new(rows_of(local.window(0, len), there.window(0, len), STEP)),
                    Work::Write { local, .. } => Box::new(rows_of(there.window(0, len), local.window(0, len), STEP)),
                    _ => Box::new(std::iter::empty()),
                };
                rows
            });
            // SAFETY: the local memory as the caller vouches; the other is mapped, or this process's own, and leased.
            let done = unsafe { lane.run(copies, watch) };
            if let Err(error) = done {
                self.forget(ops, &error);
                return Err(error);
            }
            self.cuda.give_lane(lane);
        }
        if self.is_own { Ok(()) } else { self.owner.other.check() }
    }

    /// Unmaps memory on which a copy failed: its context may be gone.
    fn forget(&self, ops: &[(&Op, Found)], error: &TransferError) {
        if error.kind != ErrorKind::Transport {
            return;
        }
        let gone: Vec<_> = {
            let mut table = lock(&self.maps);
            let maps = ops.iter().filter_map(|(_, found)| found.map.as_ref());
            let names: Vec<_> = maps
                .filter_map(|map| {
                    table.by_name.iter().find(|(_, other)| Arc::ptr_eq(other, map)).map(|(name, _)| *name)
                })
                .collect();
            names.iter().filter_map(|name| table.by_name.remove(name)).collect()
        };
        drop(gone);
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_one(&self, op: &Op, watch: &Watch) -> Result<(), TransferError> {
        let (lease, offered) = self.owner.control.lease(self.owner.me, op.handle.slot, op.handle.generation)?;
        let found = self.find(op, offered)?;
        // SAFETY: as the caller vouches, under the lease.
        let done = unsafe { self.copy(&[(op, found)], watch) };
        drop(lease);
        done
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_many<'a>(&self, ops: &'a [Op], watch: &Watch) -> Result<(), TransferError> {
        // LSE-4
        let lease = self.owner.control.lease_every(self.owner.me)?;
        let find = |op: &'a Op| {
            let Handle { slot, generation, .. } = *op.handle;
            Ok((op, self.find(op, lease.offered(slot, generation)?)?))
        };
        let found = ops.iter().map(find).collect::<Result<Vec<_>, TransferError>>()?;
        // SAFETY: as the caller vouches, under the lease.
        let done = unsafe { self.copy(&found, watch) };
        drop(lease);
        done
    }
}

impl CudaPeer {
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_all(&self, ops: &[Op], watch: &Watch) -> Result<(), TransferError> {
        if ops.iter().any(|op| op.work.is_atomic()) {
            return Err(TransferError::transport("memory of a GPU has no atomic operations"));
        }
        let mut rest = ops;
        while let Some(first) = rest.first() {
            watch.check()?;
            let mut bytes = 0;
            let joins = |op: &&Op| {
                bytes += op.work.span().1;
                op.work.span().1 < LARGE && bytes < TOGETHER
            };
            let count = rest.iter().take(GROUP).take_while(joins).count();
            let (group, after) = rest.split_at(count.max(1));
            // SAFETY: as the caller vouches.
            unsafe {
                match count {
                    0 | 1 => self.run_one(first, watch)?,
                    _ => self.run_many(group, watch)?,
                }
            }
            rest = after;
        }
        Ok(())
    }
}

impl Peer for CudaPeer {
    unsafe fn run(&self, ops: &[Op], _found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        // SAFETY: as the caller vouches.
        match unsafe { self.run_all(ops, watch) } {
            // The driver cannot tell the memory of an ended process from memory that never existed.
            Err(error) if error.kind == ErrorKind::Transport && !self.is_own => Err(match self.owner.other.check() {
                Err(gone) if gone.kind == ErrorKind::Gone => gone,
                _ => error,
            }),
            done => done,
        }
    }

    fn takes_cuda(&self) -> bool {
        true
    }

    fn is_alive(&self) -> bool {
        self.owner.other.check().is_ok()
    }

    fn is_quick(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_nothing_else_is() {
        for why in Why::ALL.into_iter().map(Some).chain([None]) {
            let place = Place { why, fd: 7, namespace: 1 << 40, uuid: [9; 16] };
            let bytes = place.encode();
            assert_eq!(Place::decode(&bytes).unwrap(), place);
            for cut in 0..bytes.len() {
                assert!(Place::decode(&bytes[..cut]).is_err(), "{cut} of {} bytes", bytes.len());
            }
            assert!(Place::decode(&[&bytes[..], &[0]].concat()).is_err());
            let word = |at: usize, word: u8| {
                let mut changed = bytes.clone();
                changed[at] = word;
                Place::decode(&changed).unwrap_err()
            };
            assert_eq!(word(0, 0).kind, ErrorKind::Invalid);
            assert_eq!(word(1, 99).kind, ErrorKind::Invalid);
            // A reason from a later version: other transports may carry it.
            assert_eq!(word(0, 2).kind, ErrorKind::Transport);
        }
    }

    /// CUD-4
    #[test]
    fn nothing_outside_of_the_mapping_is_named() {
        let (base, map) = (1 << 40, (1 << 30, 4096));
        let moved = |addr, len| moved_to(Segment { addr, len }, base, map);
        assert_eq!(moved(base + 96, 4000).unwrap(), Segment { addr: (1 << 30) + 96, len: 4000 });
        for (addr, len) in [(base - 1, 2), (base, 4097), (base + 4096, 1), (0, 8), (base + 1, u64::MAX), (u64::MAX, 1)]
        {
            assert_eq!(moved(addr, len).unwrap_err().kind, ErrorKind::Gone, "{len} bytes at {addr:#x}");
        }
    }

    #[test]
    fn a_gpu_is_named_as_the_driver_names_it() {
        let uuid = std::array::from_fn(|at| at as u8);
        assert_eq!(uuid_text(&uuid), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
