//! The replies of one host's procs.

use super::MERGE_LIMIT;
use super::pending_calls::{Key, PendingCalls};
use super::pending_replies::PendingReplies;
use super::table::{Run, write};
use crate::messages::{Answer, Reply, is_mergeable};
use crate::{CallId, Frame, HostNo, ProcAddr};
use std::collections::HashSet;
use std::time::Duration;

/// Merges the replies of one host's procs to one call.
///
/// It must be told of each call that came to several procs here, and of every frame from a proc here to a caller on
/// another host. Send the frames that a method returns at once, in their order.
#[derive(Debug)]
pub struct HostMerge {
    host: HostNo,
    agent: ProcAddr,
    /// Awaited: the number of replies still to come.
    calls: PendingCalls<u32, HashSet<ProcAddr>>,
}

impl HostMerge {
    /// For `host`, whose agent sends the merged frames.
    #[must_use]
    pub fn new(host: HostNo, agent: ProcAddr) -> Self {
        Self { host, agent, calls: PendingCalls::default() }
    }

    /// A call arrived that `count` procs here will reply to: merges their replies from now on.
    #[must_use = "frames have to be sent"]
    pub fn expect(&mut self, caller: ProcAddr, call: CallId, count: u32) -> Vec<Frame> {
        let mut out = Vec::new();
        if count == 0 {
            return out;
        }
        if let Some(oldest) = self.calls.surplus() {
            self.flush(oldest, &mut out);
            self.calls.forget(&oldest);
        }
        let entry = self.calls.place((caller, call));
        entry.awaited = entry.awaited.saturating_add(count);
        out
    }

    /// Forgets a call that nobody waits for any more.
    pub fn forget(&mut self, caller: ProcAddr, call: CallId) {
        self.calls.forget(&(caller, call));
    }

    /// Forgets the calls of callers that are gone.
    pub fn end(&mut self, is_gone: impl Fn(ProcAddr) -> bool) {
        for key in self.calls.all(|(caller, _)| is_gone(*caller)) {
            self.calls.forget(&key);
        }
    }

    /// Takes a reply. Returns what to send now: nothing while others are awaited, else the merged frame, or the reply
    /// itself if it cannot be merged.
    #[must_use = "frames have to be sent"]
    pub fn on_reply(&mut self, frame: Frame, now: Duration) -> Vec<Frame> {
        let header = frame.header;
        let key = (header.dst, header.call);
        let reply = Reply::read(&header).ok();
        let mergeable = reply.is_some()
            && is_mergeable(header.flags)
            && (header.name_len, header.target_len, header.deadline_ms) == (0, 0, 0)
            && header.index < u32::MAX
            && frame.body.len() <= MERGE_LIMIT;
        let Some(entry) = self.calls.get(&key) else {
            return self.after_others(frame);
        };
        let ours = entry.header.is_none_or(|first| first.actor == header.actor);
        if !mergeable || !ours || entry.sources.contains(&header.src) {
            match reply.map(|reply| reply.answer) {
                // A stream's values are not its answer.
                None | Some(Answer::More) => {}
                Some(Answer::Combined) => entry.awaited = 0,
                Some(Answer::Value | Answer::Raised | Answer::Dead) => entry.awaited -= 1,
            }
            let complete = entry.awaited == 0;
            let mut out = Vec::new();
            if complete {
                self.flush(key, &mut out);
                self.calls.forget(&key);
            }
            out.extend(self.after_others(frame));
            return out;
        }
        let mut out = Vec::new();
        if entry.replies.is_full_for(1, PendingReplies::size(frame.body.len(), 1)) {
            self.flush(key, &mut out);
        }
        let of_src = |key: &Key, sources: &HashSet<ProcAddr>| key.0 == header.dst && sources.contains(&header.src);
        if let Some(later) = self.calls.held_after(&key, |key, entry| of_src(key, &entry.sources)) {
            self.flush(later, &mut out);
        }
        let Some(entry) = self.calls.get(&key) else { return out };
        entry.header.get_or_insert(header);
        entry.sources.insert(header.src);
        let run = Run { origin: self.host, hosts: 1, first: header.index, each: 1, done: false };
        entry.replies.add(header.flags, header.parts, &frame.body, [run]);
        entry.awaited -= 1;
        let complete = entry.awaited == 0;
        self.calls.hold(key, now);
        if complete {
            self.flush(key, &mut out);
            self.calls.forget(&key);
        }
        out
    }

    /// Returns what must go before something else from `src` to `dst`.
    #[must_use = "frames have to be sent"]
    pub fn before(&mut self, src: ProcAddr, dst: ProcAddr) -> Vec<Frame> {
        let mut out = Vec::new();
        let held = self.calls.held(|key, entry| key.0 == dst && entry.sources.contains(&src));
        if let Some(last) = held.last() {
            self.flush(*last, &mut out);
        }
        out
    }

    /// When to call [`HostMerge::on_tick`].
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.calls.next_deadline()
    }

    /// Releases what was held long enough.
    #[must_use = "frames have to be sent"]
    pub fn on_tick(&mut self, now: Duration) -> Vec<Frame> {
        let mut out = Vec::new();
        while let Some(key) = self.calls.due(now) {
            self.flush(key, &mut out);
        }
        out
    }

    /// Whether no call is awaited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    fn after_others(&mut self, frame: Frame) -> Vec<Frame> {
        let mut out =
            if self.calls.holds_nothing() { Vec::new() } else { self.before(frame.header.src, frame.header.dst) };
        out.push(frame);
        out
    }

    /// Releases what is held of a call, after what was held earlier for the same caller.
    fn flush(&mut self, key: Key, out: &mut Vec<Frame>) {
        for key in self.calls.held_until(&key, |other, _| other.0 == key.0) {
            if let Some(entry) = self.calls.release(&key) {
                entry.sources.clear();
                let (mut payloads, series) = entry.replies.take();
                let done = entry.awaited == 0;
                for payload in &mut payloads {
                    payload.runs = payload.runs.iter().map(|run| Run { done, ..*run }).collect();
                }
                if let Some(header) = entry.header.take() {
                    out.push(write(crate::Header { src: self.agent, ..header }, payloads, &series));
                }
            }
        }
    }
}
