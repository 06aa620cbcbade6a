//! An end through which bytes of a visit pass in frames, between an agent and the controller.

use super::ends::PIECE;
use super::pump::{End, Over};
use crate::dispatch::Dispatch;
use crate::locks::lock;
use bytes::Bytes;
use mesh_proto::ProcAddr;
use mesh_proto::control::{Inspect, Step, Visit};
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

/// Bytes of a visit that may be under way through the job, each way.
pub(super) const WINDOW: u32 = 256 << 10;
/// The other end is told of what was taken in portions of this size.
const PORTION: u32 = WINDOW / 4;

/// What has arrived in frames, for the thread that passes it on.
#[derive(Debug)]
pub(crate) struct Tunnel {
    state: Mutex<Inside>,
    bell: OwnedFd,
}

#[derive(Debug)]
struct Inside {
    arrived: VecDeque<u8>,
    /// Bytes that have arrived, and that the other end does not know to be taken.
    held: u32,
    /// Bytes that the other end has room for.
    room: u32,
    over: Option<Over>,
}

impl Tunnel {
    pub(super) fn new() -> Result<Arc<Self>, Errno> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let inside = Inside { arrived: VecDeque::new(), held: 0, room: WINDOW, over: None };
        Ok(Arc::new(Self { state: Mutex::new(inside), bell }))
    }

    /// Takes in a message from the other end.
    pub(super) fn on(&self, step: Step) {
        let mut inside = lock(&self.state);
        match step {
            Step::Begin => {}
            Step::Said(bytes) => match u32::try_from(bytes.len()).ok().and_then(|n| inside.held.checked_add(n)) {
                Some(held) if held <= WINDOW => {
                    inside.held = held;
                    inside.arrived.extend(bytes);
                }
                _ => inside.over = Some(Over::Broke("the other end sent more than there was room for".to_owned())),
            },
            Step::Taken(bytes) => inside.room = inside.room.saturating_add(bytes).min(WINDOW),
            Step::End => {
                inside.over.get_or_insert(Over::Left);
            }
        }
        drop(inside);
        self.ring();
    }

    /// Ends it: nothing arrives any more.
    pub(super) fn end(&self, over: Over) {
        lock(&self.state).over.get_or_insert(over);
        self.ring();
    }

    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

/// One end of a visit's way through the job: at an agent, or at the controller.
pub(super) struct TunnelEnd<P> {
    process: Weak<P>,
    tunnel: Arc<Tunnel>,
    me: ProcAddr,
    peer: ProcAddr,
    number: u64,
    /// Bytes that were taken, of which the other end was not told yet.
    taken: u32,
}

impl<P: Dispatch> TunnelEnd<P> {
    /// The end at `me` of visit `number`, whose other end is at `peer`.
    pub(super) fn new(process: &Weak<P>, tunnel: Arc<Tunnel>, (me, peer): (ProcAddr, ProcAddr), number: u64) -> Self {
        Self { process: Weak::clone(process), tunnel, me, peer, number, taken: 0 }
    }

    /// Tells the other end.
    pub(super) fn tell(&self, step: Step) {
        if let Some(process) = self.process.upgrade() {
            let visit = Inspect::Visit(Visit { number: self.number, step });
            process.dispatch(visit.frame(self.me, self.peer, None));
        }
    }
}

impl<P: Dispatch> End for TunnelEnd<P> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.tunnel.bell.as_fd()
    }

    fn begin(&mut self) {
        // Even if nothing is read for the moment: a rung bell stays ready until it is read.
        let _ = rustix::io::read(&self.tunnel.bell, &mut [0; 8]);
    }

    fn interest(&self, _reads: bool, _writes: bool) -> PollFlags {
        PollFlags::IN
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Over> {
        let mut inside = lock(&self.tunnel.state);
        let n = std::io::Read::read(&mut inside.arrived, buffer).unwrap_or_default();
        if n == 0 {
            return inside.over.clone().map_or(Ok(0), Err);
        }
        // No more than one chunk, which fits.
        let count = u32::try_from(n).unwrap_or(u32::MAX);
        self.taken += count;
        if self.taken >= PORTION || inside.arrived.is_empty() {
            inside.held = inside.held.saturating_sub(self.taken);
            drop(inside);
            let taken = std::mem::take(&mut self.taken);
            self.tell(Step::Taken(taken));
        }
        Ok(n)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, Over> {
        let n = {
            let mut inside = lock(&self.tunnel.state);
            if inside.over.is_some() {
                // What arrived before the end is still read.
                return Ok(bytes.len());
            }
            let n = bytes.len().min(PIECE).min(inside.room as usize);
            inside.room -= u32::try_from(n).unwrap_or(inside.room);
            n
        };
        if n > 0 {
            self.tell(Step::Said(Bytes::copy_from_slice(&bytes[..n])));
        }
        Ok(n)
    }

    fn flush(&mut self) -> Result<bool, Over> {
        Ok(true)
    }
}
