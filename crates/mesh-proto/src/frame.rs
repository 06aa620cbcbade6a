//! The bytes of one message.
//!
//! ```text
//! header (88 bytes) | region and placement of a cast | name | part table (8 bytes a part) | parts
//! ```
//!
//! An entry of the part table is a length. If its top bit is set, the part's bytes are a [`crate::SharedRef`] to memory
//! that both ends map, and the length is that memory's. If the next bit is set, they say where the receiver gets the
//! part from.

use crate::codec::{part, u16_at, u64_at};
use crate::codes::codes;
use crate::part::Part;
use crate::{ActorId, CallId, Carried, FrameError, MAX_BODY, ProcAddr, Target};
use bytes::Bytes;
use std::time::Duration;

/// Length of the fixed header.
pub const HEADER_LEN: usize = 88;
/// What each queued message costs the process that holds it, on top of its bytes: a flood of empty messages also fills
/// memory.
pub const MESSAGE_COST: u64 = 256;

const MAGIC: u16 = 0x4d68;
const VERSION: u8 = 4;
/// The bits of a header's flags, on the wire. Code outside this crate does not use them: [`Header`] has accessors for
/// the frame's own flags, and the types of [`crate::messages`] and [`crate::control`] for those of their kind.
pub(crate) mod flags {
    /// Frame: see [`super::Sharing::sole`].
    pub(crate) const SOLE: u16 = 2;
    /// Frame: see [`super::Sharing::shared`].
    pub(crate) const SHARED: u16 = 8;
    /// Frame: see [`super::Header::carries_refs`].
    pub(crate) const REFS: u16 = 1 << 4;
    /// Frame: see [`super::Header::is_distant`].
    pub(crate) const DISTANT: u16 = 1 << 5;
    /// Frame: see [`super::Header::has_printed`].
    pub(crate) const PRINTED: u16 = 1 << 6;
    /// Frame: see [`super::Header::is_quiet`].
    pub(crate) const QUIET: u16 = 1 << 7;
    /// Frame: see [`super::Header::is_abroad`].
    pub(crate) const ABROAD: u16 = 1 << 12;
    /// Frame: see [`super::Header::is_charged`].
    pub(crate) const CHARGED: u16 = 1 << 15;
    /// The flags that mean the same in every frame.
    pub(crate) const OF_FRAMES: u16 = SOLE | SHARED | REFS | DISTANT | PRINTED | QUIET | ABROAD | CHARGED;

    /// Reply, or value for a port: the payload is an encoded exception.
    pub(crate) const ERROR: u16 = 1;
    /// Reply that is an exception: the actor could not be constructed or is gone; the endpoint did not raise. Notice of
    /// an end: it answers one message.
    pub(crate) const DEAD: u16 = 4;
    /// Reply: it came through a port, and more may follow. Notice that a port is closed: the port is a call's. Call or
    /// cancellation: it is for a task. Spawn: the arguments follow.
    pub(crate) const MORE: u16 = 1 << 8;
    /// Returned message: the call's port has ended. Cancellation: the call itself is not cancelled, or only if it has
    /// not begun. Task: it was sent ahead. Spawn: the arguments of an announced one.
    pub(crate) const END: u16 = 1 << 9;
    /// Call: the caller takes any number of values.
    pub(crate) const STREAM: u16 = 1 << 10;
    /// Cancellation: the replies of the call are combined on the way up. Reply: it is what they were combined to.
    pub(crate) const TREE: u16 = 1 << 11;
    /// Credit: the mailbox is gone.
    pub(crate) const LAST: u16 = 1 << 14;
    /// Credit: a sender asks for whatever it has not been told yet.
    pub(crate) const QUESTION: u16 = 1 << 13;
}

/// The memory that holds a frame's large parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The receiver may map shared parts writable and shared: they were sent to nobody else.
    pub sole: bool,
    /// Some parts are in shared memory, which must be given back when the frame is dropped.
    pub shared: bool,
}

codes! {
    /// What a frame is for. Each kind has a type in [`crate::messages`] or [`crate::control`], which alone makes and
    /// reads it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Kind {
        /// First frame of a proc: [`crate::control::Hello`].
        Hello = 1,
        /// Make an actor: [`crate::messages::Spawn`].
        Spawn = 2,
        /// Run an endpoint and reply: [`crate::messages::Call`].
        Call = 3,
        /// Run an endpoint without a reply: [`crate::messages::Tell`].
        Tell = 4,
        /// An answer to a call: [`crate::messages::Reply`].
        Reply = 5,
        /// Stop an actor once it has handled earlier messages: [`crate::messages::StopActor`].
        StopActor = 6,
        /// Stop the proc once it has handled earlier messages: [`crate::control::StopProc`].
        StopProc = 7,
        /// Last frame of a proc that ends on its own: [`crate::control::Goodbye`].
        Goodbye = 8,
        /// A proc has ended: [`crate::control::Down`].
        Down = 9,
        /// Asks agents to make procs: [`crate::control::SpawnProcs`].
        SpawnProcs = 10,
        /// The message could not be delivered, to its sender: [`crate::control::Undeliverable`].
        Undeliverable = 11,
        /// The caller no longer waits for this call: [`crate::messages::Cancel`].
        Cancel = 12,
        /// Several replies of one call, merged on the way up: [`crate::messages::Gathered`].
        Gathered = 13,
        /// An owner lets go of a mesh of procs: [`crate::control::StopProcs`].
        StopProcs = 14,
        /// A value for a port: [`crate::messages::Post`].
        Post = 15,
        /// Nobody receives from a port any longer: [`crate::control::Closed`].
        Closed = 16,
        /// A mailbox gives bytes back to a sender, or is asked to: [`crate::Flow`].
        Credit = 17,
        /// Asks a proc about itself, or tells the controller of an event: [`crate::control::Inspect`].
        Inspect = 18,
        /// An actor has failed while its proc lives on, to its owner: [`crate::messages::Failure`].
        Failure = 19,
        /// A rank's share of a combined reply, to the rank above it: [`crate::messages::Partial`].
        Partial = 20,
        /// Asks to be told of a proc's end: [`crate::control::Watch`].
        Watch = 21,
        /// A whole host is dead: [`crate::control::HostDown`].
        HostDown = 22,
        /// What was seen of a host, to the controller: [`crate::control::HostLost`].
        HostLost = 23,
        /// Where a host can be reached: [`crate::control::Whereabouts`].
        Whereabouts = 24,
        /// The job is over, from the controller to agents: [`crate::control::EndJob`].
        EndJob = 25,
        /// What procs on another host print, and how to show it: [`crate::control::Lines`].
        Lines = 26,
        /// Whether a host is live or suspect, from the controller to every agent: [`crate::control::HostStanding`].
        Standing = 27,
        /// Certificates that are no longer valid, from the controller to every agent: [`crate::control::Revoked`].
        Revoked = 28,
        /// Who holds the port of a call, to the caller: [`crate::control::Held`].
        Held = 29,
        /// A message for an extension of the process: [`crate::messages::Extend`].
        Extend = 30,
        /// Where the ranks of a repaired mesh are: [`crate::control::News`].
        Moved = 31,
        /// A call has failed and nobody has looked; only within a process: [`crate::messages::Unseen`].
        Unseen = 32,
        /// Asks for the bytes of a kept value: [`crate::control::Fetch`].
        Fetch = 33,
        /// Why the policy of a mesh gave it up: [`crate::control::News`].
        GivenUp = 34,
        /// About a link between two procs of one host: [`crate::control::Direct`].
        Direct = 35,
    }
}

impl Kind {
    #[inline]
    fn read(byte: u8) -> Result<Self, FrameError> {
        // `Unseen` does not travel.
        Self::from_code(byte).filter(|kind| *kind != Self::Unseen).ok_or(FrameError::Kind(byte))
    }
}

/// The fixed part of a frame: all that a relay looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// See [`flags`]: most have a meaning only in some kinds.
    pub(crate) flags: u16,
    /// How many parts follow.
    pub parts: u16,
    /// Bytes after the header.
    pub body_len: u64,
    /// The sender, which gets the reply.
    pub src: ProcAddr,
    /// The receiver. For a cast, only the mesh counts; the region gives the ranks.
    pub dst: ProcAddr,
    /// In a message, the actor that it is for; in other kinds, what their types say.
    pub(crate) actor: ActorId,
    /// In a message, the call that it begins or answers, 0 for none; in other kinds, what their types say.
    pub(crate) call: CallId,
    /// The frame's number on its link, which sets it (LNK-1).
    pub seq: u32,
    /// When its link accepted it, in nanoseconds of its host's clock; set by the link.
    pub sent: u64,
    /// In a message, the receiver's place in the target, which a reply repeats (in a cast, the first receiver's); in
    /// other kinds, what their types say.
    pub(crate) index: u32,
    /// Length of the name.
    pub name_len: u16,
    /// Length of the cast's region and placement; 0 if the frame is for one proc.
    pub target_len: u16,
    /// Milliseconds from sending until nobody wants the answer any longer; 0 for no limit.
    pub(crate) deadline_ms: u32,
}

impl Header {
    /// A header with only a kind, a sender and a receiver.
    #[must_use]
    pub fn new(kind: Kind, src: ProcAddr, dst: ProcAddr) -> Self {
        Self {
            kind,
            flags: 0,
            parts: 0,
            body_len: 0,
            src,
            dst,
            actor: 0,
            call: 0,
            seq: 0,
            sent: 0,
            index: 0,
            name_len: 0,
            target_len: 0,
            deadline_ms: 0,
        }
    }

    /// The memory that holds its large parts.
    #[must_use]
    pub fn sharing(&self) -> Sharing {
        Sharing { sole: self.flags & flags::SOLE != 0, shared: self.flags & flags::SHARED != 0 }
    }

    /// Sets which memory holds its large parts.
    pub fn set_sharing(&mut self, sharing: Sharing) {
        self.flag(flags::SOLE, sharing.sole);
        self.flag(flags::SHARED, sharing.shared);
    }

    /// Whether references to kept values follow the envelope ([`Carried`]).
    #[must_use]
    pub fn carries_refs(&self) -> bool {
        self.flags & flags::REFS != 0
    }

    /// Says that references follow the envelope.
    pub fn set_carries_refs(&mut self) {
        self.flags |= flags::REFS;
    }

    /// Whether some of its parts lie in memory of its sender, on another host, from which its receiver gets them.
    #[must_use]
    pub fn is_distant(&self) -> bool {
        self.flags & flags::DISTANT != 0
    }

    /// Sets whether some of its parts lie in memory of its sender.
    pub fn set_distant(&mut self, distant: bool) {
        self.flag(flags::DISTANT, distant);
    }

    /// Whether dropping the frame means giving something back: memory, or references.
    #[must_use]
    pub fn is_owed(&self) -> bool {
        self.flags & (flags::SHARED | flags::REFS | flags::DISTANT) != 0
    }

    /// Whether the sender counts the message, and wants its bytes back once it is handled (see [`crate::Meter`]).
    #[must_use]
    pub fn is_charged(&self) -> bool {
        self.flags & flags::CHARGED != 0
    }

    /// Sets whether the sender counts it.
    pub fn set_charged(&mut self, charged: bool) {
        self.flag(flags::CHARGED, charged);
    }

    /// Whether the job has other hosts, or the message came by a direct link: it may overtake the spawn of its receiver.
    #[must_use]
    pub fn is_abroad(&self) -> bool {
        self.flags & flags::ABROAD != 0
    }

    /// Says that it may overtake the spawn of its receiver.
    pub fn set_abroad(&mut self) {
        self.flags |= flags::ABROAD;
    }

    /// Whether its sender's host had output of the sender that it had not reported to the controller yet.
    #[must_use]
    pub fn has_printed(&self) -> bool {
        self.flags & flags::PRINTED != 0
    }

    /// Says that the sender's host has output of it to report.
    pub fn set_printed(&mut self) {
        self.flags |= flags::PRINTED;
    }

    /// Whether its receiver's host has read, when it came, whatever processes there had printed before it was sent.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.flags & flags::QUIET != 0
    }

    /// Sets whether that is known. Only the agent of the receiver's host can say.
    pub fn set_quiet(&mut self, quiet: bool) {
        self.flag(flags::QUIET, quiet);
    }

    /// The time from sending until nobody wants the answer any longer; `None` for no limit.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        (self.deadline_ms != 0).then(|| Duration::from_millis(u64::from(self.deadline_ms)))
    }

    /// Sets the milliseconds from sending until nobody wants the answer any longer; 0 for no limit.
    pub fn set_deadline_ms(&mut self, ms: u32) {
        self.deadline_ms = ms;
    }

    fn flag(&mut self, bit: u16, on: bool) {
        if on {
            self.flags |= bit;
        } else {
            self.flags &= !bit;
        }
    }

    /// The header as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2] = VERSION;
        out[3] = self.kind as u8;
        self.write_fields(&mut out);
        out
    }

    /// Reads a header, and checks what can be checked without the body.
    ///
    /// # Errors
    /// If the bytes are not a header of this version, or claim an impossible length.
    pub fn decode(raw: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let magic = u16_at(raw, 0);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        if raw[2] != VERSION {
            return Err(FrameError::Version { theirs: raw[2], ours: VERSION });
        }
        let mut header = Self::new(Kind::read(raw[3])?, ProcAddr::CONTROLLER, ProcAddr::CONTROLLER);
        header.read_fields(raw);
        if header.body_len > MAX_BODY {
            return Err(FrameError::TooLong(header.body_len));
        }
        let fixed = u64::from(header.target_len) + u64::from(header.name_len) + 8 * u64::from(header.parts);
        if fixed > header.body_len {
            return Err(FrameError::Overrun { what: "name, region or part table" });
        }
        Ok(header)
    }
}

/// The position of each field in a header's bytes, after the magic number, the version and the kind.
macro_rules! layout {
    ($($at:literal $($field:ident).+: $number:ty,)*) => {
        impl Header {
            #[inline]
            fn write_fields(&self, out: &mut [u8; HEADER_LEN]) {
                $(out[$at..$at + size_of::<$number>()].copy_from_slice(&self.$($field).+.to_le_bytes());)*
            }

            #[inline]
            fn read_fields(&mut self, raw: &[u8; HEADER_LEN]) {
                $(self.$($field).+ = <$number>::from_le_bytes(part(raw, $at));)*
            }
        }
    };
}

layout! {
    4 flags: u16,
    6 parts: u16,
    8 body_len: u64,
    16 src.mesh: u64,
    24 src.rank: u32,
    28 dst.rank: u32,
    32 dst.mesh: u64,
    40 actor: u64,
    48 call: u64,
    56 seq: u32,
    60 index: u32,
    64 name_len: u16,
    66 target_len: u16,
    68 deadline_ms: u32,
    72 src.host: u32,
    76 dst.host: u32,
    80 sent: u64,
}

/// A whole message: the header and its body, which is not parsed.
///
/// The body is reference-counted, so a message to many exists once, however many links it is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The fixed part.
    pub header: Header,
    /// Region, name, part table and parts.
    pub body: Bytes,
}

impl Frame {
    /// A frame with the given name and parts; fills in the lengths.
    ///
    /// # Panics
    /// If the name is longer than 65,535 bytes or there are more parts than that; callers check both.
    #[must_use]
    pub fn build(mut header: Header, cast: Option<&Target>, name: &[u8], parts: &[Part]) -> Self {
        let target = cast.map(Target::to_wire).unwrap_or_default();
        let data: usize = parts.iter().map(Part::wire_len).sum();
        let mut body = Vec::with_capacity(target.len() + name.len() + 8 * parts.len() + data);
        body.extend_from_slice(&target);
        body.extend_from_slice(name);
        parts.iter().for_each(|part| body.extend_from_slice(&part.entry().to_le_bytes()));
        for part in parts {
            match part {
                Part::Inline(bytes) => body.extend_from_slice(bytes),
                other => body.extend_from_slice(&other.wire()),
            }
        }
        header.target_len = u16::try_from(target.len()).expect("a region's wire form is short");
        header.name_len = u16::try_from(name.len()).expect("callers check the name's length");
        header.parts = u16::try_from(parts.len()).expect("callers check the number of parts");
        header.body_len = body.len() as u64;
        Self { header, body: body.into() }
    }

    /// A frame with one inline part, the usual case, without building a [`Part`].
    ///
    /// # Panics
    /// As for [`Frame::build`].
    #[must_use]
    pub fn build_plain(mut header: Header, cast: Option<&Target>, name: &[u8], payload: &[u8]) -> Self {
        let target = cast.map(Target::to_wire).unwrap_or_default();
        let mut body = Vec::with_capacity(target.len() + name.len() + 8 + payload.len());
        body.extend_from_slice(&target);
        body.extend_from_slice(name);
        body.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        body.extend_from_slice(payload);
        header.target_len = u16::try_from(target.len()).expect("a region's wire form is short");
        header.name_len = u16::try_from(name.len()).expect("callers check the name's length");
        header.parts = 1;
        header.body_len = body.len() as u64;
        Self { header, body: body.into() }
    }

    /// Returns who the frame is for.
    ///
    /// # Errors
    /// If it is a cast and its region cannot be read.
    pub fn target(&self) -> Result<Target, FrameError> {
        if self.header.target_len == 0 {
            return Ok(Target::One(self.header.dst));
        }
        let raw = &self.body[..self.header.target_len as usize];
        Target::from_wire(self.header.dst.mesh, raw)
    }

    /// The same message for the `nth` proc of a cast: the region is cut off, and the body shared.
    #[must_use]
    pub fn for_one(&self, dst: ProcAddr, nth: u32) -> Self {
        let cut = self.header.target_len as usize;
        let mut header = self.header;
        header.dst = dst;
        header.index = header.index.saturating_add(nth);
        header.target_len = 0;
        header.body_len -= cut as u64;
        Self { header, body: self.body.slice(cut..) }
    }

    /// The name: the endpoint of a call.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        let start = self.header.target_len as usize;
        &self.body[start..start + self.header.name_len as usize]
    }

    /// The name, without copying it.
    #[must_use]
    pub fn name_bytes(&self) -> Bytes {
        let start = self.header.target_len as usize;
        self.body.slice(start..start + self.header.name_len as usize)
    }

    /// The parts, without copying them.
    ///
    /// # Errors
    /// If the part table does not fit the body.
    pub fn parts(&self) -> Result<Vec<Part>, FrameError> {
        let table = self.header.target_len as usize + self.header.name_len as usize;
        let count = self.header.parts as usize;
        let mut at = table + 8 * count;
        let mut parts = Vec::with_capacity(count);
        for i in 0..count {
            let entry = u64_at(&self.body, table + 8 * i);
            let rest = self.body.slice(at..);
            let (part, len) = Part::read(entry, &rest).ok_or(FrameError::Overrun { what: "part" })?;
            parts.push(part);
            at += len;
        }
        if at != self.body.len() {
            return Err(FrameError::Trailing((self.body.len() - at) as u64));
        }
        Ok(parts)
    }

    /// The only part, if there is one and it is in the frame.
    #[must_use]
    pub fn only_part(&self) -> Option<&[u8]> {
        let table = self.header.target_len as usize + self.header.name_len as usize;
        let (entry, part) = self.body.get(table..)?.split_first_chunk::<8>()?;
        (self.header.parts == 1 && u64::from_le_bytes(*entry) == part.len() as u64).then_some(part)
    }

    /// The values that receivers hold through this frame: those that its references point to, and its distant parts.
    /// Empty if the frame claims to have some but has none.
    #[must_use]
    pub fn carried(&self) -> Vec<Carried> {
        if !self.header.carries_refs() && !self.header.is_distant() {
            return Vec::new();
        }
        let parts = self.parts().unwrap_or_default();
        let mut all = match parts.first() {
            Some(Part::Inline(envelope)) if self.header.carries_refs() => {
                Carried::split(envelope).map_or_else(Vec::new, |(_, all)| all)
            }
            _ => Vec::new(),
        };
        all.extend(parts.iter().filter_map(|part| match part {
            Part::Distant { id, held, .. } => Some(Carried { owner: self.header.src, id: *id, ticket: *held }),
            Part::Inline(_) | Part::Shared { .. } => None,
        }));
        all
    }

    /// What the frame counts against its receiver's budget: its name, its parts, wherever they lie, and
    /// [`MESSAGE_COST`]. The same at both ends, and for each receiver of a cast.
    #[must_use]
    pub fn cost(&self) -> u64 {
        let fixed = u64::from(self.header.target_len) + 8 * u64::from(self.header.parts);
        let plain = (MESSAGE_COST + self.body.len() as u64).saturating_sub(fixed);
        if !self.header.sharing().shared && !self.header.is_distant() {
            return plain;
        }
        // Count the memory's length instead of the length of its reference.
        let elsewhere = self.parts().unwrap_or_default().into_iter().filter(|part| !matches!(part, Part::Inline(_)));
        elsewhere.fold(plain, |sum, part| sum.saturating_sub(part.wire_len() as u64).saturating_add(part.len()))
    }

    /// Bytes that the frame takes on a link.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        HEADER_LEN + self.body.len()
    }
}
