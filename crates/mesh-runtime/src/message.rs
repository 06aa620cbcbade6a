//! A frame that has reached its receiver.

use crate::error::RuntimeError;
use crate::meter::{Charge, MailboxCredits};
use crate::refs::Hold;
use crate::shm::{Memory, PartData, SharedPart};
use bytes::Bytes;
use mesh_proto::control::{Down, Undeliverable};
use mesh_proto::hosts::Short;
use mesh_proto::messages::{Call, Meaning, Task, Unlooked};
use mesh_proto::{CallId, Carried, Frame, HEADER_LEN, Header, Kind, Part, Sharing, Undelivered};
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Parts up to this length are joined for the way to another host.
const SMALL: usize = 2048;

/// A delivered frame. It owns the shared memory that it refers to: read or not, the memory goes back to its owner when
/// the last of it is dropped (SHM-3).
#[derive(Debug)]
pub struct Message {
    frame: Frame,
    /// The shared parts, mapped on arrival: later their owner may be gone, and its memory with it.
    shared: Mutex<Option<Result<Vec<SharedPart>, RuntimeError>>>,
    /// If the sender counts the message's bytes, gives them back once the message is handled or dropped.
    charge: Mutex<Option<Charge>>,
    cost: u64,
    /// When nobody wants the answer any more.
    due: Option<Instant>,
    /// Counts the bytes of a reply as long as it is kept.
    stock: Option<Stock>,
    /// The references in it: held as long as the message, so that they last until it is unpickled, and are given back
    /// if it never is.
    refs: Mutex<Vec<Arc<Hold>>>,
}

/// The bytes of a reply, which its caller holds until it has looked at it.
#[derive(Debug)]
struct Stock {
    held: Arc<AtomicU64>,
    bytes: u64,
}

impl Drop for Stock {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

fn map(frame: &Frame, memory: &Memory) -> Result<Vec<SharedPart>, RuntimeError> {
    let sole = frame.header.sharing().sole;
    let shared = frame.parts()?.into_iter().filter_map(|part| match part {
        Part::Shared { at, len } => Some(memory.open(&at, len, sole)),
        Part::Inline(_) | Part::Distant { .. } => None,
    });
    // Open all before any error counts: dropping the others is what gives them back.
    let shared: Vec<_> = shared.collect();
    shared.into_iter().collect()
}

/// Shared memory as bytes that keep it mapped.
#[derive(Debug)]
struct Mapped(SharedPart);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the memory is mapped as long as the part lives, and as long as it says.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }
}

/// A frame as it travels to other hosts: its header and table, then its parts in place, the shared ones as plain bytes.
/// None if the owner of shared memory is gone, or the frame is malformed.
pub(crate) fn pieces(frame: &Frame, memory: &Memory) -> Option<Short<Bytes>> {
    let mut header = frame.header;
    let fixed = header.target_len as usize + header.name_len as usize;
    let sharing = header.sharing();
    let mut shared = if sharing.shared { map(frame, memory).ok()? } else { Vec::new() }.into_iter();
    let parts = frame.parts().ok()?;
    header.set_sharing(Sharing { shared: false, ..sharing });
    let len = |part: &Part| match part {
        Part::Distant { .. } => part.wire().len() as u64,
        here => here.len(),
    };
    header.body_len = (fixed + 8 * parts.len()) as u64 + parts.iter().map(len).sum::<u64>();
    let mut head = Vec::with_capacity(HEADER_LEN + fixed + 8 * parts.len());
    head.extend_from_slice(&header.encode());
    head.extend_from_slice(&frame.body[..fixed]);
    parts.iter().for_each(|part| {
        let entry = if let Part::Shared { len, .. } = part { *len } else { part.entry() };
        head.extend_from_slice(&entry.to_le_bytes());
    });
    let mut pieces = Short::new();
    let mut small = head;
    for part in parts {
        let bytes = match part {
            Part::Shared { .. } => Bytes::from_owner(Mapped(shared.next()?)),
            Part::Inline(bytes) => bytes,
            Part::Distant { .. } => Bytes::from(part.wire().into_owned()),
        };
        if bytes.len() <= SMALL {
            small.extend_from_slice(&bytes);
        } else {
            if !small.is_empty() {
                pieces.push(Bytes::from(std::mem::take(&mut small)));
            }
            pieces.push(bytes);
        }
    }
    if !small.is_empty() {
        pieces.push(Bytes::from(small));
    }
    Some(pieces)
}

impl Message {
    /// A message of this process's own, without shared memory.
    pub(crate) fn plain(frame: Frame) -> Self {
        Self {
            frame,
            shared: Mutex::new(None),
            charge: Mutex::new(None),
            cost: 0,
            due: None,
            stock: None,
            refs: Mutex::default(),
        }
    }

    pub(crate) fn new(frame: Frame, memory: &Memory) -> Self {
        let shared = frame.header.sharing().shared.then(|| map(&frame, memory));
        let due = frame.header.deadline().and_then(|limit| Instant::now().checked_add(limit));
        let refs = if frame.header.carries_refs() { memory.take_refs(&frame) } else { Vec::new() };
        Self {
            frame,
            shared: Mutex::new(shared),
            charge: Mutex::new(None),
            cost: 0,
            due,
            stock: None,
            refs: Mutex::new(refs),
        }
    }

    /// Charges the message to its mailbox, if its sender counts it.
    pub(crate) fn charge_to(&mut self, mailbox: &Arc<MailboxCredits>) {
        if self.frame.header.is_charged() {
            self.cost = self.frame.cost();
            let charge = mailbox.charge(self.frame.header.src, self.cost);
            *self.charge.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(charge);
        }
    }

    /// Counts the reply among held ones. False if they would exceed `budget`; a single one always fits.
    pub(crate) fn stock(&mut self, held: &Arc<AtomicU64>, budget: u64) -> bool {
        let bytes = self.frame.cost();
        let before = held.fetch_add(bytes, Ordering::Relaxed);
        let fits = before == 0 || before.saturating_add(bytes) <= budget;
        if fits {
            self.stock = Some(Stock { held: Arc::clone(held), bytes });
        } else {
            // Now rather than on drop: its caller hears of it before that, and may look at what is held.
            held.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits
    }

    /// Its size as counted among held replies.
    pub(crate) fn bytes(&self) -> u64 {
        self.frame.cost()
    }

    /// What it costs of its mailbox's budget.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// Notes that the message was handled: its sender may send as much again, whoever still holds this object.
    pub fn done(&self) {
        let charge = self.charge.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(charge);
    }

    /// When nobody wants the answer any more: its deadline, counted from its arrival.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether there are references in it.
    pub fn has_refs(&self) -> bool {
        self.frame.header.carries_refs()
    }

    /// Notes that it was unpickled, and will not be again: the holders of its contents hold what was in it. An actor
    /// keeps its last message until the next.
    pub fn drop_refs(&self) {
        let refs = std::mem::take(&mut *self.refs.lock().unwrap_or_else(PoisonError::into_inner));
        drop(refs);
    }

    /// Whether its sender died before this process could map what it shares.
    pub(crate) fn is_torn(&self) -> bool {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*shared, Some(Err(RuntimeError::Os { errno: Errno::NOENT | Errno::SRCH, .. })))
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.frame.header
    }

    /// What the header says. Messages were checked when they arrived (MSG-1).
    pub fn meaning(&self) -> Meaning {
        Meaning::of(&self.frame.header).unwrap_or(Meaning::Control(self.frame.header.kind))
    }

    /// The call's number and the task's place in line, if it is a task.
    #[inline]
    pub(crate) fn task(&self) -> Option<(CallId, Task)> {
        if self.frame.header.kind != Kind::Call {
            return None;
        }
        let call = Call::read(&self.frame.header).ok()?;
        Some((call.call, call.task?))
    }

    /// The endpoint, with whatever else accompanies it.
    pub fn name(&self) -> &[u8] {
        self.frame.name()
    }

    /// What a notice of a proc's end says.
    pub fn down(&self) -> Option<Down> {
        Down::read(&self.frame)
    }

    /// Why a message, or the port of a call, came to nothing.
    pub fn undelivered(&self) -> Option<Undelivered> {
        let returned = match self.meaning() {
            Meaning::Undeliverable(_) => true,
            Meaning::Unseen(unseen) => unseen.what != Unlooked::Raised,
            _ => false,
        };
        returned.then(|| Undeliverable::read_why(&self.envelope())).flatten()
    }

    /// The name without a copy: it keeps the message's bytes alive.
    pub fn name_bytes(&self) -> bytes::Bytes {
        self.frame.name_bytes()
    }

    /// Only the envelope; the other parts can still be taken.
    pub(crate) fn envelope(&self) -> bytes::Bytes {
        match self.frame.parts().ok().and_then(|parts| parts.into_iter().next()) {
            Some(Part::Inline(bytes)) => bytes,
            _ => bytes::Bytes::new(),
        }
    }

    /// The envelope, if there is nothing else in the message.
    pub fn only_part(&self) -> Option<&[u8]> {
        self.frame.only_part().filter(|_| !self.has_refs())
    }

    /// The envelope and the out-of-band parts. Shared ones can be taken only once.
    ///
    /// # Errors
    /// If the frame is malformed, or its shared memory cannot be mapped, for example because its owner has died.
    pub fn open(&self) -> Result<(bytes::Bytes, Vec<PartData>), RuntimeError> {
        let mut parts = self.frame.parts()?.into_iter();
        let mut payload = match parts.next() {
            Some(Part::Inline(bytes)) => bytes,
            _ => bytes::Bytes::new(),
        };
        if self.frame.header.carries_refs()
            && let Some((end, _)) = Carried::split(&payload)
        {
            payload.truncate(end);
        }
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut shared = shared.transpose()?.unwrap_or_default().into_iter();
        let rest = parts
            .map(|part| match part {
                Part::Inline(bytes) => Ok(PartData::Inline(bytes)),
                Part::Shared { .. } => shared
                    .next()
                    .map(PartData::Shared)
                    .ok_or(RuntimeError::Os { what: "open a message's shared part twice", errno: Errno::NXIO }),
                Part::Distant { .. } => {
                    Err(RuntimeError::Os { what: "open a part that has not landed", errno: Errno::NXIO })
                }
            })
            .collect::<Result<_, _>>()?;
        Ok((payload, rest))
    }
}
