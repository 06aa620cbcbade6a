//! What the taps of one host have found, on its way to the controller: many findings as one run of bytes.
//!
//! ```text
//! 1 mesh rank name point host      who writes the lines that follow
//! 2 stream level text              a line; the stream's second bit says that it is shown by itself
//! 3 mesh procs options             a process has said who it is
//! 4 mesh options                   a process sets the options of a mesh that it owns
//! 5 mesh                           no process of this mesh is left on that host
//! 6 ticket                         everything that was written before a flush was asked for has been told
//! 7 stream level text record       a line that shows a record of `logging`, and the record
//! ```
//!
//! Numbers are little-endian, and each text follows its length.

use super::{Found, Line, LogOptions, Stream};
use crate::MeshId;
use std::time::Duration;

/// In a line's stream byte: the line is shown by itself.
const ALONE: u8 = 2;

/// What a host reports.
#[derive(Clone, Copy, Debug)]
pub enum Told<'a> {
    /// Something that a process of this mesh has written.
    Found(MeshId, Found<'a>),
    /// No process of this mesh is left on the host.
    Closed(MeshId),
    /// The flush with this number is done.
    Flushed(u64),
}

/// Findings, as bytes.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// Where in `bytes` the latest origin is: most lines have the same origin as the line before.
    origin: (usize, usize),
}

impl Batch {
    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is nothing to report.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds what a process of `mesh` has written.
    pub fn found(&mut self, mesh: MeshId, found: &Found<'_>) {
        match found {
            Found::Line(line) => self.line(mesh, line),
            Found::Introduced(procs, options) => {
                self.tag(3).wide(mesh).number(*procs).options(options);
            }
            Found::Options(mesh, options) => {
                self.tag(4).wide(*mesh).options(options);
            }
        }
    }

    fn line(&mut self, mesh: MeshId, line: &Line<'_>) {
        let before = self.bytes.len();
        self.tag(1).wide(mesh).number(line.rank).text(line.name).text(line.point).text(line.host);
        let (from, to) = self.origin;
        if self.bytes[from..to] == self.bytes[before..] {
            self.bytes.truncate(before);
        } else {
            self.origin = (before, self.bytes.len());
        }
        let stream = line.stream as u8 | if line.alone { ALONE } else { 0 };
        let plain = line.record.is_empty();
        self.tag(if plain { 2 } else { 7 }).tag(stream).number(line.level).text(line.text);
        if !plain {
            self.text(line.record);
        }
    }

    /// Adds a note that no process of `mesh` is left.
    pub fn closed(&mut self, mesh: MeshId) {
        self.tag(5).wide(mesh);
    }

    /// Adds a note that a flush is done.
    pub fn flushed(&mut self, ticket: u64) {
        self.tag(6).wide(ticket);
    }

    /// Returns the bytes, and empties the batch.
    pub fn take(&mut self) -> Vec<u8> {
        self.origin = (0, 0);
        std::mem::take(&mut self.bytes)
    }

    fn tag(&mut self, tag: u8) -> &mut Self {
        self.bytes.push(tag);
        self
    }

    fn number(&mut self, number: u32) -> &mut Self {
        self.bytes.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn wide(&mut self, number: u64) -> &mut Self {
        self.bytes.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn text(&mut self, text: &[u8]) -> &mut Self {
        self.number(u32::try_from(text.len()).unwrap_or(u32::MAX));
        self.bytes.extend_from_slice(text);
        self
    }

    fn options(&mut self, options: &LogOptions) -> &mut Self {
        self.bytes.extend_from_slice(&options.encode());
        self
    }
}

impl LogOptions {
    /// Encodes this as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; 13] {
        let mut out = [0; 13];
        out[0] = self.flags();
        out[1..9].copy_from_slice(&u64::try_from(self.window.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
        out[9..].copy_from_slice(&self.level.to_le_bytes());
        out
    }

    /// Decodes what [`LogOptions::encode`] made.
    #[must_use]
    pub fn decode(raw: &[u8]) -> Option<Self> {
        let mut reader = Reader(raw);
        let options = reader.options()?;
        reader.0.is_empty().then_some(options)
    }
}

/// Reads a batch. False if the bytes are malformed; whatever precedes the error was passed to `told`.
pub fn read_batch(raw: &[u8], told: &mut dyn FnMut(Told<'_>)) -> bool {
    let mut reader = Reader(raw);
    let mut origin = None;
    while !reader.0.is_empty() {
        if reader.record(&mut origin, told).is_none() {
            return false;
        }
    }
    true
}

/// Who writes: the mesh, the rank, the name, the coordinates and the host.
type Origin<'a> = (MeshId, u32, &'a [u8], &'a [u8], &'a [u8]);

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn record(&mut self, origin: &mut Option<Origin<'a>>, told: &mut dyn FnMut(Told<'_>)) -> Option<()> {
        match self.byte()? {
            1 => *origin = Some((self.wide()?, self.number()?, self.text()?, self.text()?, self.text()?)),
            tag @ (2 | 7) => {
                let how = self.byte()?;
                let stream = if how & !ALONE == Stream::Out as u8 { Stream::Out } else { Stream::Err };
                let (level, text) = (self.number()?, self.text()?);
                let record = if tag == 7 { self.text()? } else { &[] };
                let (mesh, rank, name, point, host) = (*origin)?;
                let alone = how & ALONE != 0;
                let line = Line { stream, level, name, rank, point, host, text, record, alone };
                told(Told::Found(mesh, Found::Line(line)));
            }
            3 => {
                let (mesh, procs, options) = (self.wide()?, self.number()?, self.options()?);
                told(Told::Found(mesh, Found::Introduced(procs, options)));
            }
            4 => {
                let (mesh, options) = (self.wide()?, self.options()?);
                told(Told::Found(mesh, Found::Options(mesh, options)));
            }
            5 => told(Told::Closed(self.wide()?)),
            6 => told(Told::Flushed(self.wide()?)),
            _ => return None,
        }
        Some(())
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*word))
    }

    fn wide(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(text)
    }

    fn options(&mut self) -> Option<LogOptions> {
        let (flags, window, level) = (self.byte()?, self.wide()?, self.number()?);
        Some(LogOptions::with(flags, Duration::from_millis(window), level))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: LogOptions = LogOptions { shown: true, alike: true, window: Duration::from_millis(3000), level: 20 };

    fn line(rank: u32, text: &'static [u8]) -> Found<'static> {
        told_with(rank, text, b"", false)
    }

    fn told_with(rank: u32, text: &'static [u8], record: &'static [u8], alone: bool) -> Found<'static> {
        let (name, point, host) = (&b"trainers"[..], &b"hosts=1,gpus=0"[..], &b"b7"[..]);
        Found::Line(Line { stream: Stream::Err, level: 30, name, rank, point, host, text, record, alone })
    }

    fn sample() -> Vec<u8> {
        let mut batch = Batch::default();
        batch.found(7, &Found::Introduced(4, OPTIONS));
        batch.found(7, &line(2, b"one"));
        batch.found(7, &line(2, b""));
        batch.found(8, &line(3, b"three"));
        batch.found(8, &told_with(3, b"INFO four", b"{}", false));
        batch.found(8, &told_with(3, b"mesh: five", b"", true));
        batch.found(7, &Found::Options(9, LogOptions { shown: false, ..OPTIONS }));
        batch.closed(7);
        batch.flushed(5);
        batch.take()
    }

    fn heard(raw: &[u8]) -> (Vec<String>, bool) {
        let mut all = Vec::new();
        let whole = read_batch(raw, &mut |told| all.push(format!("{told:?}")));
        (all, whole)
    }

    #[test]
    fn findings_survive_the_way() {
        let (all, whole) = heard(&sample());
        let expected = [
            Told::Found(7, Found::Introduced(4, OPTIONS)),
            Told::Found(7, line(2, b"one")),
            Told::Found(7, line(2, b"")),
            Told::Found(8, line(3, b"three")),
            Told::Found(8, told_with(3, b"INFO four", b"{}", false)),
            Told::Found(8, told_with(3, b"mesh: five", b"", true)),
            Told::Found(9, Found::Options(9, LogOptions { shown: false, ..OPTIONS })),
            Told::Closed(7),
            Told::Flushed(5),
        ];
        assert_eq!(all, expected.map(|told| format!("{told:?}")));
        assert!(whole);
        assert_eq!(LogOptions::decode(&OPTIONS.encode()), Some(OPTIONS));
        assert_eq!(LogOptions::decode(&[0; 12]), None);
        assert_eq!(LogOptions::decode(&[0; 14]), None);
    }

    #[test]
    fn who_writes_is_said_once_for_lines_that_follow_each_other() {
        let mut batch = Batch::default();
        batch.found(7, &line(2, b"one"));
        let first = batch.len();
        batch.found(7, &line(2, b"two"));
        assert_eq!(batch.len() - first, 1 + 1 + 4 + 4 + 3);
        // Each batch states the origin again.
        batch.take();
        batch.found(7, &line(2, b"one"));
        assert_eq!(batch.len(), first);
    }

    #[test]
    fn a_piece_of_a_batch_or_none_at_all_is_noticed() {
        let raw = sample();
        let all = heard(&raw).0;
        for cut in 0..raw.len() {
            let (some, _) = heard(&raw[..cut]);
            assert_eq!(some[..], all[..some.len()]);
        }
        assert!(!heard(&raw[..raw.len() - 1]).1);
        assert!(!heard(&[9]).1);
        assert!(!heard(&[2, 0, 0, 0, 0, 0, 1, 0, 0, 0, b'x']).1, "a line of nobody");
        assert!(!heard(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]).1);
    }
}
