//! Memory of other processes of this host, read and written by cross-memory calls without the owner's doing.

use super::{Capabilities, Op, Peer, Transport, Work};
use crate::cma::{Lists, Other, Way, in_lanes};
use crate::control::{Control, Offered, identity};
use crate::error::{ErrorKind, TransferError};
use crate::exports::Exports;
use crate::handle::{Handle, is_same};
use crate::realm::{Realm, namespace};
use crate::segments::{MAX_SEGMENTS, Segment, Segments};
use crate::watch::Watch;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) const NAME: &str = "shm";
/// Copies that go under one lease together, at most, and about how many bytes.
const GROUP: usize = 1000;
const TOGETHER: u64 = 4 << 20;
/// What is moved in one call.
const SHORT: u64 = 1 << 20;
/// From here on a copy is shared among cores by itself.
const LARGE: u64 = 8 << 20;
/// Exports of a peer whose pieces are remembered.
const KNOWN: usize = 1 << 16;

/// The transport, in this process.
#[derive(Debug)]
pub(crate) struct Shm {
    realm: Realm,
    namespace: u64,
}

impl Shm {
    pub(crate) fn new(realm: &Realm) -> Self {
        Self { realm: realm.clone(), namespace: namespace("pid") }
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { copies: true, atomics: false, remote: false, one_sided: true }
    }

    fn probe(&self) -> Result<(), TransferError> {
        if self.namespace == 0 {
            return Err(TransferError::transport("cannot read /proc/self/ns/pid. Mount /proc in the container."));
        }
        // By the same call that transfers use; a sandbox may forbid it.
        let witness = crate::witness::Witness::raise(&self.realm.id, self.realm.pid)?;
        Other { pid: self.realm.pid, witness: witness.addr(), realm: self.realm.id }.check()
    }

    fn offer(&self, exports: &Arc<Exports>) -> Result<Vec<u8>, TransferError> {
        let mut section = exports.descriptor().to_le_bytes().to_vec();
        section.extend_from_slice(&self.namespace.to_le_bytes());
        Ok(section)
    }

    fn connect(&self, handle: &Handle, section: &[u8], _watch: &Watch) -> Result<Arc<dyn Peer>, TransferError> {
        let (Some(fd), Some(there), 12) = (number::<4>(section, 0), number::<8>(section, 4), section.len()) else {
            return Err(TransferError::invalid("the handle's part for the transport shm is damaged"));
        };
        if there != self.namespace {
            return Err(TransferError::transport("its owner is in another pid namespace, such as another container"));
        }
        let fd = u32::try_from(fd).unwrap_or(u32::MAX);
        let control = Control::attach(handle.pid, fd, &handle.realm)?;
        let other = Other { pid: handle.pid, witness: control.witness(), realm: handle.realm };
        other.check()?;
        let me = identity(self.realm.pid, self.realm.started);
        Ok(Arc::new(ShmPeer { control, other, me, known: Mutex::default() }))
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut padded = [0; 8];
    padded[..N].copy_from_slice(bytes.get(at..at + N)?);
    Some(u64::from_le_bytes(padded))
}

#[derive(Debug)]
struct ShmPeer {
    control: Control,
    other: Other,
    me: u64,
    /// Where the bytes of exports lie in the owner, by slot and generation.
    known: Mutex<HashMap<(u32, u32), Arc<Known>>>,
}

#[derive(Debug)]
struct Known {
    offered: Offered,
    segments: Segments,
}

impl ShmPeer {
    /// Where the memory of the operation's export is, after all that the owner would check. Under a lease of it.
    fn place(&self, op: &Op, offered: Offered) -> Result<Segments, TransferError> {
        let Handle { slot, generation, token, start, .. } = *op.handle;
        if !is_same(&offered.token, &token) {
            return Err(TransferError::new(ErrorKind::Refused, "the owner does not recognise this handle"));
        }
        let (offset, len) = op.work.span();
        let end = start.checked_add(offset).and_then(|at| at.checked_add(len));
        if end.is_none_or(|end| end > offered.length) {
            return Err(TransferError::new(ErrorKind::Refused, "the handle names more than the owner offers"));
        }
        if op.work.writes() && !offered.writable {
            return Err(TransferError::new(ErrorKind::Refused, "the owner offers this memory for reading only"));
        }
        if offered.one_piece {
            let one = Segments::one(offered.pieces_at, offered.length);
            return if one.len() == offered.length { Ok(one) } else { Err(damaged()) };
        }
        Ok(self.known(slot, generation, offered)?.segments.clone())
    }

    /// Where the bytes are, asked of the owner's memory the first time. Under a lease.
    fn known(&self, slot: u32, generation: u32, offered: Offered) -> Result<Arc<Known>, TransferError> {
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&(slot, generation))
            && known.offered == offered
        {
            return Ok(Arc::clone(known));
        }
        let count = usize::try_from(offered.pieces).ok().filter(|n| *n <= MAX_SEGMENTS).ok_or_else(damaged)?;
        let mut list = vec![Segment { addr: 0, len: 0 }; count];
        let bytes = (count * size_of::<Segment>()) as u64;
        let here = Segments::one(list.as_mut_ptr() as u64, bytes);
        let there = Segments::new([Segment { addr: offered.pieces_at, len: bytes }]).map_err(|_| damaged())?;
        self.other.step(Way::Read, here.window(0, bytes), there.window(0, bytes))?;
        let segments = Segments::new(std::hint::black_box(list)).map_err(|_| damaged())?;
        if segments.len() != offered.length {
            return Err(damaged());
        }
        let known = Arc::new(Known { offered, segments });
        let mut all = lock();
        if all.len() >= KNOWN {
            all.clear();
        }
        all.insert((slot, generation), Arc::clone(&known));
        Ok(known)
    }

    /// # Safety
    /// As for [`Peer::run`].
    unsafe fn run_one(&self, op: &Op, watch: &Watch) -> Result<(), TransferError> {
        let (way, local) = copy_of(&op.work)?;
        let (lease, offered) = self.control.lease(self.me, op.handle.slot, op.handle.generation)?;
        let there = self.place(op, offered)?;
        let (offset, len) = op.work.span();
        let (local, remote) = ((local, 0), (&there, op.handle.start + offset));
        let done = if len <= SHORT {
            let mut lists = Lists::new(&self.other, way, 1);
            lists.add(local, remote, len).and_then(|()| lists.flush())
        } else {
            // SAFETY: as the caller vouches; that it is inside the owner's memory was just checked, under the lease.
            unsafe { self.other.carry(way, local, remote, len, watch) }
        };
        drop(lease);
        done
    }

    /// Copies of one direction that are not large, in as few calls as they need.
    fn run_many(&self, way: Way, ops: &[Op], watch: &Watch) -> Result<(), TransferError> {
        let left = Mutex::new(ops);
        let bytes = ops.iter().map(|op| op.work.span().1).sum();
        in_lanes(bytes, || {
            let group = {
                let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
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
            self.run_group(way, group)?;
            Ok(!group.is_empty())
        })
    }

    fn run_group(&self, way: Way, ops: &[Op]) -> Result<(), TransferError> {
        // LSE-4
        let lease = self.control.lease_every(self.me)?;
        let mut lists = Lists::new(&self.other, way, ops.len());
        for op in ops {
            let (_, local) = copy_of(&op.work)?;
            let there = self.place(op, lease.offered(op.handle.slot, op.handle.generation)?)?;
            let (offset, len) = op.work.span();
            lists.add((local, 0), (&there, op.handle.start + offset), len)?;
        }
        lists.flush()
    }
}

fn damaged() -> TransferError {
    TransferError::gone("the owner's table of buffers is damaged")
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
                many => self.run_many(way, many, watch)?,
            }
            rest = after;
        }
        Ok(())
    }

    fn is_alive(&self) -> bool {
        self.other.check().is_ok()
    }

    fn is_quick(&self) -> bool {
        true
    }
}
