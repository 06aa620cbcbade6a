//! What a merged frame says of its payloads.

use super::super::HostSet;
use super::APART;
use crate::{Frame, FrameError, Header, HostNo, Kind, Part, ProcAddr};
use bytes::Bytes;

pub(super) const RUN_LEN: usize = 16;
const OVERRUN: FrameError = FrameError::Overrun { what: "table of merged replies" };

/// In the second word of a run: nothing more comes from its hosts.
const DONE: u32 = 1 << 31;

/// Hosts `origin..origin + hosts` sent the payload, each for `each` places, which follow one another from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) origin: HostNo,
    pub(super) hosts: u32,
    pub(super) first: u32,
    pub(super) each: u32,
    /// Whether these are the last replies of the hosts.
    pub(super) done: bool,
}

impl Run {
    /// Takes `next` into this run, if it goes on where this one ends.
    pub(super) fn absorb(&mut self, next: Self) -> bool {
        let ends = u64::from(self.first) + u64::from(self.hosts) * u64::from(self.each);
        if u64::from(next.first) != ends || next.done != self.done {
            return false;
        }
        if next.origin == self.origin && self.hosts == 1 && next.hosts == 1 {
            self.each += next.each;
            return true;
        }
        let follows = self.origin.checked_add(self.hosts) == Some(next.origin) && next.each == self.each;
        if follows {
            self.hosts += next.hosts;
        }
        follows
    }

    /// Whether its numbers are numbers of hosts and places.
    fn is_sound(&self) -> bool {
        let places = u64::from(self.hosts) * u64::from(self.each);
        places > 0
            && u64::from(self.first) + places <= u64::from(u32::MAX)
            && self.origin.checked_add(self.hosts - 1).is_some()
    }
}

/// One payload and who sent it for which places.
#[derive(Clone, Debug)]
pub(super) struct Payload {
    pub(super) flags: u16,
    pub(super) parts: u16,
    pub(super) body: Bytes,
    pub(super) runs: Vec<Run>,
}

/// The frame of these payloads; their runs are put in order and together where they can be.
pub(super) fn write(header: Header, payloads: Vec<Payload>) -> Frame {
    let runs: usize = payloads.iter().map(|payload| payload.runs.len()).sum();
    let mut table = Vec::with_capacity(4 + 8 * payloads.len() + RUN_LEN * runs);
    table.extend_from_slice(&number(payloads.len()).to_le_bytes());
    let mut parts = vec![Part::Inline(Bytes::new())];
    for mut payload in payloads {
        payload.runs.sort_unstable_by_key(|run| (run.first, run.origin));
        payload.runs.dedup_by(|next, run| run.absorb(*next));
        table.extend_from_slice(&payload.flags.to_le_bytes());
        table.extend_from_slice(&payload.parts.to_le_bytes());
        table.extend_from_slice(&number(payload.runs.len()).to_le_bytes());
        for run in payload.runs {
            let done = if run.done { DONE } else { 0 };
            for value in [run.origin, run.hosts | done, run.first, run.each] {
                table.extend_from_slice(&value.to_le_bytes());
            }
        }
        parts.push(Part::Inline(payload.body));
    }
    parts[0] = Part::Inline(table.into());
    Frame::build(Header { kind: Kind::Gathered, flags: 0, index: 0, deadline_ms: 0, ..header }, None, b"", &parts)
}

/// The payloads of a merged frame; nothing is taken on trust.
pub(super) fn read(frame: &Frame) -> Result<Vec<Payload>, FrameError> {
    let mut bodies = frame.parts()?.into_iter().map(|part| match part {
        Part::Inline(bytes) => Ok(bytes),
        Part::Shared { .. } => Err(OVERRUN),
    });
    let table = bodies.next().ok_or(OVERRUN)??;
    if table.len() % 4 != 0 {
        return Err(OVERRUN);
    }
    let mut words = table.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let mut next = || words.next().ok_or(OVERRUN);
    let count = next()? as usize;
    let mut payloads = Vec::with_capacity(count.min(bodies.len()));
    for _ in 0..count {
        let (kind, len) = (next()?, next()? as usize);
        // The low half first, as it was written.
        let (flags, parts) = ((kind & 0xffff) as u16, (kind >> 16) as u16);
        let body = bodies.next().ok_or(OVERRUN)??;
        // What a reply would not be merged with, it does not come out with: memory of another host, for one.
        if flags & APART != 0 || 8 * usize::from(parts) > body.len() {
            return Err(OVERRUN);
        }
        let mut runs = Vec::with_capacity(len.min(table.len() / RUN_LEN));
        for _ in 0..len {
            let [origin, hosts, first, each] = [next()?, next()?, next()?, next()?];
            let run = Run { origin, hosts: hosts & !DONE, first, each, done: hosts & DONE != 0 };
            runs.push(Some(run).filter(Run::is_sound).ok_or(OVERRUN)?);
        }
        payloads.push(Payload { flags, parts, body, runs });
    }
    if next().is_ok() || bodies.next().is_some() { Err(OVERRUN) } else { Ok(payloads) }
}

/// The hosts whose replies are in a merged frame.
///
/// # Errors
/// If the frame is not one.
pub fn origins(frame: &Frame) -> Result<HostSet, FrameError> {
    Ok(origins_of(&read(frame)?))
}

pub(super) fn origins_of(payloads: &[Payload]) -> HostSet {
    hosts_of(payloads, |_| true)
}

/// The hosts that have answered to the end.
pub(super) fn done_in(payloads: &[Payload]) -> HostSet {
    hosts_of(payloads, |run| run.done)
}

fn hosts_of(payloads: &[Payload], wanted: impl Fn(&Run) -> bool) -> HostSet {
    let runs = payloads.iter().flat_map(|payload| &payload.runs).filter(|run| wanted(run));
    HostSet::from_runs(runs.map(|run| (run.origin, run.hosts)).collect())
}

/// The replies of a merged frame, with their places in the call's target of `places` ranks: those of the origins
/// that `take` agrees to, sent by who `addr` says is at the place. Payloads are shared, not copied.
///
/// # Errors
/// If the frame is not one.
///
/// ```
/// # use mesh_proto::hosts::{HostMerge, unmerge};
/// # use mesh_proto::{Frame, Header, Kind, ProcAddr};
/// # use std::time::Duration;
/// let caller = ProcAddr::CONTROLLER;
/// let proc = |rank| ProcAddr { rank, ..caller };
/// let mut merge = HostMerge::new(7, proc(0));
/// assert!(merge.expect(caller, 1, 2).is_empty());
/// let mut reply = |rank| {
///     let header = Header { call: 1, index: rank, ..Header::new(Kind::Reply, proc(rank), caller) };
///     merge.on_reply(Frame::build_plain(header, None, b"", b"done"), Duration::ZERO)
/// };
/// assert!(reply(4).is_empty(), "it waits for the other");
/// let gathered = reply(5).remove(0);
/// let replies: Vec<(u32, Frame)> = unmerge(&gathered, 8, |_| true, proc).unwrap().collect();
/// assert_eq!(replies.iter().map(|(place, _)| *place).collect::<Vec<_>>(), [4, 5]);
/// assert_eq!(replies[1].1.header.src, proc(5));
/// ```
pub fn unmerge<T, A>(frame: &Frame, places: u32, take: T, addr: A) -> Result<Replies<T, A>, FrameError>
where
    T: FnMut(HostNo) -> bool,
    A: FnMut(u32) -> ProcAddr,
{
    let header = Header { kind: Kind::Reply, target_len: 0, name_len: 0, ..frame.header };
    let mut payloads = read(frame)?;
    // Places that the call does not have are nobody's, and each has one reply.
    let mut left = u64::from(places);
    for payload in &mut payloads {
        payload.runs.retain(|run| {
            let count = u64::from(run.hosts) * u64::from(run.each);
            let fits = u64::from(run.first) + count <= u64::from(places) && count <= left;
            left -= if fits { count } else { 0 };
            fits
        });
        payload.runs.reverse();
    }
    payloads.reverse();
    Ok(Replies { header, payloads, at: (0, 0), taken: false, take, addr })
}

/// What [`unmerge`] gives.
#[derive(Debug)]
pub struct Replies<T, A> {
    header: Header,
    /// Last first; so are the runs of each.
    payloads: Vec<Payload>,
    /// Which host of the present run, and which of its places.
    at: (u32, u32),
    taken: bool,
    take: T,
    addr: A,
}

impl<T: FnMut(HostNo) -> bool, A: FnMut(u32) -> ProcAddr> Iterator for Replies<T, A> {
    type Item = (u32, Frame);

    fn next(&mut self) -> Option<(u32, Frame)> {
        loop {
            let payload = self.payloads.last_mut()?;
            let Some(run) = payload.runs.last().copied() else {
                self.payloads.pop();
                continue;
            };
            let (host, place) = self.at;
            if host == run.hosts {
                payload.runs.pop();
                self.at = (0, 0);
                continue;
            }
            if place == 0 {
                self.taken = (self.take)(run.origin + host);
            }
            if !self.taken || place == run.each {
                self.at = (host + 1, 0);
                continue;
            }
            self.at.1 += 1;
            let index = run.first + host * run.each + place;
            let header = Header {
                flags: payload.flags,
                parts: payload.parts,
                body_len: payload.body.len() as u64,
                src: (self.addr)(index),
                index,
                ..self.header
            };
            return Some((index, Frame { header, body: payload.body.clone() }));
        }
    }
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
