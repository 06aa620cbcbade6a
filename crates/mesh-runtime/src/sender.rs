//! Sending to one endpoint of some actors, wherever these are by now.

use crate::Runtime;
use crate::call::Call;
use crate::call::Callee;
use crate::error::RuntimeError;
use crate::gate::{Admission, Bid, Gate, Receivers};
use crate::locks::lock;
use crate::runtime::{Body, Calling, Deferral, Later, Outgoing, Spawned, Terms, millis};
use mesh_proto::messages::{Name, Request};
use mesh_proto::{ActorId, MESSAGE_COST, Target};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Names have 16 bits for their lengths in a frame. Regions are always shorter: their dimensions and labels are limited.
const LONGEST: usize = u16::MAX as usize;

/// Something about a message is longer than a frame can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooLong {
    /// The endpoint's name, with the labels of the mesh that is messaged.
    Name,
    /// A trace's context.
    Context,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::Name => "an endpoint's name and its mesh's labels together",
            Self::Context => "a trace's context and the endpoint's name together",
        };
        write!(f, "{what} must be at most {LONGEST} bytes long to be sent")
    }
}

impl std::error::Error for TooLong {}

/// What a [`Sender`] sends, to whom and how.
#[derive(Clone, Copy, Debug)]
pub struct SenderSpec<'a> {
    /// Who it sends to.
    pub target: &'a Arc<Target>,
    /// The dimensions of what is messaged, as receivers are told them.
    pub shape: &'a str,
    /// Which actor there; 0 for the processes themselves.
    pub actor: ActorId,
    /// The endpoint.
    pub endpoint: &'a str,
    /// What is asked of it.
    pub request: Request,
    /// Whether the receivers combine their replies on the way up.
    pub reduce: bool,
    /// Whether it waits for room, rather than having messages refused where there is none.
    pub block: bool,
    /// What people call the actors; `None` if Mesh itself sends.
    pub called: Option<&'a str>,
}

/// Everything about the messages to one endpoint but what they carry.
#[derive(Debug)]
pub struct Sender {
    runtime: Arc<Runtime>,
    /// The endpoint, the shape of the mesh and a trace's context, as a frame has them.
    name: Vec<u8>,
    actor: ActorId,
    request: Request,
    reduce: bool,
    block: bool,
    called: Option<Arc<str>>,
    /// What people are told when a call fails and nobody looks at it; only of calls that people make.
    callee: Option<Arc<Callee>>,
    /// Its calls note when they have finished, for a trace.
    timed: bool,
    /// How many bytes the generators of its streams may be ahead of their reader; 0 for what the process has set.
    ahead: u64,
    /// Where the receivers were when this was made.
    first: Road,
    /// Up to this news of repaired meshes they are known to be there still.
    as_of: AtomicU64,
    /// Where they are since, and up to which news.
    moved: Mutex<Option<(u64, Arc<Road>)>>,
}

/// The way to the receivers.
#[derive(Debug)]
pub struct Road {
    target: Arc<Target>,
    gate: Gate,
}

impl Road {
    fn new(target: Arc<Target>, actor: ActorId) -> Self {
        Self { target, gate: Gate::new(actor, Receivers::Actors) }
    }

    /// Where the receivers are.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// What counts messages against their budgets.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }
}

/// The way that a message takes now.
#[derive(Debug)]
pub enum Taken<'a> {
    /// Its receivers are where they were.
    First(&'a Road),
    /// Some have moved, as their mesh was repaired.
    Moved(Arc<Road>),
}

impl Deref for Taken<'_> {
    type Target = Road;

    fn deref(&self) -> &Road {
        match self {
            Self::First(road) => road,
            Self::Moved(road) => road,
        }
    }
}

impl Taken<'_> {
    /// Whether the receivers are a region of one mesh, as that was named. Only such combine their replies on the way up.
    pub fn is_whole(&self) -> bool {
        matches!(self, Self::First(road) if !matches!(&*road.target, Target::Joined(_)))
    }
}

impl Sender {
    /// Sends from this process.
    ///
    /// # Errors
    /// If the name and the mesh's labels are too long for a frame.
    pub fn new(runtime: &Arc<Runtime>, spec: SenderSpec<'_>) -> Result<Self, TooLong> {
        let SenderSpec { target, shape, actor, endpoint, request, reduce, block, called } = spec;
        runtime.note_target(target);
        // Receivers are told the shape of what was messaged, so that they know their place in it.
        let name = Name { shape: shape.as_bytes(), ..Name::of(endpoint.as_bytes()) }.to_bytes();
        if name.len() > LONGEST {
            return Err(TooLong::Name);
        }
        let callee = called.filter(|_| request.is_call()).map(|called| {
            let (actor_name, endpoint) = (called.to_owned(), endpoint.to_owned());
            Arc::new(Callee { id: actor, actor: actor_name, endpoint, target: Arc::clone(target) })
        });
        Ok(Self {
            runtime: Arc::clone(runtime),
            name,
            actor,
            request,
            reduce,
            block,
            called: called.map(Arc::from),
            callee,
            timed: false,
            ahead: 0,
            first: Road::new(Arc::clone(target), actor),
            as_of: AtomicU64::new(0),
            moved: Mutex::new(None),
        })
    }

    fn again(&self) -> Self {
        Self {
            runtime: Arc::clone(&self.runtime),
            name: self.name.clone(),
            called: self.called.clone(),
            callee: self.callee.clone(),
            first: Road::new(Arc::clone(&self.first.target), self.actor),
            as_of: AtomicU64::new(0),
            moved: Mutex::new(None),
            ..*self
        }
    }

    /// The same, with a trace's context in every message.
    ///
    /// # Errors
    /// If that is too long for a frame.
    pub fn traced(&self, context: &str) -> Result<Self, TooLong> {
        let name = Name { context: Some(context.as_bytes()), ..Name::read(&self.name) }.to_bytes();
        if name.len() > LONGEST {
            return Err(TooLong::Context);
        }
        Ok(Self { name, timed: true, ..self.again() })
    }

    /// The same, for streams whose generators are at most `ahead` bytes ahead of their reader.
    #[must_use]
    pub fn reading(&self, ahead: u64) -> Self {
        Self { ahead, ..self.again() }
    }

    /// The process that it sends from.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// Which actor it sends to; 0 for the processes themselves.
    pub fn actor(&self) -> ActorId {
        self.actor
    }

    /// Whether it sends spawns.
    pub fn is_spawn(&self) -> bool {
        self.request == Request::Spawn
    }

    /// Whether the receivers combine their replies.
    pub fn reduces(&self) -> bool {
        self.reduce
    }

    /// What people call the receivers; empty if Mesh itself sends.
    pub fn called(&self) -> &str {
        self.called.as_deref().unwrap_or_default()
    }

    /// The way that a message takes now.
    #[inline]
    pub fn road(&self) -> Taken<'_> {
        let news = self.runtime.news();
        if self.as_of.load(Ordering::Acquire) == news { Taken::First(&self.first) } else { self.look_up(news) }
    }

    #[cold]
    fn look_up(&self, news: u64) -> Taken<'_> {
        let mut moved = lock(&self.moved);
        if let Some((_, road)) = moved.as_ref().filter(|(as_of, _)| *as_of == news) {
            return Taken::Moved(Arc::clone(road));
        }
        let target = self.runtime.resolve(&self.first.target);
        if Arc::ptr_eq(&target, &self.first.target) {
            self.as_of.store(news, Ordering::Release);
            return Taken::First(&self.first);
        }
        let road = Arc::new(Road::new(target, self.actor));
        *moved = Some((news, Arc::clone(&road)));
        Taken::Moved(road)
    }

    /// What has to happen before a message of so many bytes may be sent.
    ///
    /// # Errors
    /// If a queue on its way is full, and the sender does not wait.
    pub fn admission<'a>(
        &'a self,
        road: &'a Road,
        bytes: usize,
        until: Option<Instant>,
    ) -> Result<Admission<'a>, RuntimeError> {
        let (runtime, target) = (&*self.runtime, &road.target);
        if !self.block {
            runtime.admit(target)?;
        }
        // What extensions say to others of their own process is not counted either.
        let is_counted = self.request.is_call() || self.is_for_extension() && target.index_of(runtime.me()).is_none();
        if !is_counted {
            // Spawns and stops are no messages for actors, and wait for no room; but a stop overtakes nothing.
            let waits = self.request == Request::StopActor && runtime.behind(target, self.actor).is_some();
            return Ok(if waits { Admission::Later(Later { until, ..Later::default() }) } else { Admission::Free });
        }
        // As `Outgoing::cost` has it.
        let cost = MESSAGE_COST + (self.name.len() + bytes) as u64;
        Ok(Admission::Bid(Bid { runtime, target, cost, block: self.block, until, own: false }))
    }

    /// Whether people send it to extensions. What Mesh itself says to extensions is not counted.
    fn is_for_extension(&self) -> bool {
        self.request == Request::Extend && self.name.first() != Some(&b'.') && self.called.is_some()
    }

    /// The terms of a message that nobody wants any longer after `until`.
    pub fn terms(&self, until: Option<Instant>) -> Terms {
        Terms { charged: false, deadline_ms: until.map_or(0, millis), ahead: self.ahead }
    }

    fn outgoing<'a>(&'a self, road: &'a Road, body: Body<'a>) -> Outgoing<'a> {
        Outgoing { request: self.request, target: &road.target, actor: self.actor, name: &self.name, body }
    }

    fn described(&self, call: Arc<Call>) -> Arc<Call> {
        if self.timed {
            call.keep_time();
        }
        if let Some(callee) = &self.callee {
            call.describe(callee);
        }
        call
    }

    /// Sends a message that is answered. Returns the call, and how many bytes now wait for the slowest receiver.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call(
        &self,
        road: &Road,
        body: Body<'_>,
        stream: bool,
        terms: Terms,
    ) -> Result<(Arc<Call>, usize), RuntimeError> {
        let out = self.outgoing(road, body);
        let (call, queued) = if self.reduce {
            self.runtime.call_reduced(&out, terms)
        } else {
            self.runtime.call_on(&out, stream, terms)
        }?;
        Ok((self.described(call), queued))
    }

    /// The same, once there is room.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_later(
        &self,
        road: &Road,
        body: Body<'_>,
        stream: bool,
        later: Later,
    ) -> Result<Arc<Call>, RuntimeError> {
        let how = match (self.reduce, stream) {
            (true, _) => Calling::Reduced,
            (false, true) => Calling::Stream,
            (false, false) => Calling::Each,
        };
        let call = self.runtime.call_later(&self.outgoing(road, body), &road.target, how, later)?;
        // There was no room to send it: nothing has answered so far.
        call.limit_ahead(self.ahead);
        Ok(self.described(call))
    }

    /// Sends a spawn: as [`Runtime::call_spawn`].
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn call_spawn(&self, road: &Road, body: Body<'_>, terms: Terms) -> Result<Spawned, RuntimeError> {
        let (call, queued, held) = self.runtime.call_spawn(&self.outgoing(road, body), terms)?;
        Ok((self.described(call), queued, held))
    }

    /// Sends a message that is not answered. Returns how many bytes now wait for the slowest receiver.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell(&self, road: &Road, body: Body<'_>, terms: Terms) -> Result<usize, RuntimeError> {
        self.runtime.tell_on(&self.outgoing(road, body), terms)
    }

    /// The same, once there is room.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn tell_later(&self, road: &Road, body: Body<'_>, later: Later) -> Result<Deferral, RuntimeError> {
        self.runtime.tell_later(&self.outgoing(road, body), &road.target, later)
    }

    /// Whether the sender of a message behind which so many bytes wait has to wait until there are fewer.
    pub fn has_outrun(&self, queued: usize) -> bool {
        self.block && queued > self.runtime.link_budget()
    }

    /// Waits a moment for the queues on the way to be within budget; true once they are.
    pub fn wait_room(&self, road: &Road, limit: Duration) -> bool {
        self.runtime.wait_room(&road.target, limit)
    }
}
