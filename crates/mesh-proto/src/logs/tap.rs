//! The two streams of one process: bytes in, lines out.

use super::{Found, Line, LogOptions, Stream};
use std::collections::VecDeque;
use std::time::Duration;

/// How many of its last lines on stderr a dead process's failure shows.
pub const TAIL_LINES: usize = 40;
/// Of each of them, so many bytes.
const TAIL_WIDTH: usize = 500;
/// A line that is longer comes in pieces.
const LONGEST: usize = 256 * 1024;
/// How long the beginning of a line waits for its rest before it is shown alone.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the state of a progress bar is shown, which overwrites its line all the time.
const STATE_EVERY: Duration = Duration::from_secs(5);
/// Begun lines of different threads that are kept at once.
const MOST_BEGUN: usize = 256;

const MARK: u8 = 0x1e;
const SEPARATOR: u8 = 0x1f;

/// Who writes, where the line does not say.
#[derive(Clone, Debug, Default)]
struct Origin {
    name: Vec<u8>,
    rank: u32,
    point: Vec<u8>,
    host: Vec<u8>,
}

/// The beginning of a line that one thread has flushed.
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
    /// When it is shown unless it has come to its end: after a pause, and now and then where none comes.
    fn deadline(&self) -> Duration {
        (self.since + PATIENCE).min(self.first + STATE_EVERY)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Tap {
    origin: Origin,
    /// Bytes after the last line's end, and when they came.
    partial: [(Vec<u8>, Duration); 2],
    begun: Vec<Begun>,
    tail: VecDeque<Vec<u8>>,
}

impl Tap {
    /// The streams of rank `rank`, which has not said who it is yet.
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
                // Its memory serves the next one.
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
        partial.map(|since| since + PATIENCE).chain(self.begun.iter().map(Begun::deadline)).min()
    }

    /// Time has passed: what was begun and not gone on with is shown as it is.
    pub fn tick(&mut self, now: Duration, found: &mut dyn FnMut(Found<'_>)) {
        self.give_up(|at| at <= now, is_begun, found);
    }

    /// Somebody waits to see what there is: what was begun is shown as it is.
    pub fn flush(&mut self, found: &mut dyn FnMut(Found<'_>)) {
        self.give_up(|_| true, is_begun, found);
    }

    /// Nothing follows.
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
                self.tell(begun.stream, 0, &begun.origin, &begun.text, found);
            } else {
                at += 1;
            }
        }
    }

    /// The last lines of stderr, one that was begun included.
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
            self.tell(stream, 0, &origin, raw, found);
            self.origin = origin;
        }
    }

    /// A line with a mark; none if the mark is not one.
    fn marked(&mut self, stream: Stream, raw: &[u8], now: Duration, found: &mut dyn FnMut(Found<'_>)) -> Option<()> {
        let kind = *raw.get(1)?;
        let rest = &raw[2..];
        match kind {
            b'L' | b'F' | b'C' => {
                let mut fields = rest.splitn(5, |byte| *byte == SEPARATOR);
                let (number, name, rank, point, text) =
                    (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                if kind == b'L' {
                    let level = decimal(number)?;
                    if name.is_empty() {
                        let origin = std::mem::take(&mut self.origin);
                        self.tell(stream, level, &origin, text, found);
                        self.origin = origin;
                    } else {
                        let host = std::mem::take(&mut self.origin.host);
                        let line = Line { stream, level, name, rank: decimal(rank)?, point, host: &host, text };
                        self.remember(stream, text);
                        found(Found::Line(shown(line)));
                        self.origin.host = host;
                    }
                    return Some(());
                }
                let origin = if name.is_empty() {
                    self.origin.clone()
                } else {
                    let host = self.origin.host.clone();
                    Origin { name: name.to_vec(), rank: decimal(rank)?, point: point.to_vec(), host }
                };
                self.fragment(kind == b'C', stream, number, origin, text, now, found);
            }
            b'I' => {
                let mut fields = rest.split(|byte| *byte == SEPARATOR);
                let (name, rank, point, host) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let (procs, window, level) = (fields.next()?, fields.next()?, fields.next()?);
                self.origin =
                    Origin { name: name.to_vec(), rank: decimal(rank)?, point: point.to_vec(), host: host.to_vec() };
                let options = LogOptions { shown: true, window: millis(window)?, level: decimal(level)? };
                found(Found::Introduced(decimal(procs)?, options));
            }
            b'O' => {
                let mut fields = rest.split(|byte| *byte == SEPARATOR);
                let (mesh, shown, window, level) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
                let mesh = std::str::from_utf8(mesh).ok()?.parse().ok()?;
                let options = LogOptions { shown: shown == b"1", window: millis(window)?, level: decimal(level)? };
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
            self.tell(stream, 0, &begun.origin, &begun.text, found);
            return;
        }
        if self.begun.len() >= MOST_BEGUN {
            let oldest = self.begun.remove(0);
            self.tell(oldest.stream, 0, &oldest.origin, &oldest.text, found);
        }
        self.begun.push(begun);
    }

    fn tell(&mut self, stream: Stream, level: u32, origin: &Origin, text: &[u8], found: &mut dyn FnMut(Found<'_>)) {
        self.remember(stream, text);
        let Origin { name, rank, point, host } = origin;
        found(Found::Line(shown(Line { stream, level, name, rank: *rank, point, host, text })));
    }

    fn remember(&mut self, stream: Stream, text: &[u8]) {
        if stream == Stream::Err {
            let spare = if self.tail.len() < TAIL_LINES { None } else { self.tail.pop_front() };
            let mut line = spare.unwrap_or_default();
            line.clear();
            line.extend_from_slice(&text[..text.len().min(TAIL_WIDTH)]);
            self.tail.push_back(line);
        }
    }
}

/// Whether this is the beginning of a line of text; a mark without its line's end is being written just now.
fn is_begun(partial: &[u8]) -> bool {
    partial.first().is_some_and(|first| *first != MARK)
}

/// A line as a terminal would leave it: of what was overwritten after a carriage return, the last.
fn shown(line: Line<'_>) -> Line<'_> {
    let text = line.text.trim_ascii_end();
    let from = text.iter().rposition(|byte| *byte == b'\r').map_or(0, |at| at + 1);
    Line { text: &text[from..], ..line }
}

fn decimal(raw: &[u8]) -> Option<u32> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

fn millis(raw: &[u8]) -> Option<Duration> {
    decimal(raw).map(|ms| Duration::from_millis(u64::from(ms)))
}
