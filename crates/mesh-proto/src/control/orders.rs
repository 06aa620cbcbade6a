//! Orders to agents: which procs to make, which to end, and whose ends to report.

use super::body;
use crate::codec::{Reader, Writer};
use crate::{CallId, Frame, Header, Kind, MeshId, ProcAddr, Target};
use bytes::Bytes;
use mesh_topology::{Region, Wire};
use std::ops::Range;
use std::time::Duration;

/// The ranks of a mesh that an order is about, for the agent at `place` among its receivers.
#[must_use]
pub fn ranks_at(place: u32, per_host: u32) -> Option<Range<u32>> {
    let first = place.checked_mul(per_host)?;
    Some(first..first.checked_add(per_host)?)
}

fn order(kind: Kind, from: ProcAddr, agents: &Target, mesh: MeshId, call: CallId) -> Header {
    let to = match agents {
        Target::One(agent) => *agent,
        Target::Many(..) | Target::Joined(_) => ProcAddr::CONTROLLER,
    };
    let mut header = Header::new(kind, from, to);
    (header.actor, header.call) = (mesh, call);
    header
}

fn build(header: Header, agents: &Target, body: &[u8]) -> Frame {
    let cast = matches!(agents, Target::Many(..)).then_some(agents);
    Frame::build_plain(header, cast, b"", body)
}

/// Make procs of a mesh on each of some hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpawnProcs {
    /// The mesh.
    pub mesh: MeshId,
    /// The spawner's call, which the procs' first replies answer.
    pub call: CallId,
    /// How many on each host.
    pub per_host: u32,
    /// Whether each gets a fresh interpreter.
    pub exec: bool,
    /// How long a proc may take to say hello.
    pub within: Duration,
    /// The fork server's command, as strings of the operating system.
    pub argv: Vec<Bytes>,
    /// Its environment.
    pub env: Vec<(Bytes, Bytes)>,
    /// What else it is told; opaque here.
    pub plan: Bytes,
    /// What the procs are told; opaque here.
    pub config: Bytes,
    /// The mesh's name and shape, for people; opaque here.
    pub title: String,
}

impl SpawnProcs {
    /// Encodes this as a frame to agents.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, agents: &Target) -> Frame {
        let out = Writer::default().small(self.per_host).byte(u8::from(self.exec)).time(self.within);
        let out = out.list(&self.argv, |out, word| out.bytes(word));
        let out = out.list(&self.env, |out, (key, value)| out.bytes(key).bytes(value));
        let out = out.bytes(&self.plan).bytes(&self.config).text(&self.title);
        build(order(Kind::SpawnProcs, from, agents, self.mesh, self.call), agents, &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let whole = body(frame)?;
        let mut raw = Reader::new(&whole);
        // Without copying: these can be large.
        let slice = |bytes: &[u8]| whole.slice_ref(bytes);
        Some(Self {
            mesh: frame.header.actor,
            call: frame.header.call,
            per_host: raw.small()?,
            exec: raw.byte()? != 0,
            within: raw.time()?,
            argv: raw.list(|raw| raw.bytes().map(slice))?,
            env: raw.list(|raw| Some((slice(raw.bytes()?), slice(raw.bytes()?))))?,
            plan: slice(raw.bytes()?),
            config: slice(raw.bytes()?),
            title: raw.text()?,
        })
    }
}

/// End procs of a mesh on each of some hosts, because their owner lets go of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopProcs {
    /// The mesh; 0 for all meshes with procs there, when the host itself is let go.
    pub mesh: MeshId,
    /// The call that waits for their ends.
    pub call: CallId,
    /// The place of the agent, or of the first of several, among the mesh's agents.
    pub first: u32,
    /// How many there are on each host.
    pub per_host: u32,
    /// How long they may take.
    pub within: Duration,
    /// The ranks to end.
    pub ranks: Region,
}

impl StopProcs {
    /// Encodes this as a frame to agents.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, agents: &Target) -> Frame {
        let body = Writer::default().small(self.per_host).time(self.within).bytes(&self.ranks.to_wire()).done();
        let mut header = order(Kind::StopProcs, from, agents, self.mesh, self.call);
        header.index = self.first;
        build(header, agents, &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let (per_host, within) = (raw.small()?, raw.time()?);
        let ranks = Region::from_wire(raw.bytes()?).ok()?;
        let &Header { actor: mesh, call, index: first, .. } = &frame.header;
        Some(Self { mesh, call, first, per_host, within, ranks })
    }
}

/// The mesh that an order is about: [`SpawnProcs`], [`StopProcs`].
#[must_use]
pub fn mesh_of(order: &Header) -> Option<MeshId> {
    matches!(order.kind, Kind::SpawnProcs | Kind::StopProcs).then_some(order.actor)
}

/// The ranks that an order is about at the agent that it has reached, or should have reached: [`SpawnProcs`],
/// [`StopProcs`].
#[must_use]
pub fn ranks_of(order: &Frame, most: u32) -> Option<Range<u32>> {
    if !matches!(order.header.kind, Kind::SpawnProcs | Kind::StopProcs) {
        return None;
    }
    // Both bodies begin with it.
    let per_host = Reader::new(&body(order)?).small()?;
    ranks_at(order.header.index, per_host.min(most))
}

/// Ask a proc to end by a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopProc {
    /// How long it may take.
    pub within: Duration,
}

impl StopProc {
    /// Encodes this as a frame to the proc. The time goes into the header, in milliseconds.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::StopProc, from, to);
        header.index = u32::try_from(self.within.as_millis()).unwrap_or(u32::MAX);
        Frame::build(header, None, b"", &[])
    }

    /// Reads a header.
    #[must_use]
    pub fn read(header: &Header) -> Self {
        Self { within: Duration::from_millis(u64::from(header.index)) }
    }
}

/// Report a proc's end to the sender. It means nothing to that proc itself; its agent sees it pass and remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    /// The mesh of the proc.
    pub mesh: MeshId,
    /// Its rank there.
    pub rank: u32,
}

impl Watch {
    /// A watch on this proc.
    #[must_use]
    pub fn of(who: ProcAddr) -> Self {
        Self { mesh: who.mesh, rank: who.rank }
    }

    /// Encodes this as a frame to the proc's agent, or to the proc.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Watch, from, to);
        (header.actor, header.index) = (self.mesh, self.rank);
        Frame::build(header, None, b"", &[])
    }

    /// Reads a header.
    #[must_use]
    pub fn read(header: &Header) -> Self {
        Self { mesh: header.actor, rank: header.index }
    }
}

/// A proc is up: its first frame, to its agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Its process id.
    pub pid: u32,
}

impl Hello {
    /// Encodes this as a frame.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let mut header = Header::new(Kind::Hello, from, to);
        header.index = self.pid;
        Frame::build(header, None, b"", &[])
    }

    /// Reads a header.
    #[must_use]
    pub fn read(header: &Header) -> Self {
        Self { pid: header.index }
    }
}
