//! The two output streams of one process: bytes in, lines out.

use super::traceback::Traceback;
use super::{Found, Line, LogOptions, Stream};
use std::collections::VecDeque;
use std::time::Duration;

/// How many of its last stderr lines a dead process's failure shows.
pub const TAIL_LINES: usize = 40;
/// How many bytes of each of them.
const TAIL_WIDTH: usize = 500;
/// Longer lines are split.
const LONGEST: usize = 256 * 1024;
/// How long the beginning of a line waits for its rest before it is shown alone.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the state of a progress bar is shown, which keeps overwriting its line.
const STATE_EVERY: Duration = Duration::from_secs(5);
/// How many unfinished lines of different threads are kept at once, and how many unfinished tracebacks.
const MOST_BEGUN: usize = 256;
/// How long the end of a traceback waits for another traceback joined to it.
const JOINS: Duration = Duration::from_millis(100);

const MARK: u8 = 0x1e;
/// Stands for a line end inside text that was written at once.
const BREAK: u8 = 0x1d;
const SEPARATOR: u8 = 0x1f;

/// The writer of lines that do not name one.
#[derive(Clone, Debug, Default)]
struct Origin {
    name: Vec<u8>,
    rank: u32,
    point: Vec<u8>,
    host: Vec<u8>,
}

/// The beginning of a line that a thread has flushed.
#[derive(Debug)]
struct Begun {
    stream: Stream,
    thread: Vec<u8>,
    origin: Origin,
    text: Vec<u8>,
    first: Duration,
    since: Duration,
}

impl Begun {
    /// When it is shown even if the line has not ended: after a pause, or regularly if there is none.
    fn deadline(&self) -> Duration {
        (self.since + PATIENCE).min(self.first + STATE_EVERY)
    }
}

/// A traceback whose lines are still arriving.
#[derive(Debug)]
struct Unit {
    stream: Stream,
    level: u32,
    origin: Origin,
    text: Vec<u8>,
    state: Traceback,
    since: Duration,
}

impl Unit {
    fn deadline(&self) -> Duration {
        self.since + if self.state.unfinished() { PATIENCE } else { JOINS }
    }

    fn tell(&self, found: &mut dyn FnMut(Found<'_>)) {
        let Self { stream, level, origin: Origin { name, rank, point, host }, text, state, .. } = self;
        let whole = if *state == Traceback::Pause { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
        let line = Line {
            stream: *stream,
            level: *level,
            name,
            rank: *rank,
            point,
            host,
            text: whole,
            record: &[],
            alone: false,
        };
        found(Found::Line(line));
        if whole.len() < text.len() {
            // The empty line after it did not continue the traceback.
            found(Found::Line(Line { text: &[], ..line }));
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Tap {
    origin: Origin,
    /// Unfinished tracebacks, by stream and origin.
    units: Vec<Unit>,
    /// Bytes after the last line end, and when they came.
    partial: [(Vec<u8>, Duration); 2],
    begun: Vec<Begun>,
    tail: VecDeque<Vec<u8>>,
}

impl Tap {
    /// The streams of a rank that has not said who it is yet.
    #[must_use]
    pub fn new(rank: u32) -> Self {
        let point = format!("rank={rank}").into_bytes();
        Self { origin: Origin { rank, point, ..Origin::default() }, ..Self::default() }
    }

    /// Takes bytes as they were read at time `now`.
    pub fn feed(&mut self, stream: Stream, bytes: &[u8], now: Duration, found: &mut dyn FnMut(Found<'_>)) {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = (&rest[..at], &rest[at + 1..]);
            rest = after;
            let partial = &mut self.partial[stream as usize].0;
            if partial.is_empty() {
                self.line(stream, line, now, found);
            } else {
                partial.extend_from_slice(line);
                let mut whole = std::mem::take(partial);
                self.line(stream, &whole, now, found);
                // Reuse the memory for the next line.
                whole.clear();
                self.partial[stream as usize].0 = whole;
            }
        }
        if rest.is_empty() {
            return;
        }
        let (partial, since) = &mut self.partial[stream as usize];
        partial.extend_from_slice(rest);
        *since = now;
        if partial.len() > LONGEST {
            let whole = std::mem::take(partial);
            self.line(stream, &whole, now, found);
        }
    }

    /// When [`Tap::tick`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let partial = self.partial.iter().filter(|(text, _)| is_begun(text)).map(|(_, since)| *since);
        let begun = self.begun.iter().map(Begun::deadline).chain(self.units.iter().map(Unit::deadline));
        partial.map(|since| since + PATIENCE).chain(begun).min()
    }

    /// Time has passed: unfinished lines that were not continued are shown as they are.
    pub fn tick(&mut self, now: Duration, found: &mut dyn FnMut(Found<'_>)) {
        self.give_up(|at| at <= now, is_begun, found);
    }

    /// Somebody waits to see the output: unfinished lines are shown as they are.
    pub fn flush(&mut self, found: &mut dyn FnMut(Found<'_>)) {
        self.give_up(|_| true, is_begun, found);
    }

    /// Somebody waits to see what was written so far: finished tracebacks are shown, without waiting for others that may
    /// be joined to them.
    pub fn release(&mut self, found: &mut dyn FnMut(Found<'_>)) {
        self.units.retain(|unit| {
            let over = !unit.state.unfinished();
            if over {
                unit.tell(found);
            }
            !over
        });
    }

    /// Whether it keeps a traceback that is finished.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.units.iter().all(|unit| unit.state.unfinished())
    }

    /// The streams have ended.
    pub fn end(&mut self, found: &mut dyn FnMut(Found<'_>)) {
        self.give_up(|_| true, |partial| !partial.is_empty(), found);
    }

    fn give_up(
        &mut self,
        late: impl Fn(Duration) -> bool,
        counts: impl Fn(&[u8]) -> bool,
        found: &mut dyn FnMut(Found<'_>),
    ) {
        for stream in [Stream::Out, Stream::Err] {
            let (partial, since) = &mut self.partial[stream as usize];
            if counts(partial) && late(*since + PATIENCE) {
                let (whole, since) = (std::mem::take(partial), *since);
                self.line(stream, &whole, since, found);
            }
        }
        let mut at = 0;
        while at < self.begun.len() {
            if late(self.begun[at].deadline()) {
                let begun = self.begun.remove(at);
                self.tell(begun.stream, 0, &begun.origin, &begun.text, begun.since, found);
            } else {
                at += 1;
            }
        }
        self.units.retain(|unit| {
            let over = late(unit.deadline());
            if over {
                unit.tell(found);
            }
            !over
        });
    }

    /// The last lines of stderr, including an unfinished one.
    #[must_use]
    pub fn tail(&self) -> Vec<String> {
        let (partial, _) = &self.partial[Stream::Err as usize];
        let begun = Some(&partial[..partial.len().min(TAIL_WIDTH)]).filter(|begun| is_begun(begun));
        let all = self.tail.iter().map(Vec::as_slice).chain(begun);
        let from = (self.tail.len() + usize::from(begun.is_some())).saturating_sub(TAIL_LINES);
        all.skip(from).map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }

    fn line(&mut self, stream: Stream, raw: &[u8], now: Duration, found: &mut dyn FnMut(Found<'_>)) {
        let raw = raw.strip_suffix(b"\r").unwrap_or(raw);
        if raw.first() != Some(&MARK) || self.marked(stream, raw, now, found).is_none() {
            let origin = std::mem::take(&mut self.origin);
            self.tell(stream, 0, &origin, raw, now, found);
            self.origin = origin;
        }
    }

    /// A marked line; `None` if the mark is not valid.
    fn marked(&mut self, stream: Stream, raw: &[u8], now: Duration, found: &mut dyn FnMut(Found<'_>)) -> Option<()> {
        let kind = *raw.get(1)?;
        let rest = &raw[2..];
        match kind {
            b'L' | b'U' | b'N' | b'R' => {
                let mut fields = rest.splitn(if kind == b'R' { 6 } else { 5 }, |byte| *byte == SEPARATOR);
                let (level, name, rank, point, text) =
                    (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let level = decimal(level)?;
                let record = if kind == b'R' { fields.next()? } else { &[] };
                let lines = matches!(kind, b'U' | b'R').then(|| joined(text));
                let text = lines.as_deref().unwrap_or(text);
                let origin = std::mem::take(&mut self.origin);
                let (host, alone) = (origin.host.as_slice(), kind == b'N');
                let line = if name.is_empty() {
                    let Origin { name, rank, point, .. } = &origin;
                    Some(Line { stream, level, name, rank: *rank, point, host, text, record, alone })
                } else {
                    decimal(rank).map(|rank| Line { stream, level, name, rank, point, host, text, record, alone })
                };
                if let Some(line) = line {
                    self.pass(line, now, found);
                }
                let whole = line.is_some();
                self.origin = origin;
                whole.then_some(())?;
            }
            b'F' | b'C' => {
                let mut fields = rest.splitn(5, |byte| *byte == SEPARATOR);
                let (thread, name, rank, point, text) =
                    (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let origin = if name.is_empty() {
                    self.origin.clone()
                } else {
                    let host = self.origin.host.clone();
                    Origin { name: name.to_vec(), rank: decimal(rank)?, point: point.to_vec(), host }
                };
                self.fragment(kind == b'C', stream, thread, origin, text, now, found);
            }
            b'I' => {
                let mut fields = rest.split(|byte| *byte == SEPARATOR);
                let (name, rank, point, host) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let (procs, flags, window, level) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                self.origin =
                    Origin { name: name.to_vec(), rank: decimal(rank)?, point: point.to_vec(), host: host.to_vec() };
                let options = LogOptions::with(bits(flags)?, millis(window)?, decimal(level)?);
                found(Found::Introduced(decimal(procs)?, options));
            }
            b'O' => {
                let mut fields = rest.split(|byte| *byte == SEPARATOR);
                let (mesh, flags, window, level) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let mesh = std::str::from_utf8(mesh).ok()?.parse().ok()?;
                let options = LogOptions::with(bits(flags)?, millis(window)?, decimal(level)?);
                found(Found::Options(mesh, options));
            }
            _ => return None,
        }
        Some(())
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one mark")]
    fn fragment(
        &mut self,
        last: bool,
        stream: Stream,
        thread: &[u8],
        origin: Origin,
        text: &[u8],
        now: Duration,
        found: &mut dyn FnMut(Found<'_>),
    ) {
        let same = |begun: &Begun| begun.stream == stream && begun.thread == thread && begun.origin.name == origin.name;
        let at = self.begun.iter().position(same);
        let mut begun = match at {
            Some(at) => self.begun.remove(at),
            None => Begun { stream, thread: thread.to_vec(), origin, text: Vec::new(), first: now, since: now },
        };
        begun.text.extend_from_slice(text);
        begun.since = now;
        let overwritten = begun.text.trim_ascii_end().iter().rposition(|byte| *byte == b'\r');
        begun.text.drain(..overwritten.unwrap_or(0));
        if last || begun.text.len() > LONGEST {
            self.tell(stream, 0, &begun.origin, &begun.text, now, found);
            return;
        }
        if self.begun.len() >= MOST_BEGUN {
            let oldest = self.begun.remove(0);
            self.tell(oldest.stream, 0, &oldest.origin, &oldest.text, now, found);
        }
        self.begun.push(begun);
    }

    fn tell(
        &mut self,
        stream: Stream,
        level: u32,
        origin: &Origin,
        text: &[u8],
        now: Duration,
        found: &mut dyn FnMut(Found<'_>),
    ) {
        let Origin { name, rank, point, host } = origin;
        let line = Line { stream, level, name, rank: *rank, point, host, text, record: &[], alone: false };
        self.pass(line, now, found);
    }

    /// Passes a line on, once it is known not to be part of a traceback.
    fn pass(&mut self, line: Line<'_>, now: Duration, found: &mut dyn FnMut(Found<'_>)) {
        self.remember(line.stream, line.text);
        let line = shown(line);
        let same =
            |unit: &Unit| unit.stream == line.stream && unit.origin.rank == line.rank && unit.origin.name == line.name;
        if let Some(at) = self.units.iter().position(same) {
            let unit = &mut self.units[at];
            let more = if line.alone || !line.record.is_empty() { None } else { unit.state.with(line.text) };
            if let Some(state) = more {
                unit.text.push(b'\n');
                unit.text.extend_from_slice(line.text);
                (unit.state, unit.since) = (state, now);
                if unit.text.len() > LONGEST {
                    self.units.remove(at).tell(found);
                }
                return;
            }
            self.units.remove(at).tell(found);
        }
        // A record arrives whole.
        match Traceback::begun(line.text).filter(|_| line.level == 0 && !line.alone) {
            Some(state) => {
                if self.units.len() >= MOST_BEGUN {
                    self.units.remove(0).tell(found);
                }
                let [name, point, host, text] = [line.name, line.point, line.host, line.text].map(<[u8]>::to_vec);
                let origin = Origin { name, rank: line.rank, point, host };
                self.units.push(Unit { stream: line.stream, level: line.level, origin, text, state, since: now });
            }
            None => found(Found::Line(line)),
        }
    }

    fn remember(&mut self, stream: Stream, text: &[u8]) {
        if stream == Stream::Err {
            for text in text.split(|byte| *byte == b'\n') {
                let spare = if self.tail.len() < TAIL_LINES { None } else { self.tail.pop_front() };
                let mut line = spare.unwrap_or_default();
                line.clear();
                line.extend_from_slice(&text[..text.len().min(TAIL_WIDTH)]);
                self.tail.push_back(line);
            }
        }
    }
}

/// The lines of text that was written at once, each as [`shown`] has it.
fn joined(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    for line in text.split(|byte| *byte == BREAK) {
        if !out.is_empty() || line.as_ptr() != text.as_ptr() {
            out.push(b'\n');
        }
        out.extend_from_slice(last_state(line));
    }
    out
}

/// Whether this is the beginning of a line of text; a marked line without its line end is still being written.
fn is_begun(partial: &[u8]) -> bool {
    partial.first().is_some_and(|first| *first != MARK)
}

/// A line as a terminal would leave it: only what follows the last carriage return.
fn last_state(text: &[u8]) -> &[u8] {
    let text = text.trim_ascii_end();
    let from = text.iter().rposition(|byte| *byte == b'\r').map_or(0, |at| at + 1);
    &text[from..]
}

/// The same for a [`Line`]; lines that were written at once are done already.
fn shown(line: Line<'_>) -> Line<'_> {
    if line.text.contains(&b'\n') { line } else { Line { text: last_state(line.text), ..line } }
}

fn bits(raw: &[u8]) -> Option<u8> {
    decimal(raw).and_then(|number| u8::try_from(number).ok())
}

fn decimal(raw: &[u8]) -> Option<u32> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

fn millis(raw: &[u8]) -> Option<Duration> {
    decimal(raw).map(|ms| Duration::from_millis(u64::from(ms)))
}
