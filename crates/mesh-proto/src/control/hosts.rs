//! What agents report about hosts, and what the controller tells all agents.

use super::{Traits, body};
use crate::codec::{Reader, Writer};
use crate::hosts::{Fate, Standing};
use crate::{CallId, EndReason, Ended, Frame, Header, HostEnd, HostNo, Kind, ProcAddr, Target};
use bytes::Bytes;
use std::time::Duration;

/// A header about a host, whose number is in the `actor` field.
fn about(kind: Kind, from: ProcAddr, to: ProcAddr, host: HostNo) -> Header {
    let mut header = Header::new(kind, from, to);
    header.actor = u64::from(host);
    header
}

fn host_in(header: &Header) -> Option<HostNo> {
    HostNo::try_from(header.actor).ok()
}

/// The host that a frame is about, from its header alone: [`HostDown`], [`HostLost`], [`HostStanding`],
/// [`Whereabouts`].
#[must_use]
pub fn host_of(header: &Header) -> Option<HostNo> {
    let about_one = matches!(header.kind, Kind::HostDown | Kind::HostLost | Kind::Standing | Kind::Whereabouts);
    if about_one { host_in(header) } else { None }
}

/// The controller has declared a whole host dead: sent to every agent, which pass it on to their procs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDown {
    /// The host.
    pub host: HostNo,
    /// Why.
    pub end: HostEnd,
}

impl HostDown {
    /// Encodes this as a frame, to one or to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let body = self.end.write(Writer::default()).done();
        Frame::build_plain(about(Kind::HostDown, from, to, self.host), cast, b"", &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        Some(Self { host: host_in(&frame.header)?, end: HostEnd::read(&mut Reader::new(&body(frame)?))? })
    }
}

impl HostEnd {
    /// The end of a host that is not part of the job.
    #[must_use]
    pub fn absent(why: String) -> Self {
        Self { fate: Fate::Absent, label: String::new(), why }
    }

    /// The end of a proc of that host.
    #[must_use]
    pub fn ended(&self) -> Ended {
        Ended { orderly: self.fate == Fate::Released, ..Ended::unmade(EndReason::Host(self.clone())) }
    }
}

/// What a relaying host has seen of a host below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// It is heard from again.
    Well,
    /// It is silent.
    Suspect,
    /// It will not come back.
    Dead {
        /// The reason, for programs.
        fate: Fate,
        /// Details for people.
        why: String,
    },
}

impl Report {
    /// A report of a host that will not come back.
    #[must_use]
    pub fn dead(fate: Fate, why: impl Into<String>) -> Self {
        Self::Dead { fate, why: why.into() }
    }
}

/// An agent's report on a host below it, to the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLost {
    /// The host.
    pub host: HostNo,
    /// What was seen of it.
    pub report: Report,
}

impl HostLost {
    /// Encodes this as a frame to the controller.
    #[must_use]
    pub fn frame(&self, from: ProcAddr) -> Frame {
        let out = match &self.report {
            Report::Well => Writer::default().byte(0),
            Report::Suspect => Writer::default().byte(1),
            Report::Dead { fate, why } => Writer::default().byte(2).byte(fate.code()).text(why),
        };
        Frame::build_plain(about(Kind::HostLost, from, ProcAddr::CONTROLLER, self.host), None, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed, or its report is of an unknown kind.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let report = match raw.byte()? {
            0 => Report::Well,
            1 => Report::Suspect,
            2 => Report::Dead { fate: Fate::of(raw.byte()?.into()), why: raw.text()? },
            _ => return None,
        };
        Some(Self { host: host_in(&frame.header)?, report })
    }
}

/// Whether a host is live or suspect, from the controller to every agent. [`HostDown`] reports deaths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostStanding {
    /// The host.
    pub host: HostNo,
    /// Whether it is live, rather than suspect.
    pub live: bool,
}

impl HostStanding {
    /// Encodes this as a frame, to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        let body = [u8::from(!self.live)];
        Frame::build_plain(about(Kind::Standing, from, to, self.host), cast, b"", &body)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        Some(Self { host: host_in(&frame.header)?, live: Reader::new(&body(frame)?).byte()? == 0 })
    }

    /// The corresponding [`Standing`] in a topology.
    #[must_use]
    pub fn standing(&self) -> Standing {
        if self.live { Standing::Live } else { Standing::Suspect }
    }
}

/// Where a host can be reached: a question to the controller, or its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// The host.
    pub host: HostNo,
    /// The answer: the host's address, empty if only the controller can reach it. `None` in a question.
    pub address: Option<String>,
}

impl Whereabouts {
    /// Encodes this as a frame.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr) -> Frame {
        let out = match &self.address {
            None => Writer::default().byte(0),
            Some(address) => Writer::default().byte(1).text(address),
        };
        Frame::build_plain(about(Kind::Whereabouts, from, to, self.host), None, b"", &out.done())
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        let raw = body(frame)?;
        let mut raw = Reader::new(&raw);
        let address = match raw.byte()? {
            0 => None,
            _ => Some(raw.text()?),
        };
        Some(Self { host: host_in(&frame.header)?, address })
    }
}

/// Certificates that are no longer valid, from the controller to every agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revoked {
    /// The signed list, opaque here.
    pub list: Bytes,
}

impl Revoked {
    /// Encodes this as a frame, to many.
    #[must_use]
    pub fn frame(&self, from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        Frame::build_plain(Header::new(Kind::Revoked, from, to), cast, b"", &self.list)
    }

    /// Reads a frame; `None` if it is malformed.
    #[must_use]
    pub fn read(frame: &Frame) -> Option<Self> {
        Some(Self { list: body(frame)? })
    }
}

/// The job is over, from the controller to every agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndJob;

impl EndJob {
    /// Encodes this as a frame, to many.
    #[must_use]
    pub fn frame(from: ProcAddr, to: ProcAddr, cast: Option<&Target>) -> Frame {
        Frame::build(Header::new(Kind::EndJob, from, to), cast, b"", &[])
    }
}

/// What a host is told when it is attached: the body of a greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The controller's call that the host's reply answers.
    pub call: CallId,
    /// The first host number of the group that it is attached with.
    pub base: HostNo,
    /// How many hosts are in that group.
    pub count: u32,
    /// How many hosts each host relays to.
    pub fan_out: u32,
    /// How long a host may be silent before it is dead.
    pub window: Duration,
    /// How long the host above it waits for a host that is not listening yet.
    pub patience: Duration,
    /// How long it goes on without reaching the controller, if that is longer than the window.
    pub hold: Duration,
    /// Whether it dialed the controller itself, and so is its child.
    pub dialed: bool,
    /// The hosts below it, and their addresses.
    pub below: Vec<(HostNo, String)>,
}

impl Attachment {
    /// Encodes this as bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let Self { call, base, count, fan_out, window, patience, hold, dialed, below } = self;
        let out = Writer::default().number(*call).small(*base).small(*count).small(*fan_out);
        let out = out.time(*window).time(*patience).time(*hold).byte(u8::from(*dialed));
        out.list(below, |out, (host, address)| out.small(*host).text(address)).done()
    }

    /// Decodes bytes; `None` if they are something else.
    #[must_use]
    pub fn decode(raw: &[u8]) -> Option<Self> {
        let mut raw = Reader::new(raw);
        Some(Self {
            call: raw.number()?,
            base: raw.small()?,
            count: raw.small()?,
            fan_out: raw.small()?,
            window: raw.time()?,
            patience: raw.time()?,
            hold: raw.time()?,
            dialed: raw.byte()? != 0,
            below: raw.list(|raw| Some((raw.small()?, raw.text()?)))?,
        })
    }
}

/// What else the two ends of a connection tell each other: in the greeting of a host that is already a member, and in
/// the answer to every greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How long the sender lets others be silent before it considers them dead; it speaks often enough to match.
    pub window: Duration,
}

impl Terms {
    /// Encodes this as bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        Writer::default().time(self.window).done()
    }

    /// Decodes bytes; `None` if they are something else.
    #[must_use]
    pub fn decode(raw: &[u8]) -> Option<Self> {
        (raw.len() == 8).then(|| Reader::new(raw).time().map(|window| Self { window })).flatten()
    }

    /// How long a connection may be silent before its other end is dead: the longer of the two windows. Both ends use
    /// it, as each speaks only as often as its own window demands.
    #[must_use]
    pub fn agree(window: Duration, theirs: Option<Self>) -> Duration {
        // No setting is longer.
        const MOST: Duration = Duration::from_secs(86_400);
        theirs.map_or(window, |theirs| window.max(theirs.window.min(MOST)))
    }
}

/// What an agent says about itself: in its first reply after it is attached, or when it offers itself to a controller.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Introduction {
    /// The host's own name.
    pub name: String,
    /// The agent's process id.
    pub pid: u64,
    /// How many CPUs it may use.
    pub cpus: u64,
    /// How the agent's operator describes it.
    pub traits: Traits,
}

impl Introduction {
    /// Encodes this as bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        self.traits.write(Writer::default().text(&self.name).number(self.pid).number(self.cpus)).done()
    }

    /// Decodes bytes; `None` if they are something else.
    #[must_use]
    pub fn decode(raw: &[u8]) -> Option<Self> {
        let mut raw = Reader::new(raw);
        let (name, pid, cpus) = (raw.text()?, raw.number()?, raw.number()?);
        Some(Self { name, pid, cpus, traits: Traits::read(&mut raw)? })
    }
}
