//! What the thread that reads has before it: the pipes, what was found in them, and where that goes.

use super::behind::{Behind, CatchUp, Source, Stage};
use super::messages::{Mail, Order};
use crate::completion::Completion;
use crate::locks::lock;
use crate::reactor::would_block;
use mesh_proto::logs::{Aggregator, Batch, Chunk, Found, LogOptions, Stream, Tap, Told, read_batch};
use mesh_proto::{HostNo, MeshId, ProcAddr};
use rustix::pipe::fcntl_setpipe_size;
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes that may wait to be shown (LOG-4).
pub(super) const MOST_WAITING: usize = 4 << 20;
/// A pipe is read so many times in a row where all of it is wanted; more is written meanwhile.
pub(super) const MOST_READS: usize = 64;
/// A pipe that was found full grows to this size.
pub(super) const GROWN: usize = 1 << 20;
/// Bytes of a batch above which nothing more is read before it is asked for (LOG-6).
pub(super) const MOST_FOUND: usize = 64 * 1024;
/// With so many a flush does not read more.
pub(super) const MOST_FLUSHED: usize = 4 << 20;
/// Meshes whose options may come before their procs.
pub(super) const MOST_EARLY: usize = 1024;
/// What holds for a mesh that nobody has said anything of.
pub(super) const DEFAULTS: LogOptions = LogOptions { shown: true, alike: false, window: Duration::ZERO, level: 0 };

/// One proc's pipes; closed ones are gone.
#[derive(Debug)]
pub(super) struct Pipes {
    pub(super) addr: ProcAddr,
    pub(super) fds: [Option<OwnedFd>; 2],
    pub(super) grown: [bool; 2],
    pub(super) tap: Tap,
    /// Its process has ended; only children that it has left may still write.
    pub(super) ended: bool,
}

#[derive(Debug)]
pub(super) struct LogReader {
    pub(super) pipes: HashMap<u64, Pipes>,
    pub(super) tokens: HashMap<ProcAddr, u64>,
    /// Procs with open pipes, by mesh.
    pub(super) open: HashMap<MeshId, usize>,
    pub(super) next: u64,
    pub(super) sink: Sink,
    pub(super) queue: VecDeque<Chunk>,
    pub(super) waiting: usize,
    /// Chunks so far: put into the queue, taken from it, and shown. Where lines are sent on, batches: sent, and taken by
    /// the controller.
    pub(super) put: u64,
    pub(super) taken: u64,
    pub(super) shown: u64,
    /// Somebody shows what is in the queue.
    pub(super) watched: bool,
    /// Flushes so far: asked for, and done.
    pub(super) asked: u64,
    pub(super) flushed: u64,
    pub(super) closing: bool,
    pub(super) closed: bool,
    /// At the controller: the other hosts that have procs of a mesh.
    pub(super) elsewhere: HashMap<MeshId, HashSet<HostNo>>,
    /// The flushes that other hosts have been asked for, and the latest that each has done.
    pub(super) asked_remote: u64,
    pub(super) done_away: HashMap<HostNo, u64>,
    pub(super) dead: HashSet<HostNo>,
    pub(super) behind: Arc<Behind>,
    /// The results that wait for lines to be shown.
    catching_up: Vec<CatchUp>,
    /// What is to be sent once the lock is let go.
    pub(super) mail: Vec<Mail>,
}

/// Where findings go.
#[derive(Debug)]
pub(super) enum Sink {
    /// To be shown here; what a process has set for a mesh of its own, other hosts are to know.
    Shown(Aggregator, Vec<(MeshId, LogOptions)>),
    /// To the controller.
    Sent(Sending),
}

#[derive(Debug, Default)]
pub(super) struct Sending {
    batch: Batch,
    under_way: bool,
    options: HashMap<MeshId, LogOptions>,
}

impl LogReader {
    /// Nothing yet; `remote` says that the lines are shown on another host.
    pub(super) fn new(remote: bool, behind: &Arc<Behind>) -> Self {
        Self {
            pipes: HashMap::new(),
            tokens: HashMap::new(),
            open: HashMap::new(),
            next: 0,
            sink: match remote {
                true => Sink::Sent(Sending::default()),
                false => Sink::Shown(Aggregator::new(DEFAULTS), Vec::new()),
            },
            queue: VecDeque::new(),
            waiting: 0,
            put: 0,
            taken: 0,
            shown: 0,
            watched: false,
            asked: 0,
            flushed: 0,
            closing: false,
            closed: false,
            elsewhere: HashMap::new(),
            asked_remote: 0,
            done_away: HashMap::new(),
            dead: HashSet::new(),
            behind: Arc::clone(behind),
            catching_up: Vec::new(),
            mail: Vec::new(),
        }
    }

    /// Reads from one pipe at most `times` times. Returns how many bytes there were.
    pub(super) fn read(&mut self, token: u64, stream: Stream, now: Duration, buffer: &mut [u8], times: usize) -> usize {
        let which = stream as usize;
        let mut total = 0;
        for _ in 0..times {
            let Some(pipes) = self.pipes.get_mut(&token) else { break };
            let Some(fd) = &pipes.fds[which] else { break };
            let mesh = pipes.addr.mesh;
            let mut found = lines_to(&mut self.sink, mesh, now);
            let source = Source::Proc(pipes.addr);
            let before = self.behind.reading(source);
            let got = rustix::io::read(fd, &mut *buffer);
            if !matches!(got, Ok(1..)) {
                self.behind.read_nothing(source, before);
            }
            match got {
                Ok(0) => {}
                Ok(n) => {
                    total += n;
                    pipes.tap.feed(stream, &buffer[..n], now, &mut found);
                    if n == buffer.len() && !std::mem::replace(&mut pipes.grown[which], true) {
                        // The kernel may say no, to a user who has many pipes: then it stays as it is.
                        let _ = fcntl_setpipe_size(fd, GROWN);
                    }
                    continue;
                }
                Err(errno) if would_block(errno) => break,
                Err(_) => {}
            }
            // Closed by all who could write.
            pipes.fds[which] = None;
            if pipes.fds.iter().all(Option::is_none) {
                pipes.tap.end(&mut found);
                drop(found);
                self.forget_ended(token);
            }
            break;
        }
        total
    }

    /// Forgets a proc that has ended and whose pipes are closed.
    pub(super) fn forget_ended(&mut self, token: u64) {
        let over = |pipes: &Pipes| pipes.ended && pipes.fds.iter().all(Option::is_none);
        if !self.pipes.get(&token).is_some_and(over) {
            return;
        }
        let Some(pipes) = self.pipes.remove(&token) else { return };
        self.behind.closed(token);
        let mesh = pipes.addr.mesh;
        if let Some(open) = self.open.get_mut(&mesh) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&mesh);
                self.left(mesh);
            }
        }
    }

    /// No process of a mesh is left here, or on another host.
    fn left(&mut self, mesh: MeshId) {
        match &mut self.sink {
            Sink::Shown(aggregator, _) => {
                if !self.open.contains_key(&mesh) && !self.elsewhere.contains_key(&mesh) {
                    aggregator.forget(mesh);
                }
            }
            Sink::Sent(sending) => {
                sending.options.remove(&mesh);
                sending.batch.closed(mesh);
            }
        }
    }

    /// Nothing more is read before something was shown, or sent.
    pub(super) fn is_full(&self) -> bool {
        let full = match &self.sink {
            Sink::Shown(..) => self.waiting > MOST_WAITING,
            Sink::Sent(sending) => sending.under_way && sending.batch.len() > MOST_FOUND,
        };
        full && !self.closing
    }

    /// What is to be said to others.
    pub(super) fn mail(&mut self) -> Vec<Mail> {
        match &mut self.sink {
            Sink::Shown(_, set) => self.mail.extend(set.drain(..).map(|(mesh, options)| Mail::Set(mesh, options))),
            Sink::Sent(sending) if !sending.under_way && !sending.batch.is_empty() => {
                sending.under_way = true;
                self.put += 1;
                self.mail.push(Mail::Found(sending.batch.take()));
            }
            Sink::Sent(_) => {}
        }
        std::mem::take(&mut self.mail)
    }

    /// Does what others have said. Where this host is full already, their lines wait.
    pub(super) fn obey(&mut self, orders: &Mutex<VecDeque<Order>>, now: Duration, buffer: &mut [u8], full: bool) {
        let mut all = std::mem::take(&mut *lock(orders));
        if full && matches!(self.sink, Sink::Shown(..)) && self.is_full() {
            let (later, at_once) = all.into_iter().partition(|order| matches!(order, Order::Found(..)));
            let mut orders = lock(orders);
            let since = std::mem::replace(&mut *orders, later);
            orders.extend(since);
            all = at_once;
        }
        for order in all {
            match order {
                Order::Found(host, raw) => self.heard(host, &raw, now),
                Order::Set(mesh, options) => self.set(mesh, options, now, buffer),
                Order::Dead(host) => {
                    self.dead.insert(host);
                    self.done_away.remove(&host);
                    let theirs: Vec<MeshId> = self
                        .elsewhere
                        .iter()
                        .filter(|(_, hosts)| hosts.contains(&host))
                        .map(|(mesh, _)| *mesh)
                        .collect();
                    for mesh in theirs {
                        self.left_there(mesh, host);
                    }
                }
                Order::More => {
                    if let Sink::Sent(sending) = &mut self.sink {
                        sending.under_way = false;
                        self.shown = self.put;
                        self.behind.shown(self.shown);
                    }
                }
                Order::CatchUp(wait) => self.catching_up.push(wait),
                Order::Report(mesh, ticket) => {
                    if !matches!(&self.sink, Sink::Sent(sending) if sending.batch.len() > MOST_FLUSHED) {
                        self.read_all(now, buffer, |addr| addr.mesh == mesh);
                    }
                    if let Sink::Sent(sending) = &mut self.sink {
                        sending.batch.flushed(ticket);
                    }
                }
                Order::Flush(ticket) => {
                    if !matches!(&self.sink, Sink::Sent(sending) if sending.batch.len() > MOST_FLUSHED) {
                        self.everything(now, buffer);
                    }
                    if let Sink::Sent(sending) = &mut self.sink {
                        sending.batch.flushed(ticket);
                    }
                }
            }
        }
    }

    /// Another host has told something.
    fn heard(&mut self, host: HostNo, raw: &[u8], now: Duration) {
        if self.dead.contains(&host) {
            return;
        }
        let mut left = Vec::new();
        read_batch(raw, &mut |told| match told {
            Told::Found(mesh, found) => {
                if !matches!(found, Found::Options(..)) {
                    self.behind.reading(Source::Host(mesh, host));
                    self.elsewhere.entry(mesh).or_default().insert(host);
                }
                match (&mut self.sink, found) {
                    // It was not left out there, by the options that held when it was written.
                    (Sink::Shown(aggregator, _), Found::Line(line)) => aggregator.kept(mesh, &line, now),
                    (sink, found) => lines_to(sink, mesh, now)(found),
                }
            }
            Told::Closed(mesh) => left.push(mesh),
            Told::Flushed(ticket) => {
                let done = self.done_away.entry(host).or_default();
                *done = ticket.max(*done);
            }
        });
        for mesh in left {
            self.left_there(mesh, host);
        }
        self.mail.push(Mail::More(host));
    }

    fn left_there(&mut self, mesh: MeshId, host: HostNo) {
        if let Some(hosts) = self.elsewhere.get_mut(&mesh) {
            hosts.remove(&host);
            if hosts.is_empty() {
                self.elsewhere.remove(&mesh);
                self.left(mesh);
            }
        }
    }

    /// Sets what is done with the lines of a mesh. What was written before is under the options of before.
    pub(super) fn set(&mut self, mesh: MeshId, options: LogOptions, now: Duration, buffer: &mut [u8]) {
        let tokens: Vec<u64> = self.pipes.iter().filter(|(_, p)| p.addr.mesh == mesh).map(|(t, _)| *t).collect();
        for token in tokens {
            for stream in [Stream::Out, Stream::Err] {
                self.read(token, stream, now, buffer, MOST_READS);
            }
        }
        match &mut self.sink {
            Sink::Shown(aggregator, _) => aggregator.set(mesh, options),
            Sink::Sent(sending) => {
                if self.open.contains_key(&mesh) || sending.options.len() < MOST_EARLY {
                    sending.options.insert(mesh, options);
                }
            }
        }
    }

    pub(super) fn hand_on_records(&mut self, wanted: bool) {
        if let Sink::Shown(aggregator, _) = &mut self.sink {
            aggregator.hand_on_records(wanted);
        }
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        let begun = self.pipes.values().filter_map(|pipes| pipes.tap.deadline()).min();
        let counted = match &self.sink {
            Sink::Shown(aggregator, _) => aggregator.deadline(),
            Sink::Sent(_) => None,
        };
        begun.into_iter().chain(counted).chain(self.given_up()).min()
    }

    // What results wait for (LOG-8).

    /// When the next of those who wait for lines to be shown gives up.
    pub(super) fn given_up(&self) -> Option<Duration> {
        self.catching_up.iter().map(|wait| wait.until).min()
    }

    /// Reads what is waited for, as far as possible now.
    pub(super) fn catch_up(&mut self, now: Duration, buffer: &mut [u8]) {
        if self.catching_up.is_empty() || self.is_full() {
            return;
        }
        for mut wait in std::mem::take(&mut self.catching_up) {
            if wait.stage == Stage::Begun {
                self.read_all(now, buffer, |addr| wait.target.index_of(addr).is_some());
                self.asked_remote += 1;
                let ticket = self.asked_remote;
                let asked = std::mem::take(&mut wait.ask);
                wait.stage = Stage::Asked(ticket, asked.iter().map(|(host, _)| *host).collect());
                self.mail.extend(asked.into_iter().map(|(host, mesh)| Mail::Report(host, mesh, ticket)));
            }
            if let Stage::Asked(ticket, hosts) = &mut wait.stage {
                hosts.retain(|host| {
                    !self.dead.contains(host) && self.done_away.get(host).is_none_or(|done| *done < *ticket)
                });
                if hosts.is_empty() {
                    if let Sink::Shown(aggregator, _) = &mut self.sink {
                        wait.meshes().into_iter().for_each(|mesh| aggregator.release(mesh));
                    }
                    self.publish();
                    wait.stage = Stage::Found(self.put);
                }
            }
            self.catching_up.push(wait);
        }
    }

    /// Takes out those that have waited long enough for what they wait for.
    pub(super) fn caught_up(&mut self) -> Vec<Arc<Completion>> {
        let (shown, over) = (self.shown, self.closed || !self.watched);
        let all = |wait: &mut CatchUp| over || matches!(wait.stage, Stage::Found(last) if last <= shown);
        self.catching_up.extract_if(.., all).map(|wait| wait.done).collect()
    }

    /// Takes out those that give up.
    pub(super) fn late(&mut self, now: Duration) -> Vec<Arc<Completion>> {
        self.catching_up.extract_if(.., |wait| wait.until <= now).map(|wait| wait.done).collect()
    }

    /// Reads the pipes of these processes to where they are empty, without showing unfinished lines.
    fn read_all(&mut self, now: Duration, buffer: &mut [u8], of: impl Fn(ProcAddr) -> bool) {
        let all = self.pipes.iter().filter(|(_, pipes)| of(pipes.addr));
        for token in all.map(|(token, _)| *token).collect::<Vec<u64>>() {
            for stream in [Stream::Out, Stream::Err] {
                self.read(token, stream, now, buffer, MOST_READS);
            }
            if let Some(pipes) = self.pipes.get_mut(&token) {
                pipes.tap.release(&mut lines_to(&mut self.sink, pipes.addr.mesh, now));
            }
        }
    }

    pub(super) fn tick(&mut self, now: Duration) {
        for pipes in self.pipes.values_mut() {
            if pipes.tap.deadline().is_some_and(|at| at <= now) {
                pipes.tap.tick(now, &mut lines_to(&mut self.sink, pipes.addr.mesh, now));
            }
        }
        if let Sink::Shown(aggregator, _) = &mut self.sink {
            aggregator.tick(now);
        }
    }

    /// Reads all pipes to where they are empty, and lets nothing wait for more.
    pub(super) fn everything(&mut self, now: Duration, buffer: &mut [u8]) {
        self.flushed = self.asked;
        let tokens: Vec<u64> = self.pipes.keys().copied().collect();
        for token in tokens {
            for stream in [Stream::Out, Stream::Err] {
                self.read(token, stream, now, buffer, MOST_READS);
            }
            if let Some(pipes) = self.pipes.get_mut(&token) {
                let mut found = lines_to(&mut self.sink, pipes.addr.mesh, now);
                if self.closing {
                    pipes.tap.end(&mut found);
                } else {
                    pipes.tap.flush(&mut found);
                }
            }
        }
        if let Sink::Shown(aggregator, _) = &mut self.sink {
            aggregator.flush();
        }
    }

    /// Puts what is ready into the queue; where nobody looks, it is dropped.
    pub(super) fn publish(&mut self) {
        let whole = |source| match source {
            Source::Proc(addr) => {
                let pipes = self.tokens.get(&addr).and_then(|token| self.pipes.get(token));
                pipes.is_none_or(|pipes| pipes.tap.is_quiet())
            }
            Source::Host(..) => true,
        };
        let aggregator = match &mut self.sink {
            Sink::Shown(aggregator, _) => aggregator,
            Sink::Sent(sending) => {
                let last = self.put + u64::from(!sending.batch.is_empty());
                return self.behind.settle(last, |_| true, whole);
            }
        };
        let bytes = aggregator.ready();
        if bytes > 0 {
            let chunks = aggregator.take();
            if self.watched {
                self.put += chunks.len() as u64;
                self.waiting += bytes;
                self.queue.extend(chunks);
            }
        }
        self.behind.settle(self.put, |mesh| aggregator.is_quiet(mesh), whole);
    }
}

/// Where a tap's findings go.
fn lines_to(sink: &mut Sink, mesh: MeshId, now: Duration) -> impl FnMut(Found<'_>) {
    move |found| match sink {
        Sink::Shown(aggregator, set) => match found {
            Found::Line(line) => aggregator.line(mesh, &line, now),
            Found::Introduced(procs, options) => aggregator.introduce(mesh, procs, options),
            Found::Options(mesh, options) => {
                aggregator.set(mesh, options);
                set.push((mesh, options));
            }
        },
        Sink::Sent(sending) => {
            match found {
                Found::Line(line) if sending.options.get(&mesh).unwrap_or(&DEFAULTS).omit(&line) => return,
                Found::Line(_) => {}
                Found::Introduced(_, options) => {
                    sending.options.entry(mesh).or_insert(options);
                }
                Found::Options(mesh, options) => {
                    sending.options.insert(mesh, options);
                }
            }
            sending.batch.found(mesh, &found);
        }
    }
}
