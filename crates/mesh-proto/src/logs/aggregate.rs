//! Turns lines of many ranks into what is shown.
//!
//! The first of several equal lines waits a moment ([`HOLD`]) for the others, then they are shown as one. Those that
//! come later in the window are counted, and shown as one at its end. The nth line of its kind from one rank is merged
//! with the nth from another, never with another of its own rank (LOG-2). If numbers make no difference, the merged
//! line says how many of the lines had other numbers than it shows (LOG-7).

use super::similar::normalise;
use super::{Line, LogOptions, Stream, label};
use crate::MeshId;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How long a line of a mesh of several procs waits for others like it: too short for people to notice.
const HOLD: Duration = Duration::from_millis(100);
/// Kinds of lines and bytes that are remembered per mesh (LOG-3); the oldest go first.
const MOST_GROUPS: usize = 8192;
const MOST_BYTES: usize = 4 << 20;
/// Bytes that are shown at once.
const CHUNK: usize = 64 * 1024;

/// Lines to show, in their final form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The stream to show them on.
    pub stream: Stream,
    /// Whole lines.
    pub text: Vec<u8>,
    /// The records that the text shows, if any; then it shows nothing else.
    pub records: Vec<Record>,
}

/// A `logging` record, and who logged it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The actor, or the mesh of processes.
    pub name: Vec<u8>,
    /// Its rank in its mesh.
    pub rank: u32,
    /// Its coordinates.
    pub point: Vec<u8>,
    /// The host it runs on, even if it is the only one.
    pub host: Vec<u8>,
    /// What was logged, as JSON that was not parsed.
    pub json: Vec<u8>,
}

impl Record {
    fn of(line: &Line<'_>) -> Option<Self> {
        let Line { name, rank, point, host, record, .. } = *line;
        let [name, point, host, json] = [name, point, host, record].map(<[u8]>::to_vec);
        (!record.is_empty()).then_some(Self { name, rank, point, host, json })
    }

    fn size(&self) -> usize {
        size_of::<Self>() + self.name.len() + self.point.len() + self.host.len() + self.json.len()
    }
}

/// Equal lines of several ranks, one from each.
#[derive(Debug)]
struct Group {
    key: Arc<[u8]>,
    stream: Stream,
    name: Vec<u8>,
    point: Vec<u8>,
    host: Vec<u8>,
    /// The first line not shown yet.
    text: Vec<u8>,
    /// How many lines have other numbers than `text`.
    others: usize,
    /// The records among the lines.
    records: Vec<Record>,
    /// The ranks that have written the line since it was last shown.
    ranks: Vec<u32>,
    made: Duration,
}

/// The groups of one kind of line, numbered in order.
#[derive(Debug, Default)]
struct Key {
    first: u64,
    groups: VecDeque<u64>,
    /// The number of the group for a rank's next line of this kind.
    next: HashMap<u32, u64>,
}

#[derive(Debug)]
struct Mesh {
    procs: u32,
    options: LogOptions,
    /// In the order of creation; the front has number `base`.
    groups: VecDeque<Group>,
    base: u64,
    /// The number of the first group that still waits to be shown.
    held: u64,
    bytes: usize,
    keys: HashMap<Arc<[u8]>, Key>,
}

/// See the module.
#[derive(Debug)]
pub struct Aggregator {
    meshes: HashMap<MeshId, Mesh>,
    /// The hosts seen: a label names its host only if there are several.
    hosts: HashSet<Vec<u8>>,
    others: bool,
    /// Records are handed on one by one, without waiting for others.
    records: bool,
    out: Output,
    scratch: Vec<u8>,
    defaults: LogOptions,
}

#[derive(Debug, Default)]
struct Output {
    chunks: Vec<Chunk>,
    bytes: usize,
}

impl Output {
    /// Adds lines, each with its label before it, and the number of `others` to the last.
    fn show(
        &mut self,
        stream: Stream,
        text: &[u8],
        others: usize,
        records: Vec<Record>,
        label: impl FnOnce(&mut Vec<u8>),
    ) {
        let joins = |last: &Chunk| last.stream == stream && last.text.len() < CHUNK && last.records.is_empty();
        if !records.is_empty() || !self.chunks.last().is_some_and(joins) {
            self.chunks.push(Chunk { stream, text: Vec::new(), records: Vec::new() });
        }
        let Some(Chunk { text: out, records: with, .. }) = self.chunks.last_mut() else { return };
        let before = out.len();
        label(out);
        let again = if text.contains(&b'\n') { out[before..].to_vec() } else { Vec::new() };
        for (n, line) in text.split(|byte| *byte == b'\n').enumerate() {
            if n > 0 {
                out.push(b'\n');
                out.extend_from_slice(&again);
            }
            out.extend_from_slice(line);
            if line.is_empty() {
                out.pop();
            }
        }
        if others > 0 {
            out.extend_from_slice(format!(" (and {others} alike, other numbers)").as_bytes());
        }
        out.push(b'\n');
        self.bytes += out.len() - before + records.iter().map(Record::size).sum::<usize>();
        *with = records;
    }
}

impl Mesh {
    fn new(options: LogOptions) -> Self {
        Self { procs: 0, options, groups: VecDeque::new(), base: 0, held: 0, bytes: 0, keys: HashMap::new() }
    }

    fn gathers(&self) -> bool {
        self.procs > 1 && !self.options.window.is_zero()
    }

    /// Whether no line waits to be shown for the first time.
    fn is_quiet(&self) -> bool {
        self.held - self.base == self.groups.len() as u64
    }

    /// Adds a line to its group, or makes one.
    fn gather(&mut self, line: &Line<'_>, host: &[u8], now: Duration, key: &[u8]) {
        if let Some(known) = self.keys.get_mut(key) {
            let next = known.next.entry(line.rank).or_insert(0);
            let at = (*next).max(known.first);
            *next = at + 1;
            if let Some(number) = known.groups.get((at - known.first) as usize) {
                let group = &mut self.groups[(number - self.base) as usize];
                if group.ranks.is_empty() {
                    group.text.clear();
                    group.text.extend_from_slice(line.text);
                    group.point.clear();
                    group.point.extend_from_slice(line.point);
                    group.host.clear();
                    group.host.extend_from_slice(host);
                } else {
                    if group.host != host {
                        // If there are several hosts, none is named.
                        group.host.clear();
                    }
                    group.others += usize::from(group.text != line.text);
                }
                group.ranks.push(line.rank);
                if let Some(record) = Record::of(line) {
                    self.bytes += record.size();
                    group.records.push(record);
                }
                return;
            }
        }
        let number = self.base + self.groups.len() as u64;
        let key: Arc<[u8]> = match self.keys.get_key_value(key) {
            Some((known, _)) => Arc::clone(known),
            None => key.into(),
        };
        let known = self.keys.entry(Arc::clone(&key)).or_default();
        known.groups.push_back(number);
        if known.groups.len() == 1 {
            known.next.insert(line.rank, known.first + 1);
        }
        let group = Group {
            key,
            stream: line.stream,
            name: line.name.to_vec(),
            point: line.point.to_vec(),
            host: host.to_vec(),
            text: line.text.to_vec(),
            others: 0,
            records: Record::of(line).into_iter().collect(),
            ranks: vec![line.rank],
            made: now,
        };
        self.bytes += group.size() + group.records.iter().map(Record::size).sum::<usize>();
        self.groups.push_back(group);
    }

    /// Shows and forgets the oldest group.
    fn drop_first(&mut self, out: &mut Output) {
        let Some(mut group) = self.groups.pop_front() else { return };
        let freed = group.show(out) + group.size();
        self.base += 1;
        self.held = self.held.max(self.base);
        self.bytes = self.bytes.saturating_sub(freed);
        if let Some(key) = self.keys.get_mut(&group.key) {
            key.groups.pop_front();
            key.first += 1;
            if key.groups.is_empty() {
                self.keys.remove(&group.key);
            }
        }
    }

    fn tick(&mut self, now: Duration, out: &mut Output) {
        while let Some(group) = self.groups.get_mut((self.held - self.base) as usize)
            && group.made + HOLD.min(self.options.window) <= now
        {
            self.bytes = self.bytes.saturating_sub(group.show(out));
            self.held += 1;
        }
        while self.groups.front().is_some_and(|group| group.made + self.options.window <= now) {
            self.drop_first(out);
        }
    }

    fn deadline(&self) -> Option<Duration> {
        let held = self.groups.get((self.held - self.base) as usize);
        let held = held.map(|group| group.made + HOLD.min(self.options.window));
        held.into_iter().chain(self.groups.front().map(|group| group.made + self.options.window)).min()
    }

    /// Shows what waits to be shown for the first time.
    fn release(&mut self, out: &mut Output) {
        while let Some(group) = self.groups.get_mut((self.held - self.base) as usize) {
            self.bytes = self.bytes.saturating_sub(group.show(out));
            self.held += 1;
        }
    }

    fn flush(&mut self, out: &mut Output) {
        while !self.groups.is_empty() {
            self.drop_first(out);
        }
    }
}

impl Group {
    /// The memory that it holds; the text may change, and is counted with the key.
    fn size(&self) -> usize {
        size_of::<Self>() + 2 * self.key.len() + self.name.len()
    }

    /// Shows what was not shown yet; returns the bytes of the records that go with it.
    fn show(&mut self, out: &mut Output) -> usize {
        let others = std::mem::take(&mut self.others);
        let records = std::mem::take(&mut self.records);
        let freed = records.iter().map(Record::size).sum();
        let Self { stream, name, point, host, text, ranks, .. } = self;
        match ranks.as_mut_slice() {
            [] => return freed,
            [_] => out.show(*stream, text, others, records, |to| label::one(name, point, host, to)),
            several => {
                out.show(*stream, text, others, records, |to| label::many(name, point, host, several, to));
            }
        }
        ranks.clear();
        freed
    }
}

impl Aggregator {
    /// An aggregator that knows no mesh yet; `defaults` hold for lines of meshes that nobody has introduced.
    #[must_use]
    pub fn new(defaults: LogOptions) -> Self {
        Self {
            meshes: HashMap::new(),
            hosts: HashSet::new(),
            others: false,
            records: false,
            out: Output::default(),
            scratch: Vec::new(),
            defaults,
        }
    }

    /// Sets whether somebody takes records one by one: if so, each is shown by itself and at once.
    pub fn hand_on_records(&mut self, wanted: bool) {
        self.records = wanted;
    }

    /// A process of a mesh has said how many procs the mesh has, and its options unless others were set.
    pub fn introduce(&mut self, mesh: MeshId, procs: u32, options: LogOptions) {
        let known = self.meshes.entry(mesh).or_insert_with(|| Mesh::new(options));
        known.procs = procs;
    }

    /// Sets the options of a mesh.
    pub fn set(&mut self, mesh: MeshId, options: LogOptions) {
        let known = self.meshes.entry(mesh).or_insert_with(|| Mesh::new(options));
        known.flush(&mut self.out);
        known.options = options;
    }

    /// Takes a line that a process of `mesh` has written, at time `now`.
    pub fn line(&mut self, mesh: MeshId, line: &Line<'_>, now: Duration) {
        if !self.meshes.entry(mesh).or_insert_with(|| Mesh::new(self.defaults)).options.omit(line) {
            self.add(mesh, line, now);
        }
    }

    /// Takes a line from another host that was not left out there, whatever the options are now.
    pub fn kept(&mut self, mesh: MeshId, line: &Line<'_>, now: Duration) {
        self.others = true;
        self.add(mesh, line, now);
    }

    fn add(&mut self, mesh: MeshId, line: &Line<'_>, now: Duration) {
        let mesh = self.meshes.entry(mesh).or_insert_with(|| Mesh::new(self.defaults));
        if !line.host.is_empty() && !self.hosts.contains(line.host) && self.hosts.len() < MOST_GROUPS {
            self.hosts.insert(line.host.to_vec());
        }
        let host = if self.others || self.hosts.len() > 1 { line.host } else { b"" };
        let alone = line.alone || (self.records && !line.record.is_empty());
        if !mesh.gathers() || (alone && mesh.is_quiet()) {
            let records = Record::of(line).into_iter().collect();
            self.out.show(line.stream, line.text, 0, records, |to| label::one(line.name, line.point, host, to));
            return;
        }
        self.scratch.clear();
        self.scratch.push(line.stream as u8);
        self.scratch.push(u8::from(alone) | u8::from(line.record.is_empty()) << 1);
        if alone {
            // It waits for the lines before it, not for others like it.
            self.scratch.extend_from_slice(&line.rank.to_le_bytes());
        }
        self.scratch.extend_from_slice(line.name);
        self.scratch.push(b'\n');
        if mesh.options.alike {
            normalise(line.text, &mut self.scratch);
        } else {
            self.scratch.extend_from_slice(line.text);
        }
        mesh.gather(line, host, now, &self.scratch);
        while mesh.groups.len() > MOST_GROUPS || mesh.bytes > MOST_BYTES {
            mesh.drop_first(&mut self.out);
        }
    }

    /// When [`Aggregator::tick`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.meshes.values().filter_map(Mesh::deadline).min()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        for mesh in self.meshes.values_mut() {
            mesh.tick(now, &mut self.out);
        }
    }

    /// Shows now what a mesh's lines say for the first time. Lines that are counted go on being counted.
    pub fn release(&mut self, mesh: MeshId) {
        if let Some(mesh) = self.meshes.get_mut(&mesh) {
            mesh.release(&mut self.out);
        }
    }

    /// Whether no line of a mesh waits to be shown for the first time.
    #[must_use]
    pub fn is_quiet(&self, mesh: MeshId) -> bool {
        self.meshes.get(&mesh).is_none_or(Mesh::is_quiet)
    }

    /// Shows everything that waits, now.
    pub fn flush(&mut self) {
        for mesh in self.meshes.values_mut() {
            mesh.flush(&mut self.out);
        }
    }

    /// A mesh has ended: shows its waiting lines, and forgets it.
    pub fn forget(&mut self, mesh: MeshId) {
        if let Some(mut known) = self.meshes.remove(&mesh) {
            known.flush(&mut self.out);
        }
    }

    /// Returns what to show.
    pub fn take(&mut self) -> Vec<Chunk> {
        self.out.bytes = 0;
        std::mem::take(&mut self.out.chunks)
    }

    /// The bytes that wait for [`Aggregator::take`].
    #[must_use]
    pub fn ready(&self) -> usize {
        self.out.bytes
    }
}
