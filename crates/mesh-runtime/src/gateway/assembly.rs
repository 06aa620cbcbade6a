//! Frames out of segments, and large parts into memory that the procs of this host map.

use crate::runtime::{Runtime, lock};
use crate::shm::Room;
use bytes::Bytes;
use mesh_proto::{Frame, HEADER_LEN, Header, HostNo, Kind, Part, Sharing, Target};

/// Whether the receivers of such a message map its large parts.
pub(crate) fn is_mapped(kind: Kind) -> bool {
    matches!(kind, Kind::Call | Kind::Tell | Kind::Reply | Kind::Post | Kind::Spawn | Kind::Partial | Kind::Extend)
}

/// A frame of which segments arrive.
#[derive(Debug)]
pub(super) struct Assembly {
    total: u64,
    arrived: u64,
    into: Into,
}

#[derive(Debug)]
enum Into {
    /// One piece of memory.
    Whole(Vec<u8>),
    /// The header and what else is small, and the parts: large ones where their receivers will map them.
    Parts { header: Header, fixed: Bytes, parts: Vec<Slot>, sharing: Sharing },
}

/// A part, and where in the frame it lies.
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
    /// Takes of `bytes`, which begin at `offset` in the frame, what is its own.
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

impl Runtime {
    /// Takes one segment; the frame, once it is whole.
    pub(super) fn assemble(
        &self,
        origin: HostNo,
        message: u32,
        offset: u64,
        total: u64,
        body: &[Bytes],
    ) -> Option<Frame> {
        let key = (origin, message);
        let mut assembly = if offset == 0 {
            let into = match self.apart(total, body) {
                Some(parts) => parts,
                None => {
                    let mut bytes = Vec::new();
                    bytes.try_reserve_exact(usize::try_from(total).ok()?).ok()?;
                    Into::Whole(bytes)
                }
            };
            Assembly { total, arrived: 0, into }
        } else {
            lock(&self.gateway.state).assemblies.remove(&key)?
        };
        if assembly.arrived != offset || assembly.total != total {
            return None;
        }
        assembly.take(offset, body);
        if assembly.arrived < total {
            lock(&self.gateway.state).assemblies.insert(key, assembly);
            return None;
        }
        assembly.finish()
    }

    /// Where the parts of a frame shall go that procs of this host are to map; none if it is not one of those.
    fn apart(&self, total: u64, body: &[Bytes]) -> Option<Into> {
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
        let target = self.receivers(target)?;
        let mut start = (HEADER_LEN + fixed_len + table) as u64;
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let mut parts = Vec::with_capacity(header.parts as usize);
        for (place, entry) in entries.chunks_exact(8).enumerate() {
            let len = u64::from_le_bytes(entry.try_into().ok()?);
            let end = start.checked_add(len).filter(|end| *end <= total)?;
            let size = usize::try_from(len).ok()?;
            // Part 0 is the envelope, which is read where it lies.
            let room = if place > 0 && size >= self.shm_threshold() { self.memory.room(size, &target) } else { None };
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
    pub(super) fn localized(&self, frame: Frame) -> Frame {
        let header = frame.header;
        let to_me = header.dst == self.me && header.target_len == 0;
        if !is_mapped(header.kind)
            || frame.body.len() < self.shm_threshold()
            || (to_me && !self.remote_values.awaits(&header))
        {
            return frame;
        }
        if header.sharing().shared {
            return frame; // It was put there as it came.
        }
        let Some(target) = frame.target().ok().and_then(|target| self.receivers(target)) else { return frame };
        let Ok(parts) = frame.parts() else { return frame };
        let large = |part: &Part| matches!(part, Part::Inline(bytes) if bytes.len() >= self.shm_threshold());
        // Part 0 is the envelope, which is read where it lies.
        if !parts.iter().skip(1).any(large) {
            return frame;
        }
        let mut sharing = Sharing { sole: target.len() == 1, shared: false };
        let moved: Vec<Part> = parts
            .into_iter()
            .enumerate()
            .map(|(place, part)| match part {
                Part::Inline(bytes) if place > 0 && bytes.len() >= self.shm_threshold() => {
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
        let mut header: Header = header;
        header.set_sharing(sharing);
        Frame::build(header, whole.as_ref(), frame.name(), &moved)
    }

    /// Which procs of this host a message is for.
    fn receivers(&self, target: Target) -> Option<Target> {
        match &target {
            Target::One(_) | Target::Joined(_) => Some(target),
            Target::Many(mesh, region, placement) => {
                let on = placement.ranks_on(self.me.host, region.len());
                let local = self.local_ranks(*mesh);
                if placement.only().is_some() {
                    return Some(target);
                }
                // The receivers' number is what matters: each holds the memory once.
                let ranks = on.filter(|rank| local.contains(&(*rank as u32)) && region.contains(*rank)).count();
                let slice = mesh_topology::Slice::new(local.start as usize, &[ranks], &[1]).ok()?;
                let some = mesh_topology::Region::new(&["ranks"], slice).ok()?;
                Some(Target::Many(*mesh, some, mesh_proto::Placement::On(self.me.host)))
            }
        }
    }
}
