//! Payloads that are collected, equal ones once.

use super::table::{Payload, RUN_LEN, Run};
use super::{MERGED_MAX, PAYLOADS_MAX};
use bytes::Bytes;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

/// How many bytes at either end of a payload tell it from others of its length, nearly always.
const SAMPLE: usize = 32;
/// Payloads that look the same and are not: after so many comparisons one more copy is the lesser evil.
const TRIES: usize = 4;

/// The replies of one call that have come so far.
#[derive(Debug, Default)]
pub(super) struct Pile {
    payloads: Vec<Payload>,
    /// By what they look like.
    likeness: HashMap<u64, Vec<usize>>,
    bytes: usize,
}

impl Pile {
    pub(super) fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }

    /// Whether payloads of so many bytes, sent in so many runs, would make it too large for one frame.
    pub(super) fn is_full_for(&self, payloads: usize, bytes: usize) -> bool {
        !self.is_empty() && (self.bytes + bytes > MERGED_MAX || self.payloads.len() + payloads > PAYLOADS_MAX)
    }

    /// What the runs of these payloads and their bodies count.
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

    /// Where the payload is, or now is.
    fn find(&mut self, flags: u16, parts: u16, body: &Bytes) -> usize {
        let same = |payload: &Payload| payload.flags == flags && payload.parts == parts && payload.body == *body;
        // Nearly always all are equal: then nothing is hashed but the first, and that only once a second comes.
        if self.payloads.first().is_some_and(same) {
            return 0;
        }
        if self.payloads.len() == 1 {
            let first = &self.payloads[0];
            self.likeness.insert(likeness(first.flags, first.parts, &first.body), vec![0]);
        }
        let at = self.payloads.len();
        if at > 0 {
            let alike = self.likeness.entry(likeness(flags, parts, body)).or_default();
            if let Some(found) = alike.iter().rev().take(TRIES).find(|at| same(&self.payloads[**at])) {
                return *found;
            }
            alike.push(at);
        }
        self.bytes += body.len();
        self.payloads.push(Payload { flags, parts, body: body.clone(), runs: Vec::new() });
        at
    }

    pub(super) fn take(&mut self) -> Vec<Payload> {
        self.likeness.clear();
        self.bytes = 0;
        std::mem::take(&mut self.payloads)
    }
}

fn likeness(flags: u16, parts: u16, body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write_u32(u32::from(flags) << 16 | u32::from(parts));
    hasher.write_usize(body.len());
    hasher.write(&body[..body.len().min(SAMPLE)]);
    hasher.write(&body[body.len().saturating_sub(SAMPLE)..]);
    hasher.finish()
}
