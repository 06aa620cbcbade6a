//! What has come by a link: taken as it comes, or kept until older frames of other links have been taken.

use crate::reactor::would_block;
use crate::timespec::now;
use mesh_proto::{Decoder, EndReason, Frame, FrameError, Incoming};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Bytes read from one link before others get a turn. More than a socket holds, so that a dead peer's last messages are read
/// at once.
pub(crate) const MOST_READ: usize = 4 * 1024 * 1024;
/// The most descriptors that come with one frame.
pub(crate) const DESCRIPTORS: usize = 3;
/// Frames whose descriptors came by a link and were not taken yet. They are behind these, so more than one is rare.
const MOST_WITH: usize = 16;
/// A direct link whose other end stood still so often is not waited for again.
const MOST_LATE: u32 = 3;

/// Descriptors that have come, by the frames that they belong to.
pub(crate) type CameWith = Mutex<VecDeque<Vec<OwnedFd>>>;

/// What has been read. `socket` and `with` are always those of one link; `with` only if descriptors may come there.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    decoder: Decoder,
    /// The next frame, which was looked at.
    next: Option<Frame>,
    /// Nothing comes behind what was read.
    end: Option<EndReason>,
    /// When the last frame was sent that was decoded here.
    last: u64,
    /// Bytes that came.
    total: u64,
    /// The other end had accepted so many frames when this one looked.
    accepted: Option<u32>,
    /// The other end stood still, and is not waited for until so many frames are here.
    late: Option<u32>,
    /// How often it did.
    times_late: u32,
}

impl Intake {
    /// Reads once. Returns how many bytes came and for how many there was room; none if there is nothing now.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        with: Option<&CameWith>,
    ) -> Result<Option<(usize, usize)>, EndReason> {
        let room = self.decoder.room();
        let asked = room.len();
        let received = match with {
            None => recv(socket, room, RecvFlags::DONTWAIT).map(|(n, _)| (n, asked)),
            Some(with) => receive_with(socket, room, with),
        };
        match received {
            Ok((0, _)) => Err(EndReason::ConnectionClosed(self.decoder.pending() as u64)),
            Ok((n, asked)) => {
                self.decoder.filled(n);
                Ok(Some((n, asked)))
            }
            Err(errno) if would_block(errno) => Ok(None),
            Err(errno) => Err(EndReason::ConnectionBroke(errno.raw_os_error())),
        }
    }

    /// The next frame of what was read.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        self.decoder.next_frame()
    }

    // Reading in the order of several links.

    /// Reads what has come, if there may be something, and keeps it. The other end has accepted so many frames until now.
    pub(crate) fn look(
        &mut self,
        socket: BorrowedFd<'_>,
        with: Option<&CameWith>,
        accepted: Option<u32>,
        readable: bool,
    ) -> Incoming {
        self.accepted = accepted;
        if !self.is_late() {
            self.late = None;
        }
        // Also if it is not waited for: what was written before a death is taken before the notice.
        if readable || self.is_missing() {
            self.fill(socket, with);
        }
        self.incoming()
    }

    fn fill(&mut self, socket: BorrowedFd<'_>, with: Option<&CameWith>) {
        let mut total = 0;
        while self.end.is_none() && total < MOST_READ {
            match self.receive(socket, with) {
                Ok(Some((n, asked))) => {
                    total += n;
                    self.total += n as u64;
                    if n < asked {
                        return;
                    }
                }
                Ok(None) => return,
                Err(why) => self.end = Some(why),
            }
        }
    }

    /// What is here of this way, and what may still come.
    pub(crate) fn incoming(&mut self) -> Incoming {
        self.decode_next();
        let next = self.next.as_ref().map(|_| self.last);
        Incoming { next, last: self.last, is_behind: self.end.is_none() && self.is_missing() && !self.is_late() }
    }

    /// How many bytes have come of what this end waits for; none if it waits for nothing.
    pub(crate) fn behind(&mut self) -> Option<u64> {
        let incoming = self.incoming();
        (incoming.next.is_none() && incoming.is_behind).then_some(self.total)
    }

    /// The other end stands still: it is not waited for until all is here that it has accepted by now.
    pub(crate) fn give_up(&mut self, accepted: Option<u32>) {
        self.late = accepted;
        self.times_late = self.times_late.saturating_add(1);
    }

    /// The frame that was looked at last.
    pub(crate) fn take(&mut self) -> Option<Frame> {
        self.next.take()
    }

    /// Nothing comes behind what was read.
    pub(crate) fn has_end(&self) -> bool {
        self.end.is_some()
    }

    /// Why nothing more comes, once all that came was taken.
    pub(crate) fn take_end(&mut self) -> Option<EndReason> {
        self.decode_next();
        if self.next.is_none() { self.end.take() } else { None }
    }

    /// Whether the other end has accepted more than was decoded.
    fn is_missing(&self) -> bool {
        self.accepted.is_some_and(|accepted| accepted != self.decoder.due())
    }

    /// Whether it is not waited for.
    fn is_late(&self) -> bool {
        // Counts begin anew after the last number.
        let is_due = |count| self.decoder.due().wrapping_sub(count) > u32::MAX / 2;
        self.times_late >= MOST_LATE || self.late.is_some_and(is_due)
    }

    fn decode_next(&mut self) {
        if self.next.is_some() {
            return;
        }
        match self.decoder.next_frame() {
            Ok(Some(next)) => {
                // Nothing comes from the future, whatever it says.
                self.last = next.header.sent.min(now());
                self.next = Some(next);
            }
            Ok(None) => {}
            Err(error) => self.end = Some(EndReason::Protocol(error.to_string())),
        }
    }
}

/// A read ends where descriptors come, however much more there is: then it counts as a whole one.
fn receive_with(socket: BorrowedFd<'_>, room: &mut [u8], came: &CameWith) -> Result<(usize, usize), Errno> {
    let mut asked = room.len();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut with = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut with, flags)?;
    for message in with.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            asked = received.bytes;
            let descriptors = descriptors.collect();
            let mut came = came.lock().unwrap_or_else(PoisonError::into_inner);
            if came.len() < MOST_WITH {
                came.push_back(descriptors);
            }
        }
    }
    Ok((received.bytes, asked))
}
