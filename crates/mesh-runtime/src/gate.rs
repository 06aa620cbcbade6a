//! How messages get past the budgets of their receivers' mailboxes, and what their senders do where there is no room.
//!
//! A message that fits is counted and goes at once. Where a mailbox is full, a thread waits for room, or for its turn behind
//! messages that coroutines have sent before (BKL-1); a coroutine has its message sent later. A sender that would wait for
//! itself, or does not want to wait, is told so. Nothing here blocks: whoever sends asks, and acts on the answer.

use crate::completion::Fate;
use crate::error::RuntimeError;
use crate::meter::Meter;
use crate::runtime::{Deferral, Later, Waited};
use crate::{Outlet, Runtime, Said, Way};
use mesh_proto::{ActorId, Target};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What a gate leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receivers {
    /// Actors' mailboxes.
    Actors,
    /// A channel's mailbox.
    Channel,
    /// Whoever reads the stream that a call is answered with.
    Stream,
}

/// The mailboxes that a sender's messages are counted against.
#[derive(Debug)]
pub struct Gate {
    mailbox: ActorId,
    receivers: Receivers,
    /// In the order of the target; looked up with the first message.
    meters: OnceLock<Arc<[Arc<Meter>]>>,
}

/// One message that asks to be let through.
#[derive(Clone, Copy, Debug)]
pub struct Bid<'a> {
    /// The process that it is sent from.
    pub runtime: &'a Runtime,
    /// Who it is for.
    pub target: &'a Arc<Target>,
    /// How many bytes it counts.
    pub cost: u64,
    /// Whether its sender waits for room. Otherwise the message is refused where there is none.
    pub block: bool,
    /// When nobody wants it any longer.
    pub until: Option<Instant>,
    /// Mesh itself sends it, and waits for it: there is at most one for each that waits, so it is never refused.
    pub own: bool,
}

/// What has to happen before a message may be sent.
#[derive(Debug)]
pub enum Admission<'a> {
    /// Nothing: it is not counted.
    Free,
    /// It is sent later, behind what waits for the same receivers.
    Later(Later),
    /// It has to be let through.
    Bid(Bid<'a>),
}

/// The answer to a [`Bid`].
#[derive(Debug)]
pub enum Verdict<'a> {
    /// The message may be sent now; whether it is counted.
    Passes(bool),
    /// Room is reserved for it, and it is sent once its receivers have room.
    Later(Later),
    /// It cannot be reserved: as much waits here as may.
    Crowded {
        /// The full mailbox.
        full: Full<'a>,
        /// How many bytes wait here.
        waiting: u64,
        /// How many may.
        budget: u64,
    },
    /// Its sender has to wait, or to give up.
    Full(Full<'a>),
}

/// A mailbox that keeps a message back.
#[derive(Debug)]
pub struct Full<'a> {
    /// Its place in the target.
    pub index: usize,
    /// What is counted there.
    pub meter: &'a Arc<Meter>,
    /// How many bytes were under way to it when it was looked at, and how many may be.
    pub level: (u64, u64),
    /// Why its sender should perhaps not wait for it.
    pub doubt: Option<Doubt>,
    /// The message has to wait for its turn, rather than for room.
    pub is_behind: bool,
}

/// Why a sender should perhaps not wait for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// It has asked not to.
    Unwilling,
    /// It sends to a channel that this very process reads.
    OwnChannel,
    /// It is the event loop that the receiver may run on.
    OwnLoop,
    /// It is a thread of the receiver's process, perhaps the receiver's own.
    OwnProcess,
}

impl Doubt {
    /// Its name in Python.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Unwilling => "refuse",
            Self::OwnChannel => "port",
            Self::OwnLoop => "loop",
            Self::OwnProcess => "thread",
        }
    }
}

impl Gate {
    /// The gate to the mailboxes `mailbox` of a target.
    #[must_use]
    pub fn new(mailbox: ActorId, receivers: Receivers) -> Self {
        Self { mailbox, receivers, meters: OnceLock::new() }
    }

    /// The gate of the sending end of a port.
    #[must_use]
    pub fn of_port(outlet: &Outlet) -> Self {
        let receivers = match outlet.way() {
            Way::Channel { .. } => Receivers::Channel,
            Way::Response { .. } => Receivers::Stream,
        };
        Self::new(outlet.counted().unwrap_or(0), receivers)
    }

    /// The actor, or the number of the port.
    #[must_use]
    pub fn mailbox(&self) -> ActorId {
        self.mailbox
    }

    /// What it leads to.
    #[must_use]
    pub fn receivers(&self) -> Receivers {
        self.receivers
    }

    fn meters(&self, bid: Bid<'_>) -> &Arc<[Arc<Meter>]> {
        self.meters.get_or_init(|| {
            bid.target.mailboxes(self.mailbox).map(|(addr, mailbox)| bid.runtime.meter(addr, mailbox)).collect()
        })
    }

    /// Lets a message through if nothing is in its way; whether it is counted. `None` means that its sender has to
    /// [`Self::ask`].
    pub fn pass(&self, bid: Bid<'_>) -> Option<bool> {
        let meters = self.meters(bid);
        if bid.runtime.defers() {
            return None;
        }
        bid.runtime.admit_all(meters, bid.cost).ok()
    }

    /// What the sender of a message is to do. A coroutine may not block.
    ///
    /// # Errors
    /// In a forked copy of the process.
    pub fn ask<'a>(&'a self, bid: Bid<'_>, coroutine: bool) -> Result<Verdict<'a>, RuntimeError> {
        let Bid { runtime, target, cost, block, until, own } = bid;
        runtime.original()?;
        let meters = self.meters(bid);
        loop {
            // What was sent before and has not gone yet goes first (BKL-1).
            let behind = runtime.behind(target, self.mailbox);
            let index = match behind {
                Some(index) => index,
                None => match runtime.admit_all(meters, cost) {
                    Ok(counted) => return Ok(Verdict::Passes(counted)),
                    Err(full) => full,
                },
            };
            let meter = &meters[index];
            let mut full = Full { index, meter, level: meter.level(), doubt: None, is_behind: behind.is_some() };
            if block && coroutine {
                return Ok(match runtime.reserve(cost, own) {
                    Ok(()) => {
                        Verdict::Later(Later { meters: Some(Arc::clone(meters)), cost, until, ..Later::default() })
                    }
                    Err((waiting, budget)) => Verdict::Crowded { full, waiting, budget },
                });
            }
            if !block || meter.addr() == runtime.me() {
                // Credits may have come since: what is said of the mailbox has to be what keeps the message back.
                if behind.is_none() && meter.full(cost).is_none() {
                    continue;
                }
                full.doubt = Some(match block {
                    false => Doubt::Unwilling,
                    true if self.receivers == Receivers::Channel && !own => Doubt::OwnChannel,
                    true if runtime.event_loops().is_mine() => Doubt::OwnLoop,
                    true => Doubt::OwnProcess,
                });
            }
            return Ok(Verdict::Full(full));
        }
    }

    /// Has the calling thread wait for its turn, behind messages that were sent before.
    ///
    /// # Errors
    /// If the runtime is closed.
    pub fn turn<'a>(&'a self, bid: Bid<'a>) -> Result<Turn<'a>, RuntimeError> {
        let meters = self.meters(bid);
        let deferral = bid.runtime.turn(bid.target, self.mailbox, Some(Arc::clone(meters)), bid.cost)?;
        Ok(Turn { bid, meters, deferral })
    }
}

/// A thread's place behind messages that were sent before.
#[derive(Debug)]
#[must_use]
pub struct Turn<'a> {
    bid: Bid<'a>,
    meters: &'a [Arc<Meter>],
    deferral: Deferral,
}

impl Turn<'_> {
    /// Waits for it, or, with `look`, looks. Only the main thread is `interruptible`.
    pub fn wait(&self, look: bool, interruptible: bool) -> Waited {
        self.bid.runtime.wait_completion(&self.deferral.done, None, self.bid.until, look, interruptible, None)
    }

    /// The thread waits no longer. If it has had its turn, whether its message is counted; `None` if it never will. One that
    /// was `interrupted` sends nothing, and gives back what was counted.
    #[must_use]
    pub fn leave(self, interrupted: bool) -> Option<bool> {
        let Self { bid, meters, deferral } = self;
        if !deferral.done.is_done() && bid.runtime.take_back(&deferral) {
            return None;
        }
        // It may have come at the very last moment.
        let counted = deferral.done.fate() == Some(Fate::Status(1));
        if interrupted && counted {
            bid.runtime.refund_all(meters, bid.cost);
        }
        Some(counted)
    }
}

impl Outlet {
    /// What has to happen before a value of so many bytes may be sent by this port to `target`, its owner. `own` is as
    /// [`Bid::own`].
    pub fn admission<'a>(&'a self, target: &'a Arc<Target>, said: &Said<'_>, bytes: usize, own: bool) -> Admission<'a> {
        let Some(mailbox) = self.counted().filter(|_| self.is_open()) else { return Admission::Free };
        if said.error && matches!(self.way(), Way::Response { .. }) {
            // How a call has failed waits for no room; but it overtakes nothing.
            let is_behind = self.runtime().behind(target, mailbox).is_some();
            return if is_behind { Admission::Later(Later::default()) } else { Admission::Free };
        }
        let cost = self.cost(said, bytes);
        Admission::Bid(Bid { runtime: self.runtime(), target, cost, block: true, until: None, own })
    }
}
