//! Ports: where values for one receiver arrive, and their sending ends.
//!
//! PRT-1: a value that has arrived is handed out once, in order of arrival. One that nobody looked at, because the
//! receive was given up, is the next one again.
//! PRT-2: a sender whose receiver is gone is told: at once if that is known, else in answer to what it sent.
//! PRT-3: a process that hands on the port of a call tells the caller to whom, and a process that lets go of one that
//! came tells the caller that.
//! PRT-4: values that nobody has asked for yet are within the port's budget. Their senders count them, and hear of each
//! once a receive has it. Values that were handed out are not counted.

mod inlet;
mod sending;
mod state;

pub use inlet::Receive;
pub(crate) use inlet::{Inlet, Taken};
pub use sending::Way;
pub(crate) use sending::{STREAM, SendingEnd};
pub(crate) use state::PortState;

use crate::calls::Calls;
use crate::dispatch::Dispatch;
use crate::locks::lock;
use crate::message::Message;
use crate::reactor::Reactor;
use crate::standing::Standing;
use mesh_proto::control::{Closed, Held, Holding, PortAddr, Watch};
use mesh_proto::messages::Meaning;
use mesh_proto::{Header, Holders, HostNo, PortEnd, ProcAddr, Ticket};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// A port handed on to more processes than this at once is no longer tracked.
pub(crate) const MOST_HOLDERS: usize = 1024;

/// All ports of a process: those it receives at, and those it sends to.
#[derive(Debug)]
pub(crate) struct Ports {
    me: ProcAddr,
    reactor: Arc<Reactor>,
    standing: Arc<Standing>,
    inlets: Mutex<HashMap<u64, Arc<Inlet>>>,
    outlets: Mutex<HashMap<PortAddr, Weak<PortState>>>,
}

/// The port that a value is for.
fn address_of(header: &Header) -> Option<PortAddr> {
    let owner = header.dst;
    match Meaning::of(header).ok()? {
        Meaning::Post(post) => Some(PortAddr { owner, id: post.port, place: 0, response: false }),
        Meaning::Reply(reply) => Some(PortAddr { owner, id: reply.call, place: reply.place, response: true }),
        _ => None,
    }
}

impl Ports {
    pub(crate) fn new(me: ProcAddr, reactor: &Arc<Reactor>, standing: &Arc<Standing>) -> Self {
        let (reactor, standing) = (Arc::clone(reactor), Arc::clone(standing));
        Self { me, reactor, standing, inlets: Mutex::default(), outlets: Mutex::default() }
    }

    /// The number of ports.
    pub(crate) fn len(&self) -> usize {
        let inlets = lock(&self.inlets).len();
        inlets + lock(&self.outlets).len()
    }

    // Ports that this process receives at.

    /// From now on values can arrive at a port.
    pub(crate) fn open(&self, inlet: &Arc<Inlet>) {
        lock(&self.inlets).insert(inlet.id, Arc::clone(inlet));
    }

    pub(crate) fn inlet(&self, id: u64) -> Option<Arc<Inlet>> {
        lock(&self.inlets).get(&id).cloned()
    }

    /// Takes a value for a port. False if nobody receives there, or no longer.
    pub(crate) fn take(&self, port: u64, message: Message, calls: &Calls) -> bool {
        let inlet = self.inlet(port);
        match inlet.map_or(Taken::Refused, |inlet| inlet.push(&self.reactor, calls, message)) {
            Taken::In => true,
            Taken::Last => {
                lock(&self.inlets).remove(&port);
                true
            }
            Taken::Refused => false,
        }
    }

    /// Closes a port, and tells the senders of values that nobody has received.
    pub(crate) fn close(&self, inlet: &Inlet, calls: &Calls, out: &impl Dispatch) {
        lock(&self.inlets).remove(&inlet.id);
        let left = inlet.close(&self.reactor, calls);
        if self.standing.usable().is_ok() {
            for message in left {
                self.refuse(message.header(), PortEnd::ClosedBefore, out);
            }
            // Last: a sender that waits for room must know by then that the port is closed.
            inlet.account.close();
        }
    }

    /// Tells the sender of a value that nobody receives at its port.
    pub(crate) fn refuse(&self, header: &Header, why: PortEnd, out: &impl Dispatch) {
        let Some(port) = address_of(header) else { return };
        let closed = Closed { port, why };
        if header.src == self.me {
            self.on_closed(closed);
        } else {
            out.dispatch(closed.frame(self.me, header.src));
        }
    }

    /// Handles news from `src` of who holds the port of a call of this process.
    pub(crate) fn on_held(&self, held: Held, src: ProcAddr, calls: &Calls, out: &impl Dispatch) {
        let Held { call, place, news } = held;
        let change = |change: &mut dyn FnMut(&mut Holders)| {
            calls.on_held(&self.reactor, call, place as usize, change);
        };
        let (ticket, to, name) = match news {
            Holding::Loose => return change(&mut Holders::loosen),
            Holding::LetGo(tickets) => {
                return change(&mut |holders| tickets.iter().for_each(|ticket| holders.let_go(src, *ticket)));
            }
            // Only sent for references.
            Holding::Unsent { .. } | Holding::Read(_) => return,
            Holding::Given { ticket, to, name } => (ticket, to, Arc::<str>::from(name)),
        };
        let mut fresh = Vec::new();
        change(&mut |holders| {
            let given = to.iter().take(MOST_HOLDERS).copied();
            fresh.extend(given.filter(|addr| holders.given(*addr, ticket, &name)));
        });
        for holder in fresh {
            // This process is told of its own end, and of the end of a whole host, anyway.
            if holder != self.me && !holder.is_agent() {
                out.dispatch(Watch::of(holder).frame(self.me, holder));
            }
        }
    }

    // Ports that this process sends to.

    /// The state that all sending ends of a port in this process share.
    pub(crate) fn state(&self, address: PortAddr) -> Arc<PortState> {
        let mut outlets = lock(&self.outlets);
        if let Some(state) = outlets.get(&address).and_then(Weak::upgrade) {
            return state;
        }
        let state = Arc::new(PortState::default());
        outlets.insert(address, Arc::downgrade(&state));
        state
    }

    /// Lets go of a sending end. If it was the last in this process, returns the tickets under which the port came.
    fn let_go(&self, address: &PortAddr, state: &Arc<PortState>) -> Vec<Ticket> {
        let mut outlets = lock(&self.outlets);
        // Nobody else can get hold of it while the lock is held.
        if Arc::strong_count(state) > 1 {
            return Vec::new();
        }
        outlets.remove(address);
        state.take_tickets()
    }

    /// Notes that a port takes no more.
    pub(crate) fn on_closed(&self, closed: Closed) {
        let state = lock(&self.outlets).get(&closed.port).and_then(Weak::upgrade);
        if let Some(state) = state {
            state.close(closed.why);
        }
    }

    /// A process has ended, and with it the ports at which it received.
    pub(crate) fn on_down(&self, addr: ProcAddr) {
        self.close_those(|owner| owner == addr);
    }

    /// A whole host has ended.
    pub(crate) fn on_host_down(&self, host: HostNo) {
        self.close_those(|owner| owner.host == host);
    }

    fn close_those(&self, hit: impl Fn(ProcAddr) -> bool) {
        let hit: Vec<Arc<PortState>> = lock(&self.outlets)
            .iter()
            .filter(|(address, _)| hit(address.owner))
            .filter_map(|(_, state)| state.upgrade())
            .collect();
        for state in hit {
            state.close(PortEnd::ReceiverEnded);
        }
    }
}
