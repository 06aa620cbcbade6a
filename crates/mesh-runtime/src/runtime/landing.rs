//! Messages whose large parts travel by a bypass: they are taken in once all parts are here, and what their senders
//! have sent since waits behind them (`mesh_proto::Landing`). Senders keep and offer such parts as they do values for
//! references ([`super::offering`]).
//!
//! DST-1: a message with distant parts is taken in whole, once, and in its place among those of its sender.
//! DST-2: a part that does not come by the bypass comes through the gateways, like any fetched value; it is lost only
//! with its sender.
//! DST-3: its sender keeps a part until the receiver has it, is gone, or was never reached (REF-1).
//!
//! No lock is held while a message is taken in, a frame is sent, or a part is fetched.

use crate::bypass::Bypass;
use crate::dispatch::Dispatch;
use crate::locks::lock;
use crate::refs::RefAddr;
use crate::shm::{Memory, Room};
use crate::standing::Standing;
use bytes::Bytes;
use mesh_proto::control::{Fetch, down_of};
use mesh_proto::messages::Meaning;
use mesh_proto::{CallId, Frame, Header, Kind, Landing, Part, ProcAddr, Sharing, Target, Ticket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// What landing messages need of the process.
pub(crate) trait Ground: Dispatch + Send + Sync + Sized + 'static {
    /// Keeps a part at its sender until it is dropped.
    type Hold: Send + 'static;
    /// Itself, for parts that come later.
    fn weak(&self) -> Weak<Self>;
    fn landings(&self) -> &Landings<Self::Hold>;
    /// The bypass, if one is known.
    fn road(&self) -> Option<Bypass>;
    /// A unique id.
    fn new_id(&self) -> u64;
    fn hold(&self, part: RefAddr, ticket: Ticket) -> Self::Hold;
    /// Takes in a complete message when it is its turn.
    fn take_in(&self, frame: Frame);
    /// A message has lost parts, and is not taken in.
    fn lose(&self, header: &Header);
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Landings<H> {
    me: ProcAddr,
    memory: Arc<Memory>,
    standing: Arc<Standing>,
    lines: Mutex<Landing<Frame>>,
    /// Whether anything is in those lines.
    busy: AtomicBool,
    /// Parts that come through the gateways after all, by the calls that ask for them.
    through: Mutex<HashMap<CallId, Asked<H>>>,
    arrived: AtomicU64,
    jobs: AtomicUsize,
}

/// A part that was asked for: its message, and its index.
type Asked<H> = (Arc<Job<H>>, usize);

/// A landing message.
#[derive(Debug)]
struct Job<H> {
    frame: Frame,
    number: u64,
    state: Mutex<Coming<H>>,
}

#[derive(Debug)]
struct Coming<H> {
    /// None for those that have not arrived.
    parts: Vec<Option<Part>>,
    left: usize,
    /// Whether nothing that has arrived is shared.
    sole: bool,
    lost: bool,
    /// Keeps the parts at their sender.
    holds: Vec<H>,
}

/// Where an arriving part is put.
#[derive(Debug)]
enum Into {
    Shared(Room),
    Heap(Vec<u8>),
}

impl Into {
    /// Memory for this many bytes; none if there is none.
    fn new(memory: &Memory, size: usize, me: ProcAddr) -> Option<Self> {
        if let Some(room) = memory.room(size, &Target::One(me)) {
            return Some(Self::Shared(room));
        }
        let mut heap = Vec::new();
        heap.try_reserve_exact(size).ok()?;
        heap.resize(size, 0);
        Some(Self::Heap(heap))
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Self::Shared(room) => room.place().at,
            Self::Heap(bytes) => bytes.as_mut_ptr(),
        }
    }

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

impl<H: Send + 'static> Landings<H> {
    pub(crate) fn new(me: ProcAddr, memory: &Arc<Memory>, standing: &Arc<Standing>) -> Self {
        Self {
            me,
            memory: Arc::clone(memory),
            standing: Arc::clone(standing),
            lines: Mutex::default(),
            busy: AtomicBool::new(false),
            through: Mutex::default(),
            arrived: AtomicU64::new(0),
            jobs: AtomicUsize::new(0),
        }
    }

    /// Whether a frame for this process must land, rather than be taken in at once.
    pub(crate) fn concerns(&self, frame: &Frame) -> bool {
        self.busy.load(Ordering::Acquire) || frame.header.is_distant()
    }

    /// How many parts have arrived by the bypass.
    pub(crate) fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// How many messages are landing.
    pub(crate) fn len(&self) -> usize {
        self.jobs.load(Ordering::Relaxed)
    }

    /// The part that this call asked for, if any.
    fn asked_through(&self, call: CallId) -> Option<Asked<H>> {
        lock(&self.through).remove(&call)
    }

    fn with_lines<T>(&self, then: impl FnOnce(&mut Landing<Frame>) -> T) -> T {
        let mut lines = lock(&self.lines);
        let out = then(&mut lines);
        self.busy.store(!lines.is_empty(), Ordering::Release);
        out
    }

    /// Takes in a message behind those of its sender that are still landing, or lets it land.
    #[cold]
    pub(crate) fn land(&self, ground: &impl Ground<Hold = H>, frame: Frame) {
        let header = frame.header;
        // Answers to this module's own questions wait behind nothing.
        if matches!(header.kind, Kind::Reply | Kind::Undeliverable)
            && let Ok(said) = Meaning::of(&header)
            && let Some((job, part)) = self.asked_through(said.call())
        {
            return self.came_through(ground, &job, part, &frame);
        }
        if header.is_distant() {
            return self.begin(ground, frame);
        }
        // The notice of a process's end waits behind what the process has sent.
        let ended = down_of(&header);
        let sender = ended.unwrap_or(header.src);
        match self.with_lines(|lines| lines.arrive(sender, frame)) {
            Some(frame) => ground.take_in(frame),
            None if ended.is_some() => self.lose_those_through(ground, |one| one == sender),
            None => {}
        }
    }

    fn begin(&self, ground: &impl Ground<Hold = H>, frame: Frame) {
        let Ok(parts) = frame.parts() else { return self.memory.let_go(&frame) };
        let sender = frame.header.src;
        let hold = |part: &Part| match part {
            Part::Distant { id, held, .. } => Some(ground.hold(RefAddr { owner: sender, id: *id }, *held)),
            Part::Inline(_) | Part::Shared { .. } => None,
        };
        let holds: Vec<H> = parts.iter().filter_map(hold).collect();
        let number = self.with_lines(|lines| lines.open(sender));
        self.jobs.fetch_add(1, Ordering::Relaxed);
        let here = |part: &Part| (!matches!(part, Part::Distant { .. })).then(|| part.clone());
        let coming = Coming {
            parts: parts.iter().map(here).collect(),
            // One more, so that it does not land while parts are still being asked for.
            left: holds.len() + 1,
            sole: frame.header.sharing().sole,
            lost: false,
            holds,
        };
        let job = Arc::new(Job { frame, number, state: Mutex::new(coming) });
        let road = ground.road();
        for (part, distant) in parts.into_iter().enumerate() {
            let Part::Distant { len, ticket, .. } = distant else { continue };
            match road {
                Some(road) => self.fetch_past(ground, road, &job, part, len, &ticket),
                None => self.fetch_through(ground, &job, part),
            }
        }
        self.settle(ground, &job, |_| {});
    }

    // Parts.

    fn fetch_past<G: Ground<Hold = H>>(
        &self,
        ground: &G,
        road: Bypass,
        job: &Arc<Job<H>>,
        part: usize,
        len: u64,
        ticket: &[u8],
    ) {
        let into = usize::try_from(len).ok().and_then(|size| Into::new(&self.memory, size, self.me));
        let Some(mut into) = into else { return self.lose_part(ground, job) };
        let at = into.as_mut_ptr();
        let (ground, job) = (ground.weak(), Arc::clone(job));
        let filled = move |all: bool| {
            let Some(ground) = ground.upgrade() else { return };
            let landings = ground.landings();
            if all {
                landings.arrived.fetch_add(1, Ordering::Relaxed);
                let came = into.done();
                landings.settle(&*ground, &job, |coming| coming.parts[part] = Some(came));
            } else {
                drop(into);
                landings.fetch_through(&*ground, &job, part);
            }
        };
        // SAFETY: `filled` keeps `into` until it is called at the end; it is as long as the part, and nothing else
        // knows of it.
        unsafe { road.fetch(ticket, at, len, Box::new(filled)) };
    }

    /// Asks a part's sender for it, as for any value that it keeps (DST-2).
    fn fetch_through(&self, ground: &impl Ground<Hold = H>, job: &Arc<Job<H>>, part: usize) {
        let sender = job.frame.header.src;
        let Some((id, _)) = distant(&job.frame, part) else { return self.lose_part(ground, job) };
        let call = ground.new_id();
        lock(&self.through).insert(call, (Arc::clone(job), part));
        // A thread that closes, or gives up its sender, may have passed over it.
        let over = self.standing.usable().is_err() || !self.with_lines(|lines| lines.is_open(sender, job.number));
        if over {
            if self.asked_through(call).is_some() {
                self.lose_part(ground, job);
            }
            return;
        }
        ground.dispatch(Fetch { id, call }.frame(self.me, sender));
    }

    fn came_through(&self, ground: &impl Ground<Hold = H>, job: &Arc<Job<H>>, part: usize, answer: &Frame) {
        let wanted = distant(&job.frame, part).map(|(_, len)| len);
        let parts = answer.parts().unwrap_or_default();
        match parts.into_iter().nth(1).filter(|came| answer.header.kind == Kind::Reply && Some(came.len()) == wanted) {
            Some(came) => self.settle(ground, job, |coming| {
                coming.sole &= answer.header.sharing().sole;
                coming.parts[part] = Some(came);
            }),
            None => {
                self.memory.let_go(answer);
                self.lose_part(ground, job);
            }
        }
    }

    fn lose_part(&self, ground: &impl Ground<Hold = H>, job: &Arc<Job<H>>) {
        self.settle(ground, job, |coming| coming.lost = true);
    }

    /// Settles the fate of a part. After the last one the message is taken in, with what was behind it.
    fn settle(&self, ground: &impl Ground<Hold = H>, job: &Arc<Job<H>>, news: impl FnOnce(&mut Coming<H>)) {
        let (coming, holds) = {
            let mut coming = lock(&job.state);
            news(&mut coming);
            coming.left -= 1;
            if coming.left > 0 {
                return;
            }
            let holds = std::mem::take(&mut coming.holds);
            let parts = std::mem::take(&mut coming.parts);
            (Coming { parts, left: 0, sole: coming.sole, lost: coming.lost, holds: Vec::new() }, holds)
        };
        let frame = self.landed(ground, job, coming);
        // Its sender need not keep the parts any longer (DST-3).
        drop(holds);
        self.jobs.fetch_sub(1, Ordering::Relaxed);
        let (sender, number) = (job.frame.header.src, job.number);
        let passes = self.with_lines(|lines| match lines.is_open(sender, number) {
            true => Ok(lines.land(sender, number, frame)),
            false => Err(frame),
        });
        match passes {
            Ok(true) => {
                while let Some(frame) = self.with_lines(|lines| lines.next(sender)) {
                    ground.take_in(frame);
                }
            }
            Ok(false) => {}
            // Its sender was given up meanwhile.
            Err(frame) => frame.iter().for_each(|frame| self.memory.let_go(frame)),
        }
    }

    /// The message with its parts; none if some are lost.
    fn landed(&self, ground: &impl Ground<Hold = H>, job: &Job<H>, coming: Coming<H>) -> Option<Frame> {
        let Coming { parts, sole, lost, .. } = coming;
        let lost = lost || parts.iter().any(Option::is_none);
        let whole: Vec<Part> = parts.into_iter().flatten().collect();
        let shared: Vec<Part> = whole.iter().filter(|part| matches!(part, Part::Shared { .. })).cloned().collect();
        let mut header = job.frame.header;
        header.set_sharing(Sharing { sole, shared: !shared.is_empty() });
        header.set_distant(false);
        if lost {
            // What has arrived of it goes back.
            let rest = [&[Part::Inline(Bytes::new())], &shared[..]].concat();
            self.memory.let_go(&Frame::build(header, None, b"", &rest));
            ground.lose(&job.frame.header);
            return None;
        }
        Some(Frame::build(header, None, job.frame.name(), &whole))
    }

    // Ends.

    /// A question of this process could not be sent. True if it was for a part of a message.
    pub(crate) fn unasked(&self, ground: &impl Ground<Hold = H>, call: CallId) -> bool {
        let asked = self.asked_through(call);
        asked.is_some_and(|(job, _)| {
            self.lose_part(ground, &job);
            true
        })
    }

    /// Processes have ended: what they were asked for will not come.
    fn lose_those_through(&self, ground: &impl Ground<Hold = H>, ended: impl Fn(ProcAddr) -> bool) {
        let lost: Vec<_> = {
            let mut through = lock(&self.through);
            through.extract_if(|_, (job, _)| ended(job.frame.header.src)).map(|(_, (job, _))| job).collect()
        };
        lost.iter().for_each(|job| self.lose_part(ground, job));
    }

    /// Processes are gone, and this process is told of each of them next: what has not landed from them never will.
    pub(crate) fn end(&self, ground: &impl Ground<Hold = H>, gone: impl Fn(ProcAddr) -> bool) {
        if !self.busy.load(Ordering::Acquire) {
            return;
        }
        let behind = self.with_lines(|lines| lines.give_up(&gone));
        behind.iter().for_each(|frame| self.memory.let_go(frame));
        self.lose_those_through(ground, gone);
    }

    /// The runtime closes: nothing is taken in any more.
    pub(crate) fn close(&self, ground: &impl Ground<Hold = H>) {
        self.end(ground, |_| true);
    }
}

/// The id and the length of a distant part.
fn distant(frame: &Frame, part: usize) -> Option<(u64, u64)> {
    match frame.parts().unwrap_or_default().get(part) {
        Some(Part::Distant { id, len, .. }) => Some((*id, *len)),
        _ => None,
    }
}
