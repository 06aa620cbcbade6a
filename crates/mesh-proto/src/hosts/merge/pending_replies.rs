//! Collected payloads, with equal ones stored once.

use super::super::Short;
use super::table::{Entry, Payload, RUN_LEN, Run};
use super::{MERGED_MAX, PAYLOADS_MAX};
use bytes::Bytes;
use rustc_hash::{FxHashMap, FxHasher};
use smallvec::smallvec;
use std::hash::Hasher;

/// Payloads are compared by their length and this many bytes at either end, which nearly always tells them apart.
const SAMPLE: usize = 32;
/// How many payloads of equal appearance are compared: beyond that, storing one more copy costs less.
const TRIES: usize = 4;
/// After this many new payloads in a row, series are kept as they come: no two replies are equal, and comparing them is
/// most of the work.
const LOOKS: usize = 64;

/// The replies to one call so far.
#[derive(Debug, Default)]
pub(super) struct PendingReplies {
    payloads: Vec<Payload>,
    /// Series that were not compared, and their number of payloads.
    series: Vec<Entry>,
    unseen: usize,
    /// How many payloads in a row were new.
    news: usize,
    /// Payloads by appearance.
    likeness: FxHashMap<u64, Short<usize>>,
    bytes: usize,
}

impl PendingReplies {
    pub(super) fn is_empty(&self) -> bool {
        self.payloads.is_empty() && self.series.is_empty()
    }

    /// Whether this many more payloads, with this many bytes, would make it too large for one frame.
    pub(super) fn is_full_for(&self, payloads: usize, bytes: usize) -> bool {
        !self.is_empty()
            && (self.bytes + bytes > MERGED_MAX || self.payloads.len() + self.unseen + payloads > PAYLOADS_MAX)
    }

    /// What a body and its runs add to `bytes`.
    pub(super) fn size(body: usize, runs: usize) -> usize {
        body + RUN_LEN * runs
    }

    pub(super) fn add(&mut self, flags: u16, parts: u16, body: &Bytes, runs: impl IntoIterator<Item = Run>) {
        let at = self.find(flags, parts, body);
        let mine = &mut self.payloads[at].runs;
        let before = mine.len();
        for run in runs {
            if !mine.last_mut().is_some_and(|last| last.absorb(run)) {
                mine.push(run);
            }
        }
        self.bytes += RUN_LEN * (mine.len() - before);
    }

    /// Adds an entry of a merged frame.
    pub(super) fn add_entry(&mut self, entry: Entry) {
        if entry.is_series() && self.news >= LOOKS {
            let (bytes, runs) = entry.size();
            self.bytes += Self::size(bytes, runs);
            self.unseen += entry.count();
            self.series.push(entry);
        } else {
            for payload in entry.payloads() {
                self.add(payload.flags, payload.parts, &payload.body, payload.runs.iter().copied());
            }
        }
    }

    /// The index of the payload, which is added if it is new.
    fn find(&mut self, flags: u16, parts: u16, body: &Bytes) -> usize {
        let same = |payload: &Payload| payload.flags == flags && payload.parts == parts && payload.body == *body;
        // Nearly always all are equal: then nothing is hashed until a second payload comes.
        if self.payloads.first().is_some_and(same) {
            self.news = 0;
            return 0;
        }
        if self.payloads.len() == 1 {
            let first = &self.payloads[0];
            self.likeness.insert(likeness(first.flags, first.parts, &first.body), smallvec![0]);
        }
        let at = self.payloads.len();
        if at > 0 {
            let alike = self.likeness.entry(likeness(flags, parts, body)).or_default();
            if let Some(found) = alike.iter().rev().take(TRIES).find(|at| same(&self.payloads[**at])) {
                self.news = 0;
                return *found;
            }
            alike.push(at);
        }
        self.news += 1;
        self.bytes += body.len();
        self.payloads.push(Payload { flags, parts, body: body.clone(), runs: Short::new() });
        at
    }

    /// Takes everything: the payloads, and the series that were not compared.
    pub(super) fn take(&mut self) -> (Vec<Payload>, Vec<Entry>) {
        self.likeness.clear();
        (self.bytes, self.unseen, self.news) = (0, 0, 0);
        (std::mem::take(&mut self.payloads), std::mem::take(&mut self.series))
    }
}

fn likeness(flags: u16, parts: u16, body: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(u64::from(flags) << 16 | u64::from(parts));
    hasher.write_u64(body.len() as u64);
    sample(&mut hasher, &body[..body.len().min(SAMPLE)]);
    if body.len() > SAMPLE {
        sample(&mut hasher, &body[body.len() - SAMPLE..]);
    }
    hasher.finish()
}

fn sample(hasher: &mut FxHasher, bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().for_each(|word| hasher.write_u64(u64::from_le_bytes(*word)));
    hasher.write(rest);
}
