//! Memory of other processes of this host, read and written by cross-memory calls without the owner's doing.

use super::{Capabilities, Op, Peer, Transport, Work};
use crate::cma::{Other, Way};
use crate::control::{Control, Leased, Offered, identity};
use crate::error::{ErrorKind, TransferError};
use crate::exports::Exports;
use crate::handle::{Handle, is_same};
use crate::realm::{Realm, namespace};
use crate::segments::{MAX_SEGMENTS, Segment, Segments};
use crate::watch::Watch;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) const NAME: &str = "shm";
/// Short copies that go in one call together.
const GROUP: usize = 64;
const SHORT: u64 = 64 * 1024;
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
    /// A lease of the operation's export, after all that the owner would check.
    fn enter(&self, op: &Op) -> Result<(Leased<'_>, Arc<Known>), TransferError> {
        let Handle { slot, generation, token, start, .. } = *op.handle;
        let lease = self.control.lease(self.me, slot, generation)?;
        let offered = lease.offered();
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
        let known = self.known(slot, generation, offered)?;
        Ok((lease, known))
    }

    /// Where the bytes are, asked of the owner's memory the first time. Under a lease.
    fn known(&self, slot: u32, generation: u32, offered: Offered) -> Result<Arc<Known>, TransferError> {
        let lock = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&(slot, generation))
            && known.offered == offered
        {
            return Ok(Arc::clone(known));
        }
        let damaged = || TransferError::gone("the owner's table of buffers is damaged");
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
        let (_lease, known) = self.enter(op)?;
        let (way, local) = copy_of(&op.work)?;
        let (offset, len) = op.work.span();
        // SAFETY: as the caller vouches; that it is inside the owner's memory was just checked, under the lease.
        unsafe { self.other.carry(way, (local, 0), (&known.segments, op.handle.start + offset), len, watch) }
    }

    /// Short copies of one direction, in as few calls as they need.
    fn run_group(&self, way: Way, ops: &[Op]) -> Result<(), TransferError> {
        let entered: Vec<_> = ops.iter().map(|op| self.enter(op)).collect::<Result<_, _>>()?;
        let local = ops.iter().flat_map(|op| match &op.work {
            Work::Read { local, .. } | Work::Write { local, .. } => local.list(),
            _ => &[],
        });
        let remote = ops.iter().zip(&entered).flat_map(|(op, (_, known))| {
            let (offset, len) = op.work.span();
            known.segments.window(op.handle.start + offset, len)
        });
        self.other.step(way, local.copied(), remote)
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
    unsafe fn run(&self, ops: &mut [Op], watch: &Watch) -> Result<(), TransferError> {
        let mut rest: &[Op] = ops;
        while let Some(first) = rest.first() {
            watch.check()?;
            let (way, _) = copy_of(&first.work)?;
            let joins = |op: &Op| op.work.span().1 <= SHORT && copy_of(&op.work).is_ok_and(|(other, _)| other == way);
            let count = rest.iter().take(GROUP).take_while(|op| joins(op)).count();
            let (group, after) = rest.split_at(count.max(1));
            if count > 1 {
                self.run_group(way, group)?;
            } else {
                // SAFETY: as the caller vouches.
                unsafe { self.run_one(first, watch)? };
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
