//! Frames from segments, with large parts in memory that the processes of this host map.

use super::Process;
use crate::locks::lock;
use crate::shm::{Memory, Room};
use crate::spin_board::SpinBoard;
use bytes::Bytes;
use mesh_proto::{Frame, HEADER_LEN, Header, HostNo, Kind, Part, Placement, ProcAddr, Sharing, Target};
use mesh_topology::{Region, Slice};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Whether the receivers of such a message map its large parts.
pub(crate) fn is_mapped(kind: Kind) -> bool {
    matches!(kind, Kind::Call | Kind::Tell | Kind::Reply | Kind::Post | Kind::Spawn | Kind::Partial | Kind::Extend)
}

/// A frame whose segments are arriving.
#[derive(Debug)]
struct Assembly {
    total: u64,
    arrived: u64,
    into: Into,
}

#[derive(Debug)]
enum Into {
    /// One piece of memory.
    Whole(Vec<u8>),
    /// The header and other small pieces, and the parts; large ones in memory that their receivers will map.
    Parts { header: Header, fixed: Bytes, parts: Vec<Slot>, sharing: Sharing },
}

/// A part, and its place in the frame.
#[derive(Debug)]
struct Slot {
    start: u64,
    len: u64,
    data: Data,
}

#[derive(Debug)]
enum Data {
    Inline(Vec<u8>),
    Shared(Room),
}

impl Slot {
    /// Takes its share of `bytes`, which begin at `offset` in the frame.
    fn take(&mut self, offset: u64, bytes: &[u8]) {
        let (low, high) = (offset.max(self.start), (offset + bytes.len() as u64).min(self.start + self.len));
        if low >= high {
            return;
        }
        // Both lie in the slice: they were cut to it.
        let own = &bytes[(low - offset) as usize..(high - offset) as usize];
        match &mut self.data {
            Data::Inline(data) => data.extend_from_slice(own),
            Data::Shared(room) => room.write((low - self.start) as usize, own),
        }
    }
}

impl Assembly {
    fn take(&mut self, offset: u64, body: &[Bytes]) {
        let mut at = offset;
        for piece in body {
            match &mut self.into {
                Into::Whole(bytes) => bytes.extend_from_slice(piece),
                Into::Parts { parts, .. } => {
                    let end = at + piece.len() as u64;
                    let first = parts.partition_point(|slot| slot.start + slot.len <= at);
                    let slots = parts[first..].iter_mut().take_while(|slot| slot.start < end);
                    slots.for_each(|slot| slot.take(at, piece));
                }
            }
            at += piece.len() as u64;
        }
        self.arrived = at;
    }

    fn finish(self) -> Option<Frame> {
        match self.into {
            Into::Whole(bytes) => Frame::from_pieces(&[Bytes::from(bytes)]),
            Into::Parts { mut header, fixed, parts, sharing } => {
                let cut = header.target_len as usize;
                let cast = if cut == 0 { None } else { Target::from_wire(header.dst.mesh, &fixed[..cut]).ok() };
                let parts: Vec<Part> = parts
                    .into_iter()
                    .map(|slot| match slot.data {
                        Data::Inline(data) => Part::Inline(data.into()),
                        Data::Shared(room) => {
                            let len = room.len() as u64;
                            Part::Shared { at: room.done(), len }
                        }
                    })
                    .collect();
                header.set_sharing(sharing);
                Some(Frame::build(header, cast.as_ref(), &fixed[cut..], &parts))
            }
        }
    }
}

/// See the module: frames of which some segments arrived.
#[derive(Debug)]
pub(super) struct Assemblies {
    me: ProcAddr,
    memory: Arc<Memory>,
    board: Arc<SpinBoard>,
    /// Parts of at least this length go into shared memory.
    threshold: usize,
    begun: Mutex<HashMap<(HostNo, u32), Assembly>>,
}

impl Assemblies {
    pub(super) fn new(me: ProcAddr, memory: &Arc<Memory>, board: &Arc<SpinBoard>, threshold: usize) -> Self {
        let (memory, board) = (Arc::clone(memory), Arc::clone(board));
        Self { me, memory, board, threshold, begun: Mutex::default() }
    }

    /// Takes a segment. Returns the frame once it is complete.
    pub(super) fn take(
        &self,
        process: &impl Process,
        key: (HostNo, u32),
        offset: u64,
        total: u64,
        body: &[Bytes],
    ) -> Option<Frame> {
        let mut assembly = if offset == 0 {
            let into = match self.apart(process, total, body) {
                Some(parts) => parts,
                None => {
                    let mut bytes = Vec::new();
                    bytes.try_reserve_exact(usize::try_from(total).ok()?).ok()?;
                    Into::Whole(bytes)
                }
            };
            Assembly { total, arrived: 0, into }
        } else {
            lock(&self.begun).remove(&key)?
        };
        if assembly.arrived != offset || assembly.total != total {
            return None;
        }
        assembly.take(offset, body);
        if assembly.arrived < total {
            lock(&self.begun).insert(key, assembly);
            return None;
        }
        assembly.finish()
    }

    /// Drops unfinished frames of a dead host.
    pub(super) fn forget(&self, host: HostNo) {
        lock(&self.begun).retain(|(origin, _), _| *origin != host);
    }

    /// Prepares the parts of a frame that processes of this host map. Returns `None` for other frames.
    fn apart(&self, process: &impl Process, total: u64, body: &[Bytes]) -> Option<Into> {
        let first = body.first()?;
        let header = Header::decode(first.first_chunk::<HEADER_LEN>()?).ok()?;
        let fixed_len = header.target_len as usize + header.name_len as usize;
        let table = 8 * header.parts as usize;
        let fixed = first.get(HEADER_LEN..HEADER_LEN + fixed_len)?;
        let entries = first.get(HEADER_LEN + fixed_len..HEADER_LEN + fixed_len + table)?;
        if !is_mapped(header.kind) || HEADER_LEN as u64 + header.body_len != total {
            return None;
        }
        let cut = header.target_len as usize;
        let target = match cut {
            0 => Target::One(header.dst),
            _ => Target::from_wire(header.dst.mesh, &fixed[..cut]).ok()?,
        };
        let target = self.receivers(process, target)?;
        let mut start = (HEADER_LEN + fixed_len + table) as u64;
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let mut parts = Vec::with_capacity(header.parts as usize);
        for (place, entry) in entries.chunks_exact(8).enumerate() {
            let len = u64::from_le_bytes(entry.try_into().ok()?);
            let end = start.checked_add(len).filter(|end| *end <= total)?;
            let size = usize::try_from(len).ok()?;
            // Part 0 is the envelope, which is read in place.
            let room = if place > 0 && size >= self.threshold { self.memory.room(size, &target) } else { None };
            let data = match room {
                Some(room) => {
                    sharing.shared = true;
                    Data::Shared(room)
                }
                None => Data::Inline(Vec::new()),
            };
            parts.push(Slot { start, len, data });
            start = end;
        }
        (start == total).then(|| Into::Parts { header, fixed: Bytes::copy_from_slice(fixed), parts, sharing })
    }

    /// The same frame, its large parts in memory that all its receivers here map: once, however many they are.
    pub(super) fn localized(&self, process: &impl Process, frame: Frame) -> Frame {
        let header = frame.header;
        let to_me = header.dst == self.me && header.target_len == 0;
        if !is_mapped(header.kind)
            || frame.body.len() < self.threshold
            || header.sharing().shared // It was put there as it came.
            || (to_me && !process.awaits_copy(&header))
        {
            return frame;
        }
        let Some(target) = frame.target().ok().and_then(|target| self.receivers(process, target)) else { return frame };
        let Ok(parts) = frame.parts() else { return frame };
        let large = |part: &Part| matches!(part, Part::Inline(bytes) if bytes.len() >= self.threshold);
        // Part 0 is the envelope, which is read in place.
        if !parts.iter().skip(1).any(large) {
            return frame;
        }
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let moved: Vec<Part> = parts
            .into_iter()
            .enumerate()
            .map(|(place, part)| match part {
                Part::Inline(bytes) if place > 0 && bytes.len() >= self.threshold => {
                    match self.memory.put(&bytes, &target, self.board.spare()) {
                        Some(at) => {
                            sharing.shared = true;
                            Part::Shared { at, len: bytes.len() as u64 }
                        }
                        None => Part::Inline(bytes),
                    }
                }
                other => other,
            })
            .collect();
        let whole = if header.target_len == 0 { None } else { frame.target().ok() };
        let mut header = header;
        header.set_sharing(sharing);
        Frame::build(header, whole.as_ref(), frame.name(), &moved)
    }

    /// Which processes of this host a message is for.
    fn receivers(&self, process: &impl Process, target: Target) -> Option<Target> {
        match &target {
            Target::One(_) | Target::Joined(_) => Some(target),
            Target::Many(mesh, region, placement) => {
                let on = placement.ranks_on(self.me.host, region.len());
                let local = process.local_ranks(*mesh);
                if placement.only().is_some() {
                    return Some(target);
                }
                // The receivers' number is what matters: each holds the memory once.
                let ranks = on.filter(|rank| local.contains(&(*rank as u32)) && region.contains(*rank)).count();
                let slice = Slice::new(local.start as usize, &[ranks], &[1]).ok()?;
                let some = Region::new(&["ranks"], slice).ok()?;
                Some(Target::Many(*mesh, some, Placement::On(self.me.host)))
            }
        }
    }
}
