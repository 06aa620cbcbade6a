//! Memory of other processes on this host, read and written without involving the owner: by cross-memory calls or, if
//! the memory is from the owner's pool, through a mapping.
//!
//! MAP-1: a mapping outlives its owner. After a copy through it, the owner's witness is checked to see that the owner
//! still exists.

use super::same_host::{Here, Known, Owner, check, damaged, page};
use super::{Capabilities, Peer, Transport};
use crate::bytes::Reader;
use crate::cma::{Lists, Other, Way, in_lanes};
use crate::control::Offered;
use crate::copy::copy;
use crate::error::TransferError;
use crate::exports::{Export, Exports};
use crate::handle::Handle;
use crate::lock;
use crate::operation::Op;
use crate::operation::Work;
use crate::pool::{Mapping, Pooled};
use crate::realm::Realm;
use crate::segments::Segments;
use crate::watch::Watch;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub(crate) const NAME: &str = "shm";
/// The most copies under one lease, and roughly the most bytes.
const GROUP: usize = 1000;
const TOGETHER: u64 = 4 << 20;
/// Copies up to this length are moved in one call.
const SHORT: u64 = 1 << 20;
/// The most arenas of a peer mapped at once.
const ARENAS: usize = 64;
/// How long the kernel's calls replace the mapping of an arena that could not be mapped.
const AGAIN: Duration = Duration::from_secs(5);
/// A copy of at least this length is shared among cores on its own.
const LARGE: u64 = 8 << 20;

/// The transport in this process.
#[derive(Debug)]
pub(crate) struct Shm(Here);

impl Shm {
    pub(crate) fn new(realm: &Realm) -> Self {
        Self(Here::new(realm))
    }
}

impl Transport for Shm {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: false, remote: false, one_sided: true }
    }

    fn probe(&self) -> Result<(), TransferError> {
        self.0.probe()?;
        let realm = &self.0.realm;
        // The call that transfers use; a sandbox may forbid it.
        let witness = crate::witness::Witness::raise(&realm.id, realm.pid)?;
        Other { pid: realm.pid, witness: witness.addr(), realm: realm.id }.check()
    }

    fn offer(&self, exports: &Arc<Exports>, _export: &Arc<Export>) -> Result<Vec<u8>, TransferError> {
        let mut section = exports.descriptor().to_le_bytes().to_vec();
        section.extend_from_slice(&self.0.namespace.to_le_bytes());
        Ok(section)
    }

    fn why_not(&self, _handle: &Handle, section: &[u8]) -> Option<String> {
        let (_, namespace) = place(section).ok()?;
        self.0.why_apart(namespace).map(str::to_owned)
    }

    fn connect(&self, handle: &Handle, section: &[u8], _watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let owner = self.0.attach(handle, place(section)?)?;
        Ok(Arc::new(ShmPeer { owner, known: Known::default(), mapped: Mutex::default() }))
    }
}

/// Where the owner's control page is.
fn place(section: &[u8]) -> Result<(u32, u64), TransferError> {
    let mut rest =
        Reader::new(section, || TransferError::invalid("the handle's part for the transport shm is damaged"));
    let page = page(&mut rest)?;
    rest.end()?;
    Ok(page)
}

#[derive(Debug)]
struct ShmPeer {
    owner: Owner,
    /// Where the bytes of exports are in the owner.
    known: Known<Segments>,
    /// The owner's arenas that are mapped here, by descriptor and number; or when mapping failed.
    mapped: Mutex<HashMap<(u32, u32), Mapped>>,
}

type Mapped = Result<Arc<Mapping>, Instant>;
/// A mapped arena, by descriptor and number.
type Last = ((u32, u32), Arc<Mapping>);

/// Where an export's memory is.
enum Place {
    /// In the owner's address space.
    There(Segments),
    /// Mapped here, at this offset.
    Here(Arc<Mapping>, u64),
}

impl ShmPeer {
    /// Finds the memory of the operation's export, after all checks that the owner would make. Needs a lease of it.
    fn place(&self, op: &Op, offered: Offered, last: &mut Option<Last>) -> Result<Place, TransferError> {
        check(op, &offered)?;
        // CUD-1
        if offered.cuda {
            return Err(TransferError::transport("it is memory of a GPU, which the kernel does not copy"));
        }
        if let Some(pooled) = offered.pooled
            && let Some(map) = self.mapping_after(pooled, last)
        {
            map.at(pooled.offset, offered.length).ok_or_else(damaged)?;
            return Ok(Place::Here(map, pooled.offset));
        }
        if offered.one_piece {
            let one = Segments::one(offered.pieces_at, offered.length);
            return if one.len() == offered.length { Ok(Place::There(one)) } else { Err(damaged()) };
        }
        Ok(Place::There(Segments::clone(&*self.known(op, offered)?)))
    }

    /// Like `mapping`, but tries the last one first.
    fn mapping_after(&self, pooled: Pooled, last: &mut Option<Last>) -> Option<Arc<Mapping>> {
        let name = (pooled.fd, pooled.id);
        if let Some((known, map)) = last
            && *known == name
        {
            return Some(Arc::clone(map));
        }
        let map = self.mapping(pooled)?;
        *last = Some((name, Arc::clone(&map)));
        Some(map)
    }

    /// Maps the arena; none if that is impossible now: the kernel's calls reach the memory, too.
    fn mapping(&self, pooled: Pooled) -> Option<Arc<Mapping>> {
        let mut mapped = lock(&self.mapped);
        match mapped.get(&(pooled.fd, pooled.id)) {
            Some(Ok(map)) => return Some(Arc::clone(map)),
            Some(Err(since)) if since.elapsed() < AGAIN => return None,
            _ => {}
        }
        let made = Mapping::attach(self.owner.other.pid, pooled).map(Arc::new);
        // Another arena under the same descriptor no longer exists.
        mapped.retain(|(fd, _), _| *fd != pooled.fd);
        if mapped.len() >= ARENAS {
            mapped.clear();
        }
        let made = made.map_err(|_| Instant::now());
        mapped.insert((pooled.fd, pooled.id), made.clone());
        made.ok()
    }

    /// Copies between memory of this process and an arena.
    ///
    /// # Safety
    /// As for [`Peer::run`]. The window must lie inside the arena.
    unsafe fn copy(
        way: Way,
        local: (&Segments, u64),
        (map, at): (&Mapping, u64),
        len: u64,
        is_one_of_many: bool,
    ) -> Result<(), TransferError> {
        let mut place = map.at(at, len).ok_or_else(damaged)?;
        for piece in local.0.window(local.1, len) {
            let (here, len) = (piece.addr as *mut u8, piece.len as usize);
            // SAFETY: as the caller vouches, and inside the mapping, as checked above.
            unsafe {
                match way {
                    Way::Read => copy(place, here, len, is_one_of_many),
                    Way::Write => copy(here, place, len, is_one_of_many),
                }
            }
            place = place.wrapping_add(len);
        }
        Ok(())
    }

    /// Copies much between memory of this process and an arena.
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn copy_large(
        way: Way,
        local: &Segments,
        (map, from): (&Mapping, u64),
        len: u64,
        watch: &Watch,
    ) -> Result<(), TransferError> {
        let next = AtomicU64::new(0);
        in_lanes(len, || {
            let at = next.fetch_add(TOGETHER, Ordering::Relaxed);
            if at >= len {
                return Ok(false);
            }
            watch.check()?;
            // SAFETY: as the caller vouches.
            unsafe { Self::copy(way, (local, at), (map, from + at), TOGETHER.min(len - at), false)? };
            Ok(true)
        })
    }

    /// Where the bytes are; read from the owner's memory the first time. Needs a lease.
    fn known(&self, op: &Op, offered: Offered) -> Result<Arc<Segments>, TransferError> {
        self.known.get(op, offered, || {
            let segments = self.owner.read_list(offered.pieces_at, offered.pieces)?;
            if segments.len() == offered.length { Ok(segments) } else { Err(damaged()) }
        })
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_one(&self, op: &Op, watch: &Watch) -> Result<(), TransferError> {
        let (way, local) = copy_of(&op.work)?;
        let (lease, offered) = self.owner.control.lease(self.owner.me, op.handle.slot, op.handle.generation)?;
        let (offset, len) = op.work.span();
        let start = op.handle.start + offset;
        let done = match self.place(op, offered, &mut None)? {
            Place::Here(map, at) => {
                // SAFETY: as the caller vouches.
                let copied = unsafe { Self::copy_large(way, local, (&map, at + start), len, watch) };
                // MAP-1
                copied.and_then(|()| self.owner.other.check())
            }
            Place::There(there) if len <= SHORT => {
                let mut lists = Lists::new(&self.owner.other, way, 1);
                lists.add((local, 0), (&there, start), len).and_then(|()| lists.flush())
            }
            // SAFETY: as the caller vouches; it was checked to be inside the owner's memory, under the lease.
            Place::There(there) => unsafe { self.owner.other.carry(way, (local, 0), (&there, start), len, watch) },
        };
        drop(lease);
        done
    }

    /// Copies in one direction, none of them large, in as few calls as possible.
    ///
    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_many(&self, way: Way, ops: &[Op], watch: &Watch) -> Result<(), TransferError> {
        let left = Mutex::new(ops);
        let bytes: u64 = ops.iter().map(|op| op.work.span().1).sum();
        in_lanes(bytes, || {
            let group = {
                let mut left = lock(&left);
                let mut bytes = 0;
                let fits = |op: &&Op| {
                    let has_room = bytes < TOGETHER;
                    bytes += op.work.span().1;
                    has_room
                };
                let count = left.iter().take(GROUP).take_while(fits).count();
                let (group, rest) = left.split_at(count);
                *left = rest;
                group
            };
            watch.check()?;
            // SAFETY: as the caller vouches.
            unsafe { self.run_group(way, group, bytes >= LARGE)? };
            Ok(!group.is_empty())
        })
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_group(&self, way: Way, ops: &[Op], is_much: bool) -> Result<(), TransferError> {
        // LSE-4
        let lease = self.owner.control.lease_every(self.owner.me)?;
        let mut lists = Lists::new(&self.owner.other, way, ops.len());
        let mut is_mapped = false;
        // The next copy is nearly always in the same arena; remembering it avoids contention for the shared table.
        let mut last = None;
        for op in ops {
            let (_, local) = copy_of(&op.work)?;
            let (offset, len) = op.work.span();
            let start = op.handle.start + offset;
            match self.place(op, lease.offered(op.handle.slot, op.handle.generation)?, &mut last)? {
                Place::Here(map, at) => {
                    // SAFETY: as the caller vouches.
                    unsafe { Self::copy(way, (local, 0), (&map, at + start), len, is_much)? };
                    is_mapped = true;
                }
                Place::There(there) => lists.add((local, 0), (&there, start), len)?,
            }
        }
        lists.flush()?;
        // MAP-1
        if is_mapped { self.owner.other.check() } else { Ok(()) }
    }
}

fn copy_of(work: &Work) -> Result<(Way, &Segments), TransferError> {
    match work {
        Work::Read { local, .. } => Ok((Way::Read, local)),
        Work::Write { local, .. } => Ok((Way::Write, local)),
        _ => Err(TransferError::transport("shared memory has no atomic operations; the owner carries them out")),
    }
}

impl Peer for ShmPeer {
    unsafe fn run(&self, ops: &[Op], _found: &mut [u64], watch: &Watch) -> Result<(), TransferError> {
        let mut rest = ops;
        while let Some(first) = rest.first() {
            watch.check()?;
            let (way, _) = copy_of(&first.work)?;
            let joins = |op: &&Op| op.work.span().1 < LARGE && copy_of(&op.work).is_ok_and(|(other, _)| other == way);
            let count = rest.iter().take_while(joins).count();
            let (group, after) = rest.split_at(count.max(1));
            match group {
                // SAFETY: as the caller vouches.
                [one] => unsafe { self.run_one(one, watch)? },
                // SAFETY: as above.
                many => unsafe { self.run_many(way, many, watch)? },
            }
            rest = after;
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        self.owner.other.check().is_ok()
    }

    fn is_quick(&self) -> bool {
        true
    }
}
