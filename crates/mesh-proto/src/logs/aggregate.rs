//! Lines of many ranks becoming what is shown.
//!
//! The first of several similar lines waits a moment ([`HOLD`]) for its like, then they are shown as one; those that
//! come later within the window are counted and shown as one at its end. The nth line of its kind of one rank goes with
//! the nth of another, never with another of its own (LOG-2).

use super::similar::normalise;
use super::{Line, LogOptions, Stream, label};
use crate::MeshId;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How long a line of a mesh of several procs waits for its like: shorter than a person notices.
const HOLD: Duration = Duration::from_millis(100);
/// Kinds of lines and bytes of a mesh that are remembered at once (LOG-3); the oldest go first.
const MOST_GROUPS: usize = 8192;
const MOST_BYTES: usize = 4 << 20;
/// Bytes that are shown at once.
const CHUNK: usize = 64 * 1024;

/// Lines to be shown, ready as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where.
    pub stream: Stream,
    /// Whole lines.
    pub text: Vec<u8>,
}

/// Similar lines of several ranks, one of each.
#[derive(Debug)]
struct Group {
    key: Arc<[u8]>,
    stream: Stream,
    name: Vec<u8>,
    point: Vec<u8>,
    host: Vec<u8>,
    /// The first of those that were not shown yet.
    text: Vec<u8>,
    /// Who has said it since it was last shown.
    ranks: Vec<u32>,
    made: Duration,
}

/// The groups of one kind of line, numbered in order.
#[derive(Debug, Default)]
struct Key {
    first: u64,
    groups: VecDeque<u64>,
    /// The number of the group that a rank's next such line goes to.
    next: HashMap<u32, u64>,
}

#[derive(Debug)]
struct Mesh {
    procs: u32,
    options: LogOptions,
    /// In the order in which they were made; the front has number `base`.
    groups: VecDeque<Group>,
    base: u64,
    /// The number of the first that still waits to be shown.
    held: u64,
    bytes: usize,
    keys: HashMap<Arc<[u8]>, Key>,
}

/// See the module.
#[derive(Debug)]
pub struct Aggregator {
    meshes: HashMap<MeshId, Mesh>,
    /// Whether the host says something: only where there are several.
    hosts: HashSet<Vec<u8>>,
    others: bool,
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
    fn show(&mut self, stream: Stream, text: &[u8], label: impl FnOnce(&mut Vec<u8>)) {
        if self.chunks.last().is_none_or(|last| last.stream != stream || last.text.len() >= CHUNK) {
            self.chunks.push(Chunk { stream, text: Vec::new() });
        }
        let Some(Chunk { text: out, .. }) = self.chunks.last_mut() else { return };
        let before = out.len();
        label(out);
        out.extend_from_slice(text);
        if text.is_empty() {
            out.pop();
        }
        out.push(b'\n');
        self.bytes += out.len() - before;
    }
}

impl Mesh {
    fn new(options: LogOptions) -> Self {
        Self { procs: 0, options, groups: VecDeque::new(), base: 0, held: 0, bytes: 0, keys: HashMap::new() }
    }

    fn gathers(&self) -> bool {
        self.procs > 1 && !self.options.window.is_zero()
    }

    /// Adds a line to the group that it belongs to, or makes one.
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
                } else if group.host != host {
                    // Of several hosts none is named.
                    group.host.clear();
                }
                group.ranks.push(line.rank);
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
            ranks: vec![line.rank],
            made: now,
        };
        self.bytes += group.size();
        self.groups.push_back(group);
    }

    /// Shows and forgets the oldest group.
    fn drop_first(&mut self, out: &mut Output) {
        let Some(mut group) = self.groups.pop_front() else { return };
        group.show(out);
        self.base += 1;
        self.held = self.held.max(self.base);
        self.bytes = self.bytes.saturating_sub(group.size());
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
            group.show(out);
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

    fn flush(&mut self, out: &mut Output) {
        while !self.groups.is_empty() {
            self.drop_first(out);
        }
    }
}

impl Group {
    /// What it holds on to; the text may change, and is counted with the key.
    fn size(&self) -> usize {
        size_of::<Self>() + 2 * self.key.len() + self.name.len()
    }

    fn show(&mut self, out: &mut Output) {
        let Self { stream, name, point, host, text, ranks, .. } = self;
        match ranks.as_mut_slice() {
            [] => return,
            [rank] => {
                let line = Line { stream: *stream, level: 0, name, rank: *rank, point, host, text };
                out.show(*stream, text, |to| label::one(&line, host, to));
            }
            several => out.show(*stream, text, |to| label::many(name, point, host, several, to)),
        }
        ranks.clear();
    }
}

impl Aggregator {
    /// One that knows no mesh yet; `defaults` hold for lines of meshes that nobody has introduced.
    #[must_use]
    pub fn new(defaults: LogOptions) -> Self {
        Self {
            meshes: HashMap::new(),
            hosts: HashSet::new(),
            others: false,
            out: Output::default(),
            scratch: Vec::new(),
            defaults,
        }
    }

    /// A process of a mesh has said how many they are, and what holds for them unless something was set.
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

    /// Takes a line that comes from another host, and was not left out there: whatever the options are now.
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
        if !mesh.gathers() {
            self.out.show(line.stream, line.text, |to| label::one(line, host, to));
            return;
        }
        self.scratch.clear();
        self.scratch.push(line.stream as u8);
        self.scratch.extend_from_slice(line.name);
        self.scratch.push(b'\n');
        normalise(line.text, &mut self.scratch);
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

    /// Shows whatever waits, now.
    pub fn flush(&mut self) {
        for mesh in self.meshes.values_mut() {
            mesh.flush(&mut self.out);
        }
    }

    /// A mesh has ended: shows what waits of it, and forgets it.
    pub fn forget(&mut self, mesh: MeshId) {
        if let Some(mut known) = self.meshes.remove(&mesh) {
            known.flush(&mut self.out);
        }
    }

    /// What is to be shown.
    pub fn take(&mut self) -> Vec<Chunk> {
        self.out.bytes = 0;
        std::mem::take(&mut self.out.chunks)
    }

    /// Bytes of that.
    #[must_use]
    pub fn ready(&self) -> usize {
        self.out.bytes
    }
}
