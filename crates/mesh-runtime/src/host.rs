//! A host that serves jobs: authenticated members begin or join jobs here.

use crate::error::RuntimeError;
use crate::fork_server::Spare;
use crate::gateway::{JobBegun, introduction};
use crate::greeting::{AGAIN, GREETING, hear, on_thread, refuse, say};
use crate::home::AgentEnvironment;
use crate::locks::lock;
use crate::runtime::{Options, Runtime};
use crate::tls::{
    DialError, Dialed, Identity, Limits, Listener, ListenerEvent, Pace, PeerFacts, Reason, Role, TlsStream, dial,
    resolve,
};
use crate::visits::{self, Jobs, Place, Visits};
use mesh_proto::HostNo;
use mesh_proto::control::{Attachment, Traits};
use mesh_proto::hosts::{Join, Look, PacketDecoder, PacketKind, Parting, Refusal};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a host that offers itself waits before it dials again.
const OFFER_AGAIN: Duration = Duration::from_millis(500);

/// The file in a job's folder that says where the host listens, and where its credentials are.
const MEMBERSHIP: &str = "membership";

/// How a host takes part in jobs.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Its name for people.
    pub name: String,
    /// Its labels and resources.
    pub traits: Traits,
    /// The command that starts its interpreter.
    pub python: Vec<OsString>,
    /// The environment of its processes.
    pub env: Vec<(OsString, OsString)>,
    /// A private folder, with a subfolder for each job.
    pub scratch: std::path::PathBuf,
    /// It ends with the first job that it serves, and serves no other meanwhile.
    pub once: bool,
    /// For the runtimes of its jobs.
    pub runtime: Options,
    /// A possible first fork server for its jobs.
    pub standby: Spare,
}

/// One part in a job: a script may attach an agent more than once, each time as another host.
type Part = (u64, HostNo);

#[derive(Default)]
struct Served {
    runtimes: HashMap<Part, (HostNo, Arc<Runtime>)>,
    /// The first job that was served.
    first: Option<u64>,
}

/// What a dialing peer wants.
enum Wants {
    Join(Join),
    Look(Look),
}

/// Called with messages for the user.
pub type HostTold = Box<dyn Fn(&str) + Send + Sync>;

/// A host that serves jobs, in turn or several at once. Each has its own runtime.
pub struct Host {
    identity: Arc<Identity>,
    options: HostOptions,
    served: Mutex<Served>,
    /// How many visitors look into jobs here.
    looking: Arc<AtomicUsize>,
    listener: Mutex<Option<Listener>>,
    addrs: Vec<SocketAddr>,
    tell: HostTold,
    closed: Mutex<bool>,
    changed: std::sync::Condvar,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("name", &self.options.name).field("addrs", &self.addrs).finish_non_exhaustive()
    }
}

impl Jobs for Host {
    type Process = Runtime;

    fn list(&self) -> Vec<u64> {
        let jobs: BTreeSet<u64> = lock(&self.served).runtimes.keys().map(|(job, _)| *job).collect();
        jobs.into_iter().collect()
    }

    fn find(&self, job: u64) -> Option<Arc<Visits<Runtime>>> {
        let served = lock(&self.served);
        let mut parts = served.runtimes.iter().filter(|((which, _), _)| *which == job);
        parts.next().map(|(_, (_, runtime))| Arc::clone(&runtime.visits))
    }
}

impl Host {
    /// Listens at `address`, if given, and serves authenticated members.
    ///
    /// # Errors
    /// If it cannot listen at the address.
    pub fn start(
        address: Option<&str>,
        identity: Arc<Identity>,
        options: HostOptions,
        tell: HostTold,
    ) -> Result<Arc<Self>, RuntimeError> {
        let addrs = match address {
            Some(address) => resolve(address, GREETING).map_err(|error| RuntimeError::Address(error.to_string()))?,
            None => Vec::new(),
        };
        let mut failed = None;
        let host = Arc::new_cyclic(|this: &Weak<Self>| {
            let on_event = Weak::clone(this);
            let listener = match addrs.is_empty() {
                true => None,
                false => match Listener::bind(&addrs[..1], Arc::clone(&identity), Limits::default(), move |event| {
                    if let Some(host) = on_event.upgrade() {
                        host.on_listener_event(event);
                    }
                }) {
                    Ok(listener) => Some(listener),
                    Err(error) => {
                        failed = Some(error);
                        None
                    }
                },
            };
            Self {
                addrs: listener.as_ref().map(|listener| listener.addrs().to_vec()).unwrap_or_default(),
                listener: Mutex::new(listener),
                identity,
                options,
                served: Mutex::default(),
                looking: Arc::default(),
                tell,
                closed: Mutex::new(false),
                changed: std::sync::Condvar::new(),
            }
        });
        match failed {
            Some(error) => Err(RuntimeError::Address(error.to_string())),
            None => Ok(host),
        }
    }

    /// The addresses that it listens at.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// How many jobs it serves now.
    pub fn jobs(&self) -> usize {
        lock(&self.served).runtimes.keys().map(|(job, _)| *job).collect::<HashSet<_>>().len()
    }

    fn on_listener_event(self: &Arc<Self>, event: ListenerEvent) {
        match event {
            ListenerEvent::Joined { stream, peer, addr } => {
                // A mere observer gets a thread only with a place.
                let place = if peer.role.may_join() { None } else { Place::take(&self.looking) };
                if place.is_none() && !peer.role.may_join() {
                    return visits::turn_away(stream);
                }
                let host = Arc::clone(self);
                let greeting = move || host.greeted(stream, peer, addr, place);
                if let Err(error) = on_thread("mesh-greet", greeting) {
                    (self.tell)(&format!("{addr} was turned away: failed to start a thread for it: {error}"));
                }
            }
            ListenerEvent::Refused { addr, reason: Reason::RefusedUs(why) | Reason::Misread(why), .. } => {
                (self.tell)(&format!("{addr} did not accept this host: {why}"));
            }
            ListenerEvent::Refused { addr, reason, more: 0 } => (self.tell)(&format!("{addr} was refused: {reason}")),
            ListenerEvent::Refused { addr, reason, more } => {
                (self.tell)(&format!("{addr} was refused: {reason} (and {more} more that were not told)"));
            }
            ListenerEvent::Stuck { errno } => (self.tell)(&format!("nobody can be let in for the moment: {errno}")),
        }
    }

    /// Finds out what a connected member wants.
    fn greeted(self: &Arc<Self>, mut stream: TlsStream, facts: PeerFacts, addr: SocketAddr, place: Option<Place>) {
        let until = Instant::now() + GREETING;
        let mut decoder = PacketDecoder::default();
        let heard = hear(&mut stream, &mut decoder, until).map_err(|error| error.to_string()).and_then(|packet| {
            let wants = match packet.kind {
                PacketKind::Look => Look::read(&packet).map(Wants::Look),
                _ => Join::read(&packet).map(Wants::Join),
            };
            wants.map_err(|error| error.to_string())
        });
        match heard {
            Ok(Wants::Join(join)) => self.joined(&join, stream, decoder, facts),
            Ok(Wants::Look(look)) => match place.or_else(|| Place::take(&self.looking)) {
                Some(_place) => {
                    visits::receive(&**self, look, stream, decoder, (&facts, &self.identity), &|text| {
                        (self.tell)(text)
                    });
                }
                None => visits::turn_away(stream),
            },
            Err(why) => (self.tell)(&format!("{addr} was turned away: it did not say what it wants: {why}")),
        }
    }

    fn joined(self: &Arc<Self>, join: &Join, stream: TlsStream, decoder: PacketDecoder, facts: PeerFacts) {
        if !facts.role.may_join() {
            (self.tell)("somebody was refused: an observer's certificate does not let anybody join a job");
            return refuse(stream, Refusal::NotAllowed, "an observer can look into jobs, and not join them".to_owned());
        }
        if join.from == 0 && facts.role != Role::Controller {
            (self.tell)("a member was refused: it has a host's certificate, and says that it is the controller");
            return refuse(
                stream,
                Refusal::Other,
                "only a controller's certificate speaks for the controller".to_owned(),
            );
        }
        let runtime = self.part_in(join, &facts);
        match runtime {
            Ok(runtime) => runtime.gateway.admit(join, stream, decoder, facts),
            Err((code, text)) => refuse(stream, code, text),
        }
    }

    /// The runtime of the part that a member means. It begins with the controller's attachment.
    fn part_in(self: &Arc<Self>, join: &Join, facts: &PeerFacts) -> Result<Arc<Runtime>, (Refusal, String)> {
        let mut served = lock(&self.served);
        if let Some((_, runtime)) = served.runtimes.get(&(join.job, join.to)) {
            return Ok(Arc::clone(runtime));
        }
        if *lock(&self.closed) {
            return Err((Refusal::NoSuchJob, "this host shuts down".to_owned()));
        }
        if join.from == 0 && facts.role != Role::Controller {
            return Err((Refusal::Other, "it is a host, where a controller is expected".to_owned()));
        }
        let Some(attachment) = Attachment::decode(&join.body).filter(|_| join.expected == 0) else {
            return Err((Refusal::NoSuchJob, visits::NO_SUCH_JOB.to_owned()));
        };
        // One attachment makes it one host, whatever addresses lead to it.
        let same =
            |((job, _), (base, _)): (&Part, &(HostNo, Arc<Runtime>))| *job == join.job && *base == attachment.base;
        if let Some(((_, me), _)) = served.runtimes.iter().find(|(part, held)| same((part, held))) {
            let to = join.to;
            return Err((Refusal::Other, format!("it is host {me} of this job already, and cannot be host {to} too")));
        }
        if self.options.once && served.first.is_some_and(|first| first != join.job) {
            return Err((Refusal::Other, "it serves one job alone, and that is another one".to_owned()));
        }
        let runtime = self.begin(join, &attachment).map_err(|error| (Refusal::Other, error.to_string()))?;
        served.first.get_or_insert(join.job);
        served.runtimes.insert((join.job, join.to), (attachment.base, Arc::clone(&runtime)));
        Ok(runtime)
    }

    /// Begins a job here.
    fn begin(self: &Arc<Self>, join: &Join, attachment: &Attachment) -> Result<Arc<Runtime>, RuntimeError> {
        let part = (join.job, join.to);
        let scratch = self.scratch_of(part);
        std::fs::create_dir_all(&scratch)
            .and_then(|()| self.leave_word(&scratch))
            .map_err(|error| RuntimeError::Address(format!("no folder can be made for the job: {error}")))?;
        let runtime = Runtime::host_agent(
            join.to,
            self.options.name.clone(),
            AgentEnvironment {
                python: self.options.python.clone(),
                env: self.options.env.clone(),
                scratch: Some(scratch),
                standby: Arc::clone(&self.options.standby),
            },
            self.options.runtime,
        )?;
        let this = Arc::downgrade(self);
        let over = move |why: String| {
            let Some(host) = this.upgrade() else { return };
            // Not on the runtime's own thread, which ends with it.
            let end = move || host.end(part, &why);
            let _ = std::thread::Builder::new().name("mesh-end".to_owned()).spawn(end);
        };
        let teller = Arc::downgrade(self);
        let log = move |text: String| {
            if let Some(host) = teller.upgrade() {
                (host.tell)(&text);
            }
        };
        let (identity, traits) = (&self.identity, &self.options.traits);
        let begun = JobBegun { identity, traits, ended: Box::new(over), log: Box::new(log) };
        runtime.gateway.begin(join, attachment, begun);
        (self.tell)(&format!("job {:016x} begins here, as its host {}", join.job, join.to));
        Ok(runtime)
    }

    /// Tells the job's processes on this host where it listens, and where the credentials are. Neither is secret.
    fn leave_word(&self, scratch: &std::path::Path) -> io::Result<()> {
        let mut word = self.addrs.first().map(ToString::to_string).unwrap_or_default().into_bytes();
        word.push(b'\n');
        let dir = std::path::absolute(self.identity.dir())?;
        word.extend_from_slice(dir.as_os_str().as_encoded_bytes());
        std::fs::write(scratch.join(MEMBERSHIP), word)
    }

    fn scratch_of(&self, (job, host): Part) -> std::path::PathBuf {
        self.options.scratch.join(format!("job-{job:016x}-{host}"))
    }

    fn end(&self, part: Part, why: &str) {
        let Some((_, runtime)) = lock(&self.served).runtimes.remove(&part) else { return };
        runtime.close(Duration::ZERO);
        let _ = std::fs::remove_dir_all(self.scratch_of(part));
        let job = part.0;
        (self.tell)(&format!("job {job:016x} has ended here: {why}"));
        if self.options.once && lock(&self.served).runtimes.is_empty() {
            self.close();
        }
        drop(lock(&self.closed));
        self.changed.notify_all();
    }

    /// Waits until the host is closed, for at most `limit`. Returns whether it is.
    pub fn wait(&self, limit: Duration) -> bool {
        let closed = lock(&self.closed);
        let (closed, _) =
            self.changed.wait_timeout_while(closed, limit, |closed| !*closed).unwrap_or_else(PoisonError::into_inner);
        *closed
    }

    /// Tells all its jobs that this host will be taken away in `grace`, and why.
    pub fn leave(&self, grace: Duration, why: &str) {
        for runtime in self.runtimes() {
            runtime.announce_leaving(grace, why);
        }
    }

    /// Whether no job has processes here.
    pub fn is_vacant(&self) -> bool {
        self.runtimes().iter().all(|runtime| runtime.is_vacant())
    }

    fn runtimes(&self) -> Vec<Arc<Runtime>> {
        lock(&self.served).runtimes.values().map(|(_, runtime)| Arc::clone(runtime)).collect()
    }

    /// Ends the host and all its jobs' work here.
    pub fn close(&self) {
        *lock(&self.closed) = true;
        self.changed.notify_all();
        let listener = lock(&self.listener).take();
        if let Some(listener) = listener {
            listener.close();
        }
        let served: Vec<_> = lock(&self.served).runtimes.drain().collect();
        for (_, (_, runtime)) in served {
            runtime.gateway.end_job(Parting::Stopped, &Parting::Stopped.to_string());
            runtime.close(Duration::ZERO);
        }
    }

    /// Offers this host to a controller that listens at `address`, repeatedly until the host is closed: for networks in
    /// which nobody can connect to it.
    pub fn dial_out(self: &Arc<Self>, address: &str) {
        let mut told = String::new();
        while !self.wait(Duration::ZERO) {
            if self.jobs() == 0 {
                // Report a persistent error only once.
                let why = self.offer(address).err().unwrap_or_default();
                if !why.is_empty() && why != told {
                    (self.tell)(&why);
                }
                told = why;
            }
            if self.wait(OFFER_AGAIN) {
                return;
            }
        }
    }

    fn offer(self: &Arc<Self>, address: &str) -> Result<(), String> {
        let Dialed { mut stream, peer, .. } = match dial(
            address,
            &self.identity,
            Some(Role::Controller),
            Pace { timeout: GREETING, again: AGAIN[1], over: None },
        ) {
            Ok(dialed) => dialed,
            // No controller is running now.
            Err(DialError::Refused { .. } | DialError::TimedOut { .. } | DialError::Unreachable { .. }) => {
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        let body = introduction(&self.options.name, &self.options.traits).encode();
        let offer = Join { job: 0, from: 0, to: 0, incarnation: 0, expected: 0, body };
        let failed = |error: io::Error| format!("{address} did not take this host: {error}");
        let mut decoder = PacketDecoder::default();
        say(&mut stream, &offer.packet(), Instant::now() + GREETING).map_err(failed)?;
        // Wait until the controller wants another host.
        let packet = loop {
            match hear(&mut stream, &mut decoder, Instant::now() + OFFER_AGAIN) {
                Ok(packet) => break packet,
                Err(error) if error.kind() == ErrorKind::TimedOut && !self.wait(Duration::ZERO) => {}
                Err(error) => return Err(failed(error)),
            }
        };
        if packet.kind == PacketKind::Refuse {
            return Ok(());
        }
        let mut join = Join::read(&packet).map_err(|error| failed(io::Error::other(error)))?;
        if let Some(mut told) = Attachment::decode(&join.body) {
            told.dialed = true;
            // The way back to the controller.
            told.below = vec![(0, address.to_owned())];
            join.body = told.encode();
        }
        self.joined(&join, stream, decoder, peer);
        Ok(())
    }
}
