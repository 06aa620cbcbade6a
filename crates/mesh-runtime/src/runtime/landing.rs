//! Large parts that travel past the gateways: the sender keeps and offers them, as it does values for references, and the
//! receiving process gets them before the message is taken in, while what the sender has sent since waits behind it.
//!
//! DST-1: a message with distant parts is taken in whole, once, and in its place among those of its sender ([`Landing`]).
//! DST-2: what does not come past the gateways comes through them, as any fetched value; only its sender's end loses it.
//! DST-3: its sender keeps a part until the receiver has it, is gone, or was never reached (REF-1).

use super::{Runtime, lock};
use crate::bypass::Bypass;
use crate::gateway::is_mapped;
use crate::refs::{Hold, RefAddr};
use crate::shm::Room;
use bytes::Bytes;
use mesh_proto::control::{Fetch, down_of};
use mesh_proto::messages::{Extend, Meaning};
use mesh_proto::{CallId, Frame, Kind, Landing, Part, ProcAddr, Sharing, Target, Undelivered};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Who is asked for a road past the gateways, at the first part that is worth it.
const ASKED: &str = ".bypass";
/// Shorter parts are not worth looking for one.
const WORTH: usize = 1 << 20;
const PAGE: u64 = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Landings {
    /// The road, and from which length on it is taken; none if there is none.
    bypass: OnceLock<Option<(Bypass, usize)>>,
    was_asked: AtomicBool,
    lines: Mutex<Landing<Frame>>,
    /// Whether anything is in those lines.
    busy: AtomicBool,
    /// Parts that come through the gateways after all, by the calls that ask for them.
    through: Mutex<HashMap<CallId, (Arc<Job>, usize)>>,
    offered: AtomicU64,
    arrived: AtomicU64,
    jobs: AtomicUsize,
}

impl Landings {
    pub(super) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    /// How many parts were offered, and how many have come.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.offered.load(Ordering::Relaxed), self.arrived.load(Ordering::Relaxed))
    }

    pub(super) fn len(&self) -> usize {
        self.jobs.load(Ordering::Relaxed)
    }

    /// The part that such a call has asked for, if one has.
    fn asked_through(&self, call: CallId) -> Option<(Arc<Job>, usize)> {
        lock(&self.through).remove(&call)
    }

    fn with_lines<T>(&self, then: impl FnOnce(&mut Landing<Frame>) -> T) -> T {
        let mut lines = lock(&self.lines);
        let out = then(&mut lines);
        self.busy.store(!lines.is_empty(), Ordering::Release);
        out
    }
}

/// A message that is landing.
#[derive(Debug)]
struct Job {
    frame: Frame,
    number: u64,
    state: Mutex<Coming>,
}

#[derive(Debug)]
struct Coming {
    /// As they have come; none of those that have not.
    parts: Vec<Option<Part>>,
    left: usize,
    /// Whether what has come is shared with nobody.
    sole: bool,
    lost: bool,
    /// What its sender keeps the parts for.
    holds: Vec<Arc<Hold>>,
}

/// Where a part is put as it comes.
#[derive(Debug)]
enum Into {
    Shared(Room),
    Heap(Vec<u8>),
}

impl Into {
    fn done(self) -> Part {
        match self {
            Self::Shared(room) => {
                let len = room.len() as u64;
                Part::Shared { at: room.done(), len }
            }
            Self::Heap(bytes) => Part::Inline(bytes.into()),
        }
    }
}

impl Runtime {
    /// Has parts of `from` bytes and more travel past the gateways from now on; or says that there is no such road. The first
    /// word counts.
    pub fn set_bypass(&self, bypass: Option<(Bypass, usize)>) {
        let _ = self.landings.bypass.set(bypass);
    }

    /// The road past the gateways, if it is known by now. If not, somebody looks for it.
    fn bypass(&self) -> Option<(Bypass, usize)> {
        if let Some(known) = self.landings.bypass.get() {
            return *known;
        }
        if !self.landings.was_asked.swap(true, Ordering::Relaxed) {
            let header = Extend { call: 0, place: 0 }.header(self.me, self.me);
            self.inboxes.notice(Frame::build(header, None, ASKED.as_bytes(), &[]));
        }
        None
    }

    // At the sender.

    /// Offers the large ones of a message's buffers, if it is for one process of another host. None if nothing is offered.
    pub(crate) fn carry_past(&self, kind: Kind, target: &Target, buffers: &[&[u8]]) -> Option<Vec<Option<Part>>> {
        let Target::One(to) = target else { return None };
        if to.host == self.me.host || to.is_agent() && *to != ProcAddr::CONTROLLER || !is_mapped(kind) {
            return None;
        }
        if !buffers.iter().any(|data| data.len() >= WORTH) {
            return None;
        }
        let (bypass, from) = self.bypass()?;
        let large = |data: &&[u8]| data.len() >= from.max(WORTH);
        let parts: Vec<Option<Part>> = buffers
            .iter()
            .map(|data| Some(data).filter(|data| large(data)).and_then(|data| self.offer(bypass, data, *to)))
            .collect();
        parts.iter().any(Option::is_some).then_some(parts)
    }

    /// Keeps a copy of a part, and offers it to whom it is for.
    fn offer(&self, bypass: Bypass, data: &[u8], to: ProcAddr) -> Option<Part> {
        let len = data.len() as u64;
        let cost = len.next_multiple_of(PAGE);
        if !self.refs.reserve_now(cost) {
            return None;
        }
        let Some(room) = self.memory.keep_room(data.len(), &Target::One(self.me)) else {
            self.refs.unreserve(cost, None);
            return None;
        };
        room.fill(0, data, self.board.spare());
        let place = room.place();
        // SAFETY: `place` keeps it mapped, and it stays as it is until the value is given back, which waits for the offer.
        let Some((offer, ticket)) = (unsafe { bypass.offer(place.at, len) }) else {
            drop(room);
            self.refs.unreserve(cost, None);
            return None;
        };
        self.landings.offered.fetch_add(1, Ordering::Relaxed);
        let (id, held) = self.refs.keep_offered(room.done(), (len, cost), (offer, place), to, self);
        Some(Part::Distant { id, held, len, ticket: ticket.into() })
    }

    // At the receiver.

    /// Takes in a message behind those of its sender that are still landing, or lets it land.
    #[cold]
    pub(super) fn land(&self, frame: Frame) {
        let header = frame.header;
        // What is asked for by this very module waits behind nobody.
        if matches!(header.kind, Kind::Reply | Kind::Undeliverable)
            && let Ok(said) = Meaning::of(&header)
            && let Some((job, part)) = self.landings.asked_through(said.call())
        {
            return self.came_through(&job, part, &frame);
        }
        // The notice of a process's end comes behind what it has sent.
        let ended = down_of(&header);
        let sender = ended.unwrap_or(header.src);
        if frame.header.is_distant() {
            return self.begin_landing(frame);
        }
        let waits = self.landings.with_lines(|lines| lines.arrive(sender, frame));
        match waits {
            Some(frame) => self.take_in(frame),
            None if ended.is_some() => self.lose_those_through(|one| one == sender),
            None => {}
        }
    }

    fn begin_landing(&self, frame: Frame) {
        let Ok(parts) = frame.parts() else { return self.memory.let_go(&frame) };
        let sender = frame.header.src;
        let hold = |part: &Part| match part {
            Part::Distant { id, held, .. } => Some(self.hold_under(RefAddr { owner: sender, id: *id }, *held, None)),
            Part::Inline(_) | Part::Shared { .. } => None,
        };
        let holds: Vec<Arc<Hold>> = parts.iter().filter_map(hold).collect();
        let number = self.landings.with_lines(|lines| lines.open(sender));
        self.landings.jobs.fetch_add(1, Ordering::Relaxed);
        let coming = Coming {
            parts: parts
                .iter()
                .map(|part| if let Part::Distant { .. } = part { None } else { Some(part.clone()) })
                .collect(),
            // One more, so that it does not land while parts are still asked for.
            left: holds.len() + 1,
            sole: frame.header.sharing().sole,
            lost: false,
            holds,
        };
        let job = Arc::new(Job { frame, number, state: Mutex::new(coming) });
        let bypass = self.bypass();
        for (part, distant) in parts.into_iter().enumerate() {
            let Part::Distant { len, ticket, .. } = distant else { continue };
            match bypass {
                Some((bypass, _)) => self.fetch_past(bypass, &job, part, len, &ticket),
                None => self.fetch_through(&job, part),
            }
        }
        self.settle(&job, |_| {});
    }

    fn fetch_past(&self, bypass: Bypass, job: &Arc<Job>, part: usize, len: u64, ticket: &[u8]) {
        let Ok(size) = usize::try_from(len) else { return self.part_lost(job) };
        let mut heap = Vec::new();
        let (mut into, at) = match self.memory.room(size, &Target::One(self.me)) {
            Some(room) => {
                let at = room.place().at;
                (Into::Shared(room), at)
            }
            None if heap.try_reserve_exact(size).is_ok() => {
                heap.resize(size, 0);
                (Into::Heap(heap), std::ptr::null_mut())
            }
            None => return self.part_lost(job),
        };
        let at = if let Into::Heap(bytes) = &mut into { bytes.as_mut_ptr() } else { at };
        let (runtime, job) = (self.weak(), Arc::clone(job));
        let filled = move |all: bool| {
            let Some(runtime) = runtime.upgrade() else { return };
            if all {
                runtime.landings.arrived.fetch_add(1, Ordering::Relaxed);
                let came = into.done();
                runtime.settle(&job, |coming| coming.parts[part] = Some(came));
            } else {
                drop(into);
                runtime.fetch_through(&job, part);
            }
        };
        // SAFETY: `into` is kept by what is called at the end, is as long as the part, and nobody else knows of it.
        unsafe { bypass.fetch(ticket, at, len, Box::new(filled)) };
    }

    /// Asks a part's sender for it, as for any value that it keeps (DST-2).
    fn fetch_through(&self, job: &Arc<Job>, part: usize) {
        let sender = job.frame.header.src;
        let id = match job.frame.parts().unwrap_or_default().get(part) {
            Some(Part::Distant { id, .. }) => *id,
            _ => return self.part_lost(job),
        };
        if self.usable().is_err() {
            return self.part_lost(job);
        }
        let call = self.new_id();
        lock(&self.landings.through).insert(call, (Arc::clone(job), part));
        self.dispatch(Fetch { id, call }.frame(self.me, sender), None);
    }

    fn came_through(&self, job: &Arc<Job>, part: usize, answer: &Frame) {
        let wanted = match job.frame.parts().unwrap_or_default().get(part) {
            Some(Part::Distant { len, .. }) => *len,
            _ => 0,
        };
        let parts = answer.parts().unwrap_or_default();
        match parts.into_iter().nth(1).filter(|came| answer.header.kind == Kind::Reply && came.len() == wanted) {
            Some(came) => self.settle(job, |coming| {
                coming.sole &= answer.header.sharing().sole;
                coming.parts[part] = Some(came);
            }),
            None => {
                self.memory.let_go(answer);
                self.part_lost(job);
            }
        }
    }

    fn part_lost(&self, job: &Arc<Job>) {
        self.settle(job, |coming| coming.lost = true);
    }

    /// Something has become of a part. The last has the message taken in, and what was behind it.
    fn settle(&self, job: &Arc<Job>, news: impl FnOnce(&mut Coming)) {
        let frame = {
            let mut coming = lock(&job.state);
            news(&mut coming);
            coming.left -= 1;
            if coming.left > 0 {
                return;
            }
            let holds = std::mem::take(&mut coming.holds);
            let frame = self.landed(job, &mut coming);
            drop(coming);
            // Its sender need not keep the parts any longer (DST-3).
            drop(holds);
            frame
        };
        self.landings.jobs.fetch_sub(1, Ordering::Relaxed);
        let sender = job.frame.header.src;
        if self.landings.with_lines(|lines| lines.land(sender, job.number, frame)) {
            while let Some(frame) = self.landings.with_lines(|lines| lines.next(sender)) {
                self.take_in(frame);
            }
        }
    }

    /// The message with its parts; none if some are lost.
    fn landed(&self, job: &Job, coming: &mut Coming) -> Option<Frame> {
        let mut header = job.frame.header;
        let parts = std::mem::take(&mut coming.parts);
        let shared = parts.iter().flatten().any(|part| matches!(part, Part::Shared { .. }));
        header.set_sharing(Sharing { sole: coming.sole, shared });
        header.set_distant(false);
        let whole: Vec<Part> = parts.iter().flatten().cloned().collect();
        if coming.lost || whole.len() != parts.len() {
            // What has come of it goes back.
            let came = whole.into_iter().filter(|part| matches!(part, Part::Shared { .. })).collect::<Vec<_>>();
            let mut rest = header;
            rest.set_sharing(Sharing { sole: coming.sole, shared: !came.is_empty() });
            self.memory.let_go(&Frame::build(rest, None, b"", &[&[Part::Inline(Bytes::new())], &came[..]].concat()));
            self.refuse(&job.frame.header);
            self.undeliverable(&job.frame.header, Undelivered::NoActor);
            return None;
        }
        Some(Frame::build(header, None, job.frame.name(), &whole))
    }

    /// A question of this very process could not be put. True if it was for a part of a message.
    pub(super) fn unasked(&self, call: CallId) -> bool {
        let asked = self.landings.asked_through(call);
        asked.is_some_and(|(job, _)| {
            self.part_lost(&job);
            true
        })
    }

    /// Processes have ended: what they were asked for will not come.
    fn lose_those_through(&self, ended: impl Fn(ProcAddr) -> bool) {
        let lost: Vec<_> = {
            let mut through = lock(&self.landings.through);
            through.extract_if(|_, (job, _)| ended(job.frame.header.src)).map(|(_, (job, _))| job).collect()
        };
        lost.iter().for_each(|job| self.part_lost(job));
    }

    /// A whole host is gone, whose processes' ends are told next: what has not landed of them will not.
    pub(crate) fn landings_end(&self, gone: impl Fn(ProcAddr) -> bool) {
        if !self.landings.is_busy() {
            return;
        }
        let behind = self.landings.with_lines(|lines| lines.give_up(&gone));
        behind.iter().for_each(|frame| self.memory.let_go(frame));
        self.lose_those_through(gone);
    }
}
