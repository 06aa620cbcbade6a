//! Who holds the port of a call, or a reference to a kept value.
//!
//! The port of a call can be handed on. A process that sends it to others tells the caller to whom (under a ticket that
//! travels with the port), and a process that lets go of what came under a ticket reports that. The two reports take
//! different routes, so they may arrive in any order.
//!
//! HLD-1: a call whose port was handed on ends once nobody holds it any longer, because the last holder let go of it or
//! died. It does not end while a live process may hold it, or if it went to an unknown place.

use crate::{Ended, HostNo, ProcAddr};
use std::collections::HashMap;
use std::sync::Arc;

/// The number of one hand-over of a port.
pub type Ticket = u64;

/// A process that held the port of a call and died before anybody answered.
#[derive(Clone, Debug)]
pub struct Deserter {
    /// The process.
    pub addr: ProcAddr,
    /// The name of the actor that was given the port; empty if unknown.
    pub name: Arc<str>,
    /// How it ended.
    pub ended: Arc<Ended>,
}

/// Why nobody holds the port of a call any longer.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// All holders let go of it.
    LetGo,
    /// One of the holders died.
    Died(Deserter),
}

/// What is known of one holder's ticket.
#[derive(Debug)]
enum Hold {
    /// It was given the port.
    Given(Arc<str>),
    /// It let go before anybody reported that it was given the port.
    LetGo,
}

/// The state machine, for one rank of one call; see the module.
#[derive(Debug)]
pub struct Holders {
    holds: HashMap<(ProcAddr, Ticket), Hold>,
    given: usize,
    loose: bool,
    lost: Option<Deserter>,
}

impl Holders {
    /// The ticket of the callee.
    pub const FIRST: Ticket = 0;

    /// The callee holds the port.
    #[must_use]
    pub fn new(callee: ProcAddr) -> Self {
        let holds = HashMap::from([((callee, Self::FIRST), Hold::Given(Arc::from("")))]);
        Self { holds, given: 1, loose: false, lost: None }
    }

    /// The port was sent to a process. True if that is news, so that the caller must watch the process.
    pub fn given(&mut self, to: ProcAddr, ticket: Ticket, name: &Arc<str>) -> bool {
        match self.holds.get(&(to, ticket)) {
            Some(Hold::Given(_)) => false,
            Some(Hold::LetGo) => {
                self.holds.remove(&(to, ticket));
                false
            }
            None => {
                self.holds.insert((to, ticket), Hold::Given(Arc::clone(name)));
                self.given += 1;
                true
            }
        }
    }

    /// A process let go of the port that came under a ticket.
    pub fn let_go(&mut self, by: ProcAddr, ticket: Ticket) {
        match self.holds.get(&(by, ticket)) {
            Some(Hold::Given(_)) => {
                self.holds.remove(&(by, ticket));
                self.given -= 1;
            }
            Some(Hold::LetGo) => {}
            None => {
                self.holds.insert((by, ticket), Hold::LetGo);
            }
        }
    }

    /// The port went where nobody can follow it, such as into a file.
    pub fn loosen(&mut self) {
        self.loose = true;
    }

    /// A process ended.
    pub fn died(&mut self, addr: ProcAddr, ended: &Arc<Ended>) {
        self.bury(|holder| holder == addr, ended);
    }

    /// A whole host ended.
    pub fn host_died(&mut self, host: HostNo, ended: &Arc<Ended>) {
        self.bury(|holder| holder.host == host, ended);
    }

    fn bury(&mut self, hit: impl Fn(ProcAddr) -> bool, ended: &Arc<Ended>) {
        let (given, lost) = (&mut self.given, &mut self.lost);
        self.holds.retain(|(addr, _), hold| {
            let Hold::Given(name) = hold else { return true };
            if !hit(*addr) {
                return true;
            }
            *given -= 1;
            *lost = Some(Deserter { addr: *addr, name: Arc::clone(name), ended: Arc::clone(ended) });
            false
        });
    }

    /// What became of the port, if nobody holds it any longer (HLD-1).
    #[must_use]
    pub fn verdict(&self) -> Option<Verdict> {
        let over = self.given == 0 && !self.loose;
        over.then(|| self.lost.clone().map_or(Verdict::LetGo, Verdict::Died))
    }
}
