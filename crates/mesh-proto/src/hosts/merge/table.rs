//! The table of payloads in a merged frame.

use super::super::{HostSet, Short};
use crate::messages::is_mergeable;
use crate::{Frame, FrameError, Header, HostNo, Kind, Part};
use bytes::Bytes;
use smallvec::smallvec;
use std::ops::Range;

pub(super) const RUN_LEN: usize = 16;
const OVERRUN: FrameError = FrameError::Overrun { what: "table of merged replies" };

/// In the second word of a run: nothing more comes from its hosts.
const DONE: u32 = 1 << 31;
/// In an entry's number of runs: each place has its own payload.
const SERIES: u32 = 1 << 31;

/// Hosts `origin..origin + hosts` sent the payload, each for `each` consecutive places, counting from `first`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) origin: HostNo,
    pub(super) hosts: u32,
    pub(super) first: u32,
    pub(super) each: u32,
    /// Whether these are the last replies of the hosts.
    pub(super) done: bool,
}

impl Run {
    /// Extends this run by `next` if that continues it. Returns whether it did.
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

    /// The number of places.
    pub(super) fn places(&self) -> u64 {
        u64::from(self.hosts) * u64::from(self.each)
    }

    /// The run of one of its places.
    fn place(&self, index: u32) -> Self {
        Self { origin: self.origin + index / self.each, hosts: 1, first: self.first + index, each: 1, done: self.done }
    }

    fn words(self) -> [u32; 4] {
        [self.origin, self.hosts | if self.done { DONE } else { 0 }, self.first, self.each]
    }

    fn of_words([origin, hosts, first, each]: [u32; 4]) -> Self {
        Self { origin, hosts: hosts & !DONE, first, each, done: hosts & DONE != 0 }
    }

    /// Whether the numbers are valid for hosts and places.
    fn is_sound(&self) -> bool {
        let places = self.places();
        places > 0
            && u64::from(self.first) + places <= u64::from(u32::MAX)
            && self.origin.checked_add(self.hosts - 1).is_some()
    }
}

/// One payload, and who sent it for which places.
#[derive(Clone, Debug)]
pub(super) struct Payload {
    pub(super) flags: u16,
    pub(super) parts: u16,
    pub(super) body: Bytes,
    pub(super) runs: Short<Run>,
}

/// One entry in the table of a merged frame.
#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    pub(super) flags: u16,
    pub(super) parts: u16,
    /// The payload, or those of a series one after the other.
    pub(super) body: Bytes,
    pub(super) runs: Short<Run>,
    /// For a series, whose one run has a payload per place: their lengths, as the table has them.
    pub(super) lengths: Option<Bytes>,
}

impl Entry {
    /// Whether each place has its own payload.
    pub(super) fn is_series(&self) -> bool {
        self.lengths.is_some()
    }

    /// The number of payloads.
    pub(super) fn count(&self) -> usize {
        self.lengths.as_ref().map_or(1, |lengths| lengths.len() / 4)
    }

    /// The number of bytes, and of runs if each payload stands alone.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.body.len(), self.runs.len().max(self.count()))
    }

    pub(super) fn payloads(mut self) -> impl Iterator<Item = Payload> {
        let Self { flags, parts, .. } = self;
        let runs = std::mem::take(&mut self.runs);
        let run = runs.first().copied();
        let whole = self.lengths.is_none().then(|| Payload { flags, parts, body: self.body.clone(), runs });
        let (mut index, mut start) = (0, 0);
        let series = std::iter::from_fn(move || {
            let body = self.piece(index, start)?;
            let runs = smallvec![run?.place(index)];
            index += 1;
            start += body.len();
            Some(Payload { flags, parts, body, runs })
        });
        whole.into_iter().chain(series)
    }

    /// The total length of `count` payloads of a series, starting at a place.
    pub(super) fn len_of(&self, from: u32, count: u32) -> usize {
        let Some(lengths) = &self.lengths else { return 0 };
        (from..from + count).filter_map(|index| word(lengths, index as usize * 4)).map(|len| len as usize).sum()
    }

    /// The payload of a series at a place, which begins at `start`.
    pub(super) fn piece(&self, index: u32, start: usize) -> Option<Bytes> {
        let len = word(self.lengths.as_ref()?, index as usize * 4)? as usize;
        Some(self.body.slice(start..start + len))
    }
}

/// A payload of one place, or a series, as bytes.
struct Piece<'a> {
    flags: u16,
    parts: u16,
    run: Run,
    /// Only for a series.
    lengths: Option<&'a [u8]>,
    body: &'a [u8],
}

impl<'a> Piece<'a> {
    fn of_single(payload: &'a Payload) -> Option<Self> {
        let run = *payload.runs.first()?;
        Some(Self { flags: payload.flags, parts: payload.parts, run, lengths: None, body: &payload.body })
    }

    fn of_series(entry: &'a Entry) -> Option<Self> {
        let run = *entry.runs.first()?;
        Some(Self { flags: entry.flags, parts: entry.parts, run, lengths: entry.lengths.as_deref(), body: &entry.body })
    }
}

/// Pieces that follow one another.
struct Series {
    flags: u16,
    parts: u16,
    run: Run,
    pieces: Range<usize>,
}

impl Series {
    fn absorb(&mut self, next: &Self) -> bool {
        let follows = (self.flags, self.parts) == (next.flags, next.parts) && self.run.absorb(next.run);
        if follows {
            self.pieces.end = next.pieces.end;
        }
        follows
    }
}

/// Combines pieces, sorted by place, into series: first those of each host, then those of neighbours.
fn series_of(pieces: &[Piece<'_>]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for (at, piece) in pieces.iter().enumerate() {
        let next = Series { flags: piece.flags, parts: piece.parts, run: piece.run, pieces: at..at + 1 };
        if !all.last_mut().is_some_and(|last| last.run.origin == next.run.origin && last.absorb(&next)) {
            all.push(next);
        }
    }
    all.dedup_by(|next, series| series.absorb(next));
    all
}

/// The frame of these payloads and series. Runs are sorted, and joined where possible.
pub(super) fn write(header: Header, payloads: Vec<Payload>, series: &[Entry]) -> Frame {
    let (singles, others): (Vec<Payload>, Vec<Payload>) =
        payloads.into_iter().partition(|payload| matches!(&*payload.runs, [run] if run.places() == 1));
    let mut pieces: Vec<Piece<'_>> = singles.iter().filter_map(Piece::of_single).collect();
    pieces.extend(series.iter().filter_map(Piece::of_series));
    pieces.sort_unstable_by_key(|piece| (piece.run.first, piece.run.origin));
    let series = series_of(&pieces);
    let entries = others.len() + series.len();
    let mut table = Vec::with_capacity(4 + (8 + RUN_LEN) * entries + 4 * singles.len());
    let put = |table: &mut Vec<u8>, value: u32| table.extend_from_slice(&value.to_le_bytes());
    put(&mut table, number(entries));
    let mut parts = vec![Part::Inline(Bytes::new())];
    for payload in others {
        let mut runs = payload.runs.to_vec();
        runs.sort_unstable_by_key(|run| (run.first, run.origin));
        runs.dedup_by(|next, run| run.absorb(*next));
        put(&mut table, kind(payload.flags, payload.parts));
        put(&mut table, number(runs.len()));
        runs.into_iter().flat_map(Run::words).for_each(|word| put(&mut table, word));
        parts.push(Part::Inline(payload.body));
    }
    for Series { flags, parts: each, run, pieces: range } in series {
        let pieces = &pieces[range];
        put(&mut table, kind(flags, each));
        put(&mut table, if run.places() == 1 { 1 } else { 1 | SERIES });
        run.words().into_iter().for_each(|word| put(&mut table, word));
        let mut body = Vec::with_capacity(pieces.iter().map(|piece| piece.body.len()).sum());
        for piece in pieces {
            match piece.lengths {
                _ if run.places() == 1 => {}
                Some(lengths) => table.extend_from_slice(lengths),
                None => put(&mut table, number(piece.body.len())),
            }
            body.extend_from_slice(piece.body);
        }
        parts.push(Part::Inline(body.into()));
    }
    parts[0] = Part::Inline(table.into());
    Frame::build(Header { kind: Kind::Gathered, flags: 0, index: 0, deadline_ms: 0, ..header }, None, b"", &parts)
}

/// The entries of a merged frame. Nothing in it is trusted.
pub(super) fn read(frame: &Frame) -> Result<Vec<Entry>, FrameError> {
    let mut bodies = frame.parts()?.into_iter().map(|part| match part {
        Part::Inline(bytes) => Ok(bytes),
        Part::Shared { .. } | Part::Distant { .. } => Err(OVERRUN),
    });
    let table = bodies.next().ok_or(OVERRUN)??;
    let mut words = Words { table: &table, at: 0 };
    let count = words.next()? as usize;
    let mut entries = Vec::with_capacity(count.min(bodies.len()));
    for _ in 0..count {
        let (kind, len) = (words.next()?, words.next()?);
        // The low half first, as it was written.
        let (flags, parts) = ((kind & 0xffff) as u16, (kind >> 16) as u16);
        let body = bodies.next().ok_or(OVERRUN)??;
        // Only flags that a reply may be merged with are accepted: they exclude another host's memory, for example.
        if !is_mergeable(flags) {
            return Err(OVERRUN);
        }
        let mut runs = Short::new();
        for _ in 0..len & !SERIES {
            let run = Run::of_words([words.next()?, words.next()?, words.next()?, words.next()?]);
            runs.push(Some(run).filter(Run::is_sound).ok_or(OVERRUN)?);
        }
        let least = 8 * usize::from(parts);
        let mut lengths = None;
        if len & SERIES == 0 {
            if body.len() < least {
                return Err(OVERRUN);
            }
        } else {
            let [run] = *runs else { return Err(OVERRUN) };
            let from = words.at;
            let mut left = body.len();
            for _ in 0..run.places() {
                let len = words.next()? as usize;
                left = left.checked_sub(len).filter(|_| len >= least).ok_or(OVERRUN)?;
            }
            if left > 0 {
                return Err(OVERRUN);
            }
            lengths = Some(table.slice(from..words.at));
        }
        entries.push(Entry { flags, parts, body, runs, lengths });
    }
    if words.at != table.len() || bodies.next().is_some() { Err(OVERRUN) } else { Ok(entries) }
}

/// The hosts whose replies are in a merged frame.
///
/// # Errors
/// If the frame is not a merged one.
pub fn origins(frame: &Frame) -> Result<HostSet, FrameError> {
    Ok(origins_of(&read(frame)?))
}

pub(super) fn origins_of(entries: &[Entry]) -> HostSet {
    hosts_of(entries, |_| true)
}

/// The hosts whose answers are complete.
pub(super) fn done_in(entries: &[Entry]) -> HostSet {
    hosts_of(entries, |run| run.done)
}

fn hosts_of(entries: &[Entry], wanted: impl Fn(&Run) -> bool) -> HostSet {
    let runs = entries.iter().flat_map(|entry| &entry.runs).filter(|run| wanted(run));
    HostSet::from_runs(runs.map(|run| (run.origin, run.hosts)).collect())
}

/// The words of a table in order.
struct Words<'a> {
    table: &'a [u8],
    at: usize,
}

impl Words<'_> {
    fn next(&mut self) -> Result<u32, FrameError> {
        let found = word(self.table, self.at).ok_or(OVERRUN)?;
        self.at += 4;
        Ok(found)
    }
}

fn word(raw: &[u8], at: usize) -> Option<u32> {
    raw.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

fn kind(flags: u16, parts: u16) -> u32 {
    u32::from(parts) << 16 | u32::from(flags)
}

fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
