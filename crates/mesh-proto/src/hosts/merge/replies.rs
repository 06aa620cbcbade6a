//! Splitting a merged frame into replies.

use super::super::Short;
use super::table::{Entry, Run, read};
use crate::{Frame, FrameError, Header, HostNo, Kind, ProcAddr};

/// The replies in a merged frame, with their places in the call's target of `places` ranks. Only origins that `take`
/// accepts count, and `addr` gives the sender at a place. Payloads are shared, not copied.
///
/// # Errors
/// If the frame is not a merged one.
///
/// ```
/// # use mesh_proto::hosts::{HostMerge, unmerge};
/// # use mesh_proto::messages::{Answer, Reply};
/// # use mesh_proto::{Frame, ProcAddr};
/// # use std::time::Duration;
/// let caller = ProcAddr::CONTROLLER;
/// let proc = |rank| ProcAddr { rank, ..caller };
/// let mut merge = HostMerge::new(7, proc(0));
/// assert!(merge.expect(caller, 1, 2).is_empty());
/// let mut reply = |rank| {
///     let reply = Reply { actor: 3, call: 1, place: rank, answer: Answer::Value };
///     merge.on_reply(Frame::build_plain(reply.header(proc(rank), caller), None, b"", b"done"), Duration::ZERO)
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
    let mut entries = read(frame)?;
    // Skip places that the call does not have, and further replies once there are as many as places.
    let mut left = u64::from(places);
    for entry in &mut entries {
        let mut fits = |run: &Run| {
            let count = run.places();
            let fits = u64::from(run.first) + count <= u64::from(places) && count <= left;
            left -= if fits { count } else { 0 };
            fits
        };
        if let [run] = *entry.runs {
            if !fits(&run) {
                entry.runs = Short::new();
            }
        } else {
            entry.runs.retain(|run| fits(run));
        }
    }
    // The first entry goes last.
    entries.reverse();
    Ok(Replies { header, entries, runs: 0, run: Run::default(), at: (0, 0), start: 0, taken: false, take, addr })
}

/// The iterator that [`unmerge`] returns.
#[derive(Debug)]
pub struct Replies<T, A> {
    header: Header,
    /// The entries still to do, the next one last.
    entries: Vec<Entry>,
    /// How many of the entry's runs were begun, the current run, and the host and place in it.
    runs: usize,
    run: Run,
    at: (u32, u32),
    /// Where the next payload of a series begins.
    start: usize,
    taken: bool,
    take: T,
    addr: A,
}

impl<T: FnMut(HostNo) -> bool, A: FnMut(u32) -> ProcAddr> Replies<T, A> {
    /// Advances to the next place that counts, unless the current one does. False at the end.
    fn find(&mut self) -> bool {
        while let Some(entry) = self.entries.last() {
            let (host, place) = self.at;
            if host == self.run.hosts {
                (self.run, self.at) = (Run::default(), (0, 0));
                if let Some(next) = entry.runs.get(self.runs) {
                    self.run = *next;
                    self.runs += 1;
                } else {
                    self.entries.pop();
                    (self.runs, self.start) = (0, 0);
                }
                continue;
            }
            if place == 0 {
                self.taken = (self.take)(self.run.origin + host);
            }
            if self.taken && place < self.run.each {
                return true;
            }
            if !self.taken {
                self.start += entry.len_of(host * self.run.each, self.run.each);
            }
            self.at = (host + 1, 0);
        }
        false
    }
}

impl<T: FnMut(HostNo) -> bool, A: FnMut(u32) -> ProcAddr> Iterator for Replies<T, A> {
    type Item = (u32, Frame);

    fn next(&mut self) -> Option<(u32, Frame)> {
        // Nearly always the next place of the same host.
        if (self.at.1 == 0 || self.at.1 == self.run.each) && !self.find() {
            return None;
        }
        let entry = self.entries.last()?;
        let (host, place) = self.at;
        self.at.1 += 1;
        let nth = host * self.run.each + place;
        let body = match &entry.lengths {
            None => entry.body.clone(),
            Some(_) => entry.piece(nth, self.start)?,
        };
        self.start += body.len();
        let index = self.run.first + nth;
        let header = Header {
            flags: entry.flags,
            parts: entry.parts,
            body_len: body.len() as u64,
            src: (self.addr)(index),
            index,
            ..self.header
        };
        Some((index, Frame { header, body }))
    }
}
