//! Who may still answer a call by its port.
//!
//! The port of a call can be handed on: whoever sends it to others tells the caller to whom (under a ticket that travels
//! with the port), and whoever lets go of what came under a ticket tells it that. The two come by different ways, so they
//! may come in any order.
//!
//! HLD-1: a call whose port was handed on ends once nobody is left that holds it, be it that the last has let go of it or
//! has died. It does not end as long as somebody who lives may hold it, or where it went is not known.

use crate::{Ended, HostNo, ProcAddr};
use std::collections::HashMap;
use std::sync::Arc;

/// One handing on of a port.
pub type Ticket = u64;

/// A process that held the port of a call and has died before anybody answered.
#[derive(Clone, Debug)]
pub struct Deserter {
    /// The process.
    pub addr: ProcAddr,
    /// What people call the actor that was given the port; empty if nobody said.
    pub name: Arc<str>,
    /// How it ended.
    pub ended: Arc<Ended>,
}

/// Why nobody holds the port of a call any more.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// All that had it have let go of it.
    LetGo,
    /// One of them has died.
    Died(Deserter),
}

/// What is known of one holder's ticket.
#[derive(Debug)]
enum Hold {
    /// It was given the port.
    Given(Arc<str>),
    /// It has let go of what nobody has told of yet.
    LetGo,
}

/// The machine, for one rank of one call; see the module.
#[derive(Debug)]
pub struct Holders {
    holds: HashMap<(ProcAddr, Ticket), Hold>,
    given: usize,
    loose: bool,
    lost: Option<Deserter>,
}

impl Holders {
    /// The ticket of whoever was called.
    pub const FIRST: Ticket = 0;

    /// The port is with whoever was called.
    #[must_use]
    pub fn new(callee: ProcAddr) -> Self {
        let holds = HashMap::from([((callee, Self::FIRST), Hold::Given(Arc::from("")))]);
        Self { holds, given: 1, loose: false, lost: None }
    }

    /// The port was sent to somebody. True if that is news, and so its end is to be asked for.
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

    /// Somebody has let go of the port that came under a ticket.
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

    /// The port has gone where nobody can follow it: into a file, say.
    pub fn loosen(&mut self) {
        self.loose = true;
    }

    /// A process has ended.
    pub fn died(&mut self, addr: ProcAddr, ended: &Arc<Ended>) {
        self.bury(|holder| holder == addr, ended);
    }

    /// A whole host has.
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

    /// What has become of the port, if nobody is left that holds it (HLD-1).
    #[must_use]
    pub fn verdict(&self) -> Option<Verdict> {
        let over = self.given == 0 && !self.loose;
        over.then(|| self.lost.clone().map_or(Verdict::LetGo, Verdict::Died))
    }
}
