//! Members of a job without processes, each with its own real gateway, switch and reactor, all in one process. They
//! record what a gateway tells its process.

use crate::call::Call;
use crate::call::Outcome;
use crate::calls::Calls;
use crate::dispatch::Dispatch;
use crate::error::RuntimeError;
use crate::gateway::{CONNECTION_TOKENS, Gateway, GatewayOptions, JobBegun, Neighbors, Process, introduction};
use crate::greeting::{GREETING, hear, on_thread, refuse, say};
use crate::home::Home;
use crate::locks::lock;
use crate::message::Message;
use crate::reactor::{Handler, Reactor};
use crate::runtime::{GATEWAY, Parts, Switch};
use crate::shm::Memory;
use crate::spin_board::SpinBoard;
use crate::standing::Standing;
use crate::tests::SOON;
use crate::tls::{Dialed, Identity, Limits, Listener, ListenerEvent, Pace, PeerFacts, Role, Store, TlsStream, dial};
use crate::unseen::Unseen;
use crate::visits::{self, Answerer, Visits};
use mesh_proto::control::{Attachment, Inspect, StopProcs, Traits};
use mesh_proto::hosts::{Fate, HostSet, Join, Look, PacketDecoder, PacketKind, Refusal};
use mesh_proto::messages::{Asked, Meaning, Tell};
use mesh_proto::{EndReason, Ended, Frame, Header, HostEnd, HostNo, Kind, LinkId, MeshId, ProcAddr, Router, Target};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Long enough that no silence counts as death, however busy the machine is.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Parts of at least this length go into shared memory.
pub(super) const LARGE: usize = 64 << 10;

/// A job's credentials.
pub(super) struct Job {
    dir: PathBuf,
    pub(super) controller: Arc<Identity>,
    pub(super) host: Arc<Identity>,
    pub(super) observer: Arc<Identity>,
}

impl Job {
    pub(super) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("mesh-gateways-{}-{nth}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let hour = Duration::from_secs(3600);
        let store = Store::create(&dir.join("job"), hour, hour).unwrap();
        store.issue_observer(&dir.join("observer"), hour).unwrap();
        Self {
            controller: Identity::load(store.dir()).unwrap(),
            host: Identity::load_as(store.dir(), Role::Host).unwrap(),
            observer: Identity::load_to_look(&dir.join("observer")).unwrap(),
            dir,
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// What a gateway has told its process.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// Messages: the sender, their numbers, and how many bytes they carry.
    pub(super) told: Vec<(HostNo, u32, usize)>,
    /// Messages of this process that came back: the receiver, and their numbers.
    pub(super) bounced: Vec<(HostNo, u32)>,
    pub(super) died: Vec<(HostNo, Fate)>,
    pub(super) lost: Vec<HostNo>,
    pub(super) attached: Vec<(HostNo, String)>,
    /// Why this host's part in the job is over.
    pub(super) ended: Vec<String>,
    pub(super) log: Vec<String>,
    pub(super) visitors: usize,
    /// Whether it was told to end its processes.
    pub(super) vacates: bool,
}

impl Heard {
    /// The numbers of the messages from a host.
    pub(super) fn from(&self, host: HostNo) -> Vec<u32> {
        self.told.iter().filter(|(from, ..)| *from == host).map(|(_, number, _)| *number).collect()
    }
}

pub(super) struct Member {
    pub(super) me: ProcAddr,
    pub(super) gateway: Arc<Gateway<Self>>,
    pub(super) visits: Arc<Visits<Self>>,
    pub(super) calls: Arc<Calls>,
    /// Processes that must still end when this host is released.
    pub(super) procs: AtomicUsize,
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    board: Arc<SpinBoard>,
    memory: Arc<Memory>,
    switch: Switch,
    heard: Mutex<Heard>,
    changed: Condvar,
    io: Mutex<Option<JoinHandle<()>>>,
}

impl Member {
    pub(super) fn controller() -> Arc<Self> {
        Self::new(0)
    }

    pub(super) fn new(host: HostNo) -> Arc<Self> {
        static INCARNATIONS: AtomicU64 = AtomicU64::new(1);
        let me = ProcAddr::agent(host);
        let reactor = Arc::new(Reactor::new().unwrap());
        let (standing, board) = (Arc::new(Standing::new()), Arc::new(SpinBoard::create().unwrap()));
        let incarnation = INCARNATIONS.fetch_add(1, Ordering::Relaxed);
        let memory = Arc::new(Memory::new(64 << 20, incarnation << 32));
        let (calls, home) = (Arc::new(Calls::telling(Unseen::default())), Arc::new(Home::default()));
        let member = Arc::new_cyclic(|this| {
            let visits = Arc::new(Visits::new(me, this));
            let parts = Neighbors {
                reactor: Arc::clone(&reactor),
                standing: Arc::clone(&standing),
                calls: Arc::clone(&calls),
                home,
                memory: Arc::clone(&memory),
                board: Arc::clone(&board),
                visits: Arc::clone(&visits),
            };
            Self {
                me,
                gateway: Gateway::new(me, incarnation, this, parts, LARGE),
                visits,
                calls,
                procs: AtomicUsize::new(0),
                switch: Switch::new(me, &reactor, Router::agent(me)),
                reactor,
                standing,
                board,
                memory,
                heard: Mutex::default(),
                changed: Condvar::new(),
                io: Mutex::default(),
            }
        });
        let this = Arc::clone(&member);
        *lock(&member.io) = Some(std::thread::spawn(move || this.reactor.run_io(&*this)));
        member
    }

    fn note(&self, note: impl FnOnce(&mut Heard)) {
        note(&mut lock(&self.heard));
        self.changed.notify_all();
    }

    /// What the gateway has told so far.
    pub(super) fn heard<T>(&self, look: impl FnOnce(&Heard) -> T) -> T {
        look(&lock(&self.heard))
    }

    /// Waits until this holds for what the gateway has told.
    pub(super) fn until(&self, what: &str, holds: impl Fn(&Heard) -> bool) {
        let heard = lock(&self.heard);
        let (heard, wait) = self.changed.wait_timeout_while(heard, SOON, |heard| !holds(heard)).unwrap();
        assert!(!wait.timed_out(), "{:?} waits for {what}: {heard:?}", self.me);
    }

    /// Waits for the outcomes of a call.
    pub(super) fn outcomes(&self, call: &Call) -> Vec<Outcome> {
        self.wait_for_call(call, Instant::now() + SOON);
        call.take_outcomes().expect("the call is done")
    }

    /// Sends a numbered message to a host.
    pub(super) fn tell(&self, host: HostNo, number: u32, len: usize) {
        let header = Tell { actor: 3, place: number }.header(self.me, ProcAddr::agent(host));
        self.dispatch(Frame::build_plain(header, None, b"tell", &vec![7; len]));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.standing.is_closed()
    }

    /// In the order of [`crate::Runtime::close`].
    pub(super) fn close(&self) {
        if !self.standing.close() {
            return;
        }
        self.gateway.close(Duration::from_secs(1));
        self.visits.close();
        let ended = Arc::new(Ended { orderly: true, ..Ended::unmade(EndReason::Shutdown) });
        self.calls.fail_all(&self.reactor, &ended);
        self.reactor.close();
        let io = lock(&self.io).take();
        if let Some(io) = io {
            io.join().unwrap();
        }
    }
}

impl Handler for Member {
    fn on_ready(&self, token: u64, readable: bool, writable: bool) {
        assert!(token >= CONNECTION_TOKENS);
        self.gateway.on_connection(token, readable, writable);
    }

    fn on_turn(&self) -> Option<Instant> {
        self.gateway.turn()
    }
}

impl Dispatch for Member {
    fn dispatch(&self, frame: Frame) -> usize {
        self.switch.dispatch(self, frame, None)
    }
}

impl Parts for Member {
    fn is_abroad(&self) -> bool {
        self.gateway.is_active()
    }

    fn expects_early(&self) -> bool {
        true
    }
    fn overhear(&self, _: &Frame, _: bool) {}

    fn deliver(&self, frame: Frame) {
        let header = frame.header;
        match header.kind {
            Kind::Reply | Kind::Undeliverable => {
                let said = Meaning::read(&frame).unwrap();
                let reply = Outcome::Replied(Arc::new(Message::new(frame, &self.memory)));
                self.calls.offer(&self.reactor, said.call(), said.place() as usize, reply);
            }
            Kind::Tell => {
                let number = Tell::read(&header).unwrap().place;
                let len = frame.body.len();
                self.memory.let_go(&frame);
                self.note(|heard| heard.told.push((header.src.host, number, len)));
            }
            Kind::StopProcs => {
                let order = StopProcs::read(&frame).unwrap();
                self.gateway.on_release(header, order.within);
            }
            Kind::Inspect => {
                let Some(Inspect::Visit(visit)) = Inspect::read(&frame) else { panic!("{header:?}") };
                self.visits.on_visit(header.src, visit);
            }
            _ => self.gateway.on_frame(frame),
        }
    }

    fn send_remote(&self, frame: &Frame, hosts: HostSet) -> usize {
        self.gateway.send(frame, hosts)
    }

    fn has_output(&self, _: &Frame) -> bool {
        false
    }

    fn answers_for(&self, _: &Frame) -> bool {
        false
    }

    fn await_procs(&self, frame: Frame, _: Option<LinkId>) {
        panic!("{:?} waits for processes", frame.header);
    }

    fn refuse_unknown(&self, frame: &Frame) {
        panic!("{:?} is for nobody", frame.header);
    }

    fn bounce(&self, frame: &Frame, outcome: Outcome) {
        let header = frame.header;
        if header.src != self.me {
            return;
        }
        match (header.kind, Asked::of(&header)) {
            (Kind::Tell, _) => {
                let number = Tell::read(&header).unwrap().place;
                self.note(|heard| heard.bounced.push((header.dst.host, number)));
            }
            (_, Some(asked)) => self.calls.on_outcome(&self.reactor, asked.call, asked.place as usize, outcome),
            _ => {}
        }
    }
}

impl Answerer for Member {
    fn notice_visitor(&self) {
        self.note(|heard| heard.visitors += 1);
    }
}

impl Process for Member {
    fn arrived(&self, frame: Frame) {
        self.switch.dispatch(self, frame, Some(GATEWAY));
    }

    fn local_ranks(&self, _: MeshId) -> Range<u32> {
        0..1
    }

    fn awaits_copy(&self, _: &Header) -> bool {
        false
    }

    fn share_copy(&self, frame: Frame) -> Frame {
        frame
    }

    fn bounce(&self, frame: &Frame, outcome: Outcome) {
        Parts::bounce(self, frame, outcome);
    }

    fn host_attached(&self, host: HostNo, name: &str) {
        self.note(|heard| heard.attached.push((host, name.to_owned())));
    }

    fn host_died(&self, host: HostNo, end: &HostEnd) {
        self.note(|heard| heard.died.push((host, end.fate)));
    }

    fn ranks_lost(&self, host: HostNo, end: &HostEnd) {
        self.calls.on_host_down(&self.reactor, host, &Arc::new(end.ended()));
        self.note(|heard| heard.lost.push(host));
    }

    fn open_call(&self, agents: Target) -> Result<Arc<Call>, RuntimeError> {
        let call = self.calls.open(agents, false);
        if let Err(error) = self.standing.usable() {
            self.calls.cancel(&self.reactor, &call);
            return Err(error);
        }
        Ok(call)
    }

    fn wait_for_call(&self, call: &Call, until: Instant) {
        // The thread that completes it wakes this one.
        call.expect();
        self.reactor.wait(self, &self.board, Duration::ZERO, Some(until), false, &|| call.is_done());
    }

    fn vacate(&self, _: Duration, until: Instant) {
        self.note(|heard| heard.vacates = true);
        self.gateway.wait_for_processes(until, || self.procs.load(Ordering::SeqCst) == 0);
    }
}

/// A host that can be dialed, or dials: a listener and the member that serves the job there.
pub(super) struct Site {
    pub(super) member: Arc<Member>,
    identity: Arc<Identity>,
    begun: Mutex<bool>,
    listener: OnceLock<Listener>,
    gone: AtomicBool,
}

impl Site {
    /// A host that listens, and will have this number in the job.
    pub(super) fn new(identity: &Arc<Identity>, host: HostNo) -> Arc<Self> {
        let site = Self::silent(identity, host);
        let this = Arc::downgrade(&site);
        let on_event = move |event| {
            let (Some(site), ListenerEvent::Joined { stream, peer, .. }) = (this.upgrade(), event) else { return };
            on_thread("test-greet", move || site.greeted(stream, peer)).unwrap();
        };
        let any = [std::net::SocketAddr::from(([127, 0, 0, 1], 0))];
        let listener = Listener::bind(&any, Arc::clone(identity), Limits::default(), on_event).unwrap();
        site.listener.set(listener).unwrap();
        site
    }

    /// A host that does not listen.
    pub(super) fn silent(identity: &Arc<Identity>, host: HostNo) -> Arc<Self> {
        Arc::new(Self {
            member: Member::new(host),
            identity: Arc::clone(identity),
            begun: Mutex::new(false),
            listener: OnceLock::new(),
            gone: AtomicBool::new(false),
        })
    }

    pub(super) fn address(&self) -> String {
        self.listener.get().unwrap().addrs()[0].to_string()
    }

    fn greeted(&self, mut stream: TlsStream, facts: PeerFacts) {
        let mut decoder = PacketDecoder::default();
        let Ok(packet) = hear(&mut stream, &mut decoder, Instant::now() + GREETING) else { return };
        if packet.kind == PacketKind::Look {
            let look = Look::read(&packet).unwrap();
            return visits::receive(&*self.member.gateway, look, stream, decoder, (&facts, &self.identity), &|_| {});
        }
        if let Ok(join) = Join::read(&packet) {
            self.join(&join, stream, decoder, facts);
        }
    }

    fn join(&self, join: &Join, stream: TlsStream, decoder: PacketDecoder, facts: PeerFacts) {
        let told = Attachment::decode(&join.body).filter(|_| join.from != 0 || facts.role == Role::Controller);
        let mut begun = lock(&self.begun);
        if (*begun && join.job != self.member.gateway.job()) || (!*begun && told.is_none()) {
            return refuse(stream, Refusal::NoSuchJob, visits::NO_SUCH_JOB.to_owned());
        }
        if let Some(told) = told.filter(|_| !*begun) {
            *begun = true;
            let (ended, log) = (Arc::clone(&self.member), Arc::clone(&self.member));
            let begun = JobBegun {
                identity: &self.identity,
                traits: &Traits::default(),
                ended: Box::new(move |why| ended.note(|heard| heard.ended.push(why))),
                log: Box::new(move |text| log.note(|heard| heard.log.push(text))),
            };
            self.member.gateway.begin(join, &told, begun);
        }
        drop(begun);
        self.member.gateway.admit(join, stream, decoder, facts);
    }

    /// Offers this host to a controller. False if it wants no more.
    pub(super) fn offer(&self, address: &str) -> bool {
        let pace = Pace { timeout: SOON, again: Duration::from_millis(500), over: None };
        let Dialed { mut stream, peer, .. } = dial(address, &self.identity, Some(Role::Controller), pace).unwrap();
        let body = introduction("dialer", &Traits::default()).encode();
        let offer = Join { job: 0, from: 0, to: 0, incarnation: 0, expected: 0, body };
        let (mut decoder, until) = (PacketDecoder::default(), Instant::now() + SOON);
        say(&mut stream, &offer.packet(), until).unwrap();
        let packet = hear(&mut stream, &mut decoder, until).unwrap();
        let Ok(mut join) = Join::read(&packet) else { return false };
        assert_eq!(join.to, self.member.me.host);
        let mut told = Attachment::decode(&join.body).unwrap();
        told.dialed = true;
        told.below = vec![(0, address.to_owned())];
        join.body = told.encode();
        self.join(&join, stream, decoder, peer);
        true
    }

    /// Ends the host in order.
    pub(super) fn close(&self) {
        if !self.gone.swap(true, Ordering::SeqCst) {
            if let Some(listener) = self.listener.get() {
                listener.close();
            }
            self.member.close();
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.close();
    }
}

pub(super) fn options(fan_out: u32) -> GatewayOptions {
    GatewayOptions { window: WINDOW, fan_out, patience: Duration::ZERO, hold: Duration::ZERO }
}

/// Attaches hosts at these addresses and waits until all have answered.
pub(super) fn attach(controller: &Member, job: &Job, addresses: &[String], fan_out: u32) -> Vec<Outcome> {
    let addresses: Vec<_> = addresses.iter().cloned().map(Some).collect();
    let identity = Arc::clone(&job.controller);
    let (_, call) = controller.gateway.attach(&addresses, move || Ok(identity), options(fan_out)).unwrap();
    controller.outcomes(&call)
}

pub(super) fn is_up(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Replied(message) if message.header().kind == Kind::Reply)
}
