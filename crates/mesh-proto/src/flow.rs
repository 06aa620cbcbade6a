//! How much a sender may have in flight to one mailbox.
//!
//! The sender's [`Meter`] counts the bytes that it has sent and that are not yet credited, against a *window*. The
//! receiver's [`Ledger`] counts what has arrived and what was handled, returns bytes as [`Credit`]s, a quarter of the
//! window at a time, and sets the width of the window: a mailbox has one budget for all its senders.
//!
//! FLW-1: a message is let through if it fits the window, or if less than a quarter of the window is in flight. So a
//! message larger than any window still goes, alone; and since a receiver that has handled everything holds back less
//! than a quarter, no sender waits for a credit that never comes.
//!
//! FLW-2: every sender begins with its own small window ([`INITIAL_WINDOW`]), which a stopped process cannot widen.
//! Wider windows come out of the mailbox's budget, which bounds what is promised and queued above the small ones.
//!
//! FLW-3: a meter ends with its mailbox. Nothing waits at an ended meter, and what is sent then fails like any message
//! to the dead.
//!
//! Credits must reach the sender in the order in which the ledger gave them: both ends must agree on the window.

use crate::frame::flags;
use crate::messages::MessageError;
use crate::{ActorId, Frame, Header, Kind, ProcAddr};
use rustc_hash::FxHashMap;

/// In questions and their answers: this is about reading replies. No actor, port or stream has this id.
pub const REPLIES: ActorId = 1 << 63;

/// The same for the arguments of spawns.
pub const SPAWNS: ActorId = u64::MAX;

/// How much every sender may have in flight before it has heard from the mailbox.
pub const INITIAL_WINDOW: u64 = 1 << 20;

/// Windows are multiples of this, as frames express them.
const UNIT: u64 = 1024;
const WIDEST: u64 = UNIT * u32::MAX as u64;

/// The receiver holds back less than this, and a sender with less than this in flight never waits.
const fn quarter(window: u64) -> u64 {
    let quarter = window / 4;
    if quarter == 0 { 1 } else { quarter }
}

/// A mailbox's message to one of its senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Bytes handled since the last credit.
    pub handled: u64,
    /// The width of the window from now on.
    pub window: u64,
    /// The mailbox is gone, and sends no more credits.
    pub last: bool,
}

impl Credit {
    /// The credit of a mailbox that has ended, or never existed.
    pub const LAST: Self = Self { handled: 0, window: INITIAL_WINDOW, last: true };

    /// Encodes this as a frame from the mailbox's process to the sender's.
    #[must_use]
    pub fn frame(&self, mailbox: ActorId, me: ProcAddr, sender: ProcAddr) -> Frame {
        Frame::build(Flow::Credit { mailbox, credit: *self }.header(me, sender), None, b"", &[])
    }

    /// A sender's question to a mailbox: return all handled bytes, however few.
    #[must_use]
    pub fn question(mailbox: ActorId, me: ProcAddr, receiver: ProcAddr) -> Frame {
        Frame::build(Flow::Question { mailbox }.header(me, receiver), None, b"", &[])
    }
}

/// How far a process has read what another process sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What was read: [`REPLIES`] or [`SPAWNS`].
    pub what: ActorId,
    /// The sender's count of bytes.
    pub count: u64,
}

impl Progress {
    /// The sender's question, which follows the replies or spawns that it is about.
    #[must_use]
    pub fn question(self, me: ProcAddr, reader: ProcAddr) -> Frame {
        frame(Flow::Asks(self), me, reader)
    }

    /// The reader's answer: it has read so far.
    #[must_use]
    pub fn answer(self, me: ProcAddr, sender: ProcAddr) -> Frame {
        frame(Flow::HasRead(self), me, sender)
    }

    /// The answer on behalf of a reader that has ended.
    #[must_use]
    pub fn last(self, reader: ProcAddr, sender: ProcAddr) -> Frame {
        frame(Flow::ReaderEnded(self), reader, sender)
    }
}

fn frame(said: Flow, from: ProcAddr, to: ProcAddr) -> Frame {
    Frame::build(said.header(from, to), None, b"", &[])
}

/// What a mailbox and one of its senders tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// From the mailbox.
    Credit {
        /// Whose mailbox: an actor's, a channel's, or a streamed call's; 0 for the process itself.
        mailbox: ActorId,
        /// The credit.
        credit: Credit,
    },
    /// From the sender: return all handled bytes, however few.
    Question {
        /// The mailbox.
        mailbox: ActorId,
    },
    /// From a sender of replies or spawns, after them: how far have they been read?
    Asks(Progress),
    /// From their reader: so far.
    HasRead(Progress),
    /// On behalf of their reader, which has ended.
    ReaderEnded(Progress),
}

impl Flow {
    /// Encodes this as a header; the frame has nothing else.
    #[must_use]
    pub fn header(&self, from: ProcAddr, to: ProcAddr) -> Header {
        let mut header = Header::new(Kind::Credit, from, to);
        match self {
            Self::Credit { mailbox, credit } => {
                (header.actor, header.call) = (*mailbox, credit.handled);
                header.index = u32::try_from(credit.window / UNIT).unwrap_or(u32::MAX);
                header.flags = if credit.last { flags::LAST } else { 0 };
            }
            Self::Question { mailbox } => {
                header.actor = *mailbox;
                header.flags = flags::QUESTION;
            }
            Self::Asks(progress) | Self::HasRead(progress) | Self::ReaderEnded(progress) => {
                (header.actor, header.call) = (progress.what, progress.count);
                header.flags = match self {
                    Self::Asks(_) => flags::QUESTION,
                    Self::ReaderEnded(_) => flags::LAST,
                    _ => 0,
                };
            }
        }
        header
    }

    /// Reads a header.
    ///
    /// # Errors
    /// If no process makes such a header.
    pub fn read(header: &Header) -> Result<Self, MessageError> {
        let bits = header.flags & !flags::OF_FRAMES;
        let mailbox = header.actor;
        let refused = |what| Err(MessageError { kind: header.kind, what });
        if header.kind != Kind::Credit {
            return refused("is read as another kind");
        }
        if matches!(mailbox, REPLIES | SPAWNS) {
            let progress = Progress { what: mailbox, count: header.call };
            return match bits {
                _ if header.index != 0 => refused("opens a window of what has none"),
                flags::QUESTION => Ok(Self::Asks(progress)),
                flags::LAST => Ok(Self::ReaderEnded(progress)),
                0 => Ok(Self::HasRead(progress)),
                _ => refused("has a flag that means nothing there"),
            };
        }
        if bits == flags::QUESTION {
            if (header.call, header.index) != (0, 0) {
                return refused("asks and answers in one");
            }
            return Ok(Self::Question { mailbox });
        }
        if bits & !flags::LAST != 0 {
            return refused("has a flag that means nothing there");
        }
        let window = u64::from(header.index) * UNIT;
        Ok(Self::Credit { mailbox, credit: Credit { handled: header.call, window, last: bits != 0 } })
    }
}

/// The sender's half: what is in flight to one mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    outstanding: u64,
    window: u64,
    ended: bool,
}

impl Default for Meter {
    fn default() -> Self {
        Self { outstanding: 0, window: INITIAL_WINDOW, ended: false }
    }
}

/// A [`Meter`]'s answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may go, and was counted.
    Counted,
    /// It may go uncounted: the mailbox is gone.
    Free,
    /// It must wait.
    Full,
}

impl Meter {
    /// Whether a message of `cost` bytes may go (FLW-1).
    #[must_use]
    pub fn has_room(&self, cost: u64) -> bool {
        self.ended
            || self.outstanding < quarter(self.window)
            || self.outstanding.checked_add(cost).is_some_and(|sum| sum <= self.window)
    }

    /// Counts a message that is about to be sent, if it may go.
    pub fn admit(&mut self, cost: u64) -> Admission {
        if self.ended {
            Admission::Free
        } else if self.has_room(cost) {
            self.outstanding = self.outstanding.saturating_add(cost);
            Admission::Counted
        } else {
            Admission::Full
        }
    }

    /// A counted message is not sent after all.
    pub fn refund(&mut self, cost: u64) {
        self.outstanding = self.outstanding.saturating_sub(cost);
    }

    /// The mailbox sent a credit.
    pub fn on_credit(&mut self, credit: Credit) {
        self.refund(credit.handled);
        if credit.last {
            self.end();
        } else {
            self.window = credit.window;
        }
    }

    /// The mailbox is gone (FLW-3).
    pub fn end(&mut self) {
        self.ended = true;
        self.outstanding = 0;
    }

    /// Bytes sent and not yet credited.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// How many bytes may be in flight.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Whether the mailbox is gone.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

/// With this many senders, those with nothing here are forgotten; they may come back.
const MANY: usize = 1024;

#[derive(Clone, Copy, Debug)]
struct Account {
    /// Arrived, but not handled.
    queued: u64,
    /// Handled, but not returned.
    unsaid: u64,
    /// The window that the sender was last told.
    window: u64,
}

/// The receiver's half: what has arrived in one mailbox, from whom.
#[derive(Debug)]
pub struct Ledger {
    accounts: FxHashMap<ProcAddr, Account>,
    /// Forget idle senders at this many: some of them have ended, and nobody says so.
    sweep_at: usize,
    /// What every sender gets without asking.
    base: u64,
    /// What there is for wider windows.
    pot: u64,
    /// How much of the pot is promised, or taken by queued bytes above the promises.
    held: u64,
    /// Senders with a wider window.
    wide: usize,
    /// Nothing can be taken back: every sender has at most its share, and uses it. This saves looking through a
    /// thousand senders on every message.
    taken: bool,
    closed: bool,
}

impl Ledger {
    /// The ledger of a mailbox whose senders have `budget` bytes together.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        let budget = (budget.clamp(UNIT, WIDEST) / UNIT) * UNIT;
        let base = budget.min(INITIAL_WINDOW);
        let pot = budget - base;
        Self {
            accounts: FxHashMap::default(),
            sweep_at: MANY,
            base,
            pot,
            held: 0,
            wide: 0,
            taken: false,
            closed: false,
        }
    }

    /// Bytes that have arrived but were not handled.
    #[must_use]
    pub fn queued(&self) -> u64 {
        self.accounts.values().map(|account| account.queued).sum()
    }

    /// How many senders are known.
    #[must_use]
    pub fn senders(&self) -> usize {
        self.accounts.len()
    }

    /// How much of the pot is taken.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// A message has arrived.
    pub fn on_arrived(&mut self, sender: ProcAddr, cost: u64, mut tell: impl FnMut(ProcAddr, Credit)) {
        if self.closed {
            return;
        }
        if self.accounts.len() >= self.sweep_at {
            self.forget_idle(&mut tell);
        }
        let base = self.base;
        let account = self.accounts.entry(sender).or_insert_with(|| {
            if base < INITIAL_WINDOW {
                tell(sender, Credit { handled: 0, window: base, last: false });
            }
            Account { queued: 0, unsaid: 0, window: base }
        });
        let before = account.holds(base);
        account.queued = account.queued.saturating_add(cost);
        self.held = self.held - before + account.holds(base);
        if account.queued >= account.window / 2 {
            self.widen(sender, &mut tell);
        }
    }

    /// A message was handled, or dropped.
    pub fn on_handled(&mut self, sender: ProcAddr, cost: u64, mut tell: impl FnMut(ProcAddr, Credit)) {
        let base = self.base;
        let Some(account) = self.accounts.get_mut(&sender) else { return };
        let pressed = account.queued >= account.window / 2;
        let before = account.holds(base);
        account.queued = account.queued.saturating_sub(cost);
        account.unsaid = account.unsaid.saturating_add(cost);
        self.held = self.held - before + account.holds(base);
        if account.unsaid >= quarter(account.window) {
            tell(sender, account.say());
        }
        if account.queued == 0 && account.window > base {
            // A sender that was refused may take from this one now.
            self.taken = false;
        }
        if pressed {
            self.widen(sender, &mut tell);
        }
    }

    /// A sender asks for all its handled bytes.
    pub fn on_question(&mut self, sender: ProcAddr, mut tell: impl FnMut(ProcAddr, Credit)) {
        if self.closed {
            tell(sender, Credit::LAST);
            return;
        }
        let base = self.base;
        let Some(account) = self.accounts.get_mut(&sender) else {
            tell(sender, Credit { handled: 0, window: base, last: false });
            return;
        };
        if account.queued > 0 {
            tell(sender, account.say());
            return;
        }
        self.held -= account.holds(base);
        self.wide -= usize::from(account.window > base);
        account.window = base;
        tell(sender, account.say());
        self.accounts.remove(&sender);
    }

    /// The mailbox takes no more: every sender gets back what it has in flight (FLW-3).
    pub fn close(&mut self, mut tell: impl FnMut(ProcAddr, Credit)) {
        self.closed = true;
        for (sender, account) in self.accounts.drain() {
            tell(sender, Credit { handled: account.queued + account.unsaid, last: true, ..Credit::LAST });
        }
        self.held = 0;
        self.wide = 0;
    }

    fn forget_idle(&mut self, tell: &mut impl FnMut(ProcAddr, Credit)) {
        let base = self.base;
        self.accounts.retain(|addr, account| {
            if account.queued > 0 {
                return true;
            }
            self.held -= account.holds(base);
            self.wide -= usize::from(account.window > base);
            account.window = base;
            tell(*addr, account.say());
            false
        });
        self.sweep_at = MANY.max(2 * self.accounts.len());
    }

    /// The share of the pot for each of `n` senders with wide windows. It changes only when `n` passes a power of two,
    /// so that a thousand senders are not notified of every newcomer.
    fn share(&self, n: usize) -> u64 {
        (self.pot / n.max(1).next_power_of_two() as u64) / UNIT * UNIT
    }

    /// Widens a sender's window to its share, as far as the pot allows (FLW-2).
    fn widen(&mut self, sender: ProcAddr, tell: &mut impl FnMut(ProcAddr, Credit)) {
        let base = self.base;
        let Some(mine) = self.accounts.get(&sender).copied() else { return };
        let joins = usize::from(mine.window <= base);
        let mut share = self.share(self.wide + joins);
        if mine.window >= base + share {
            return;
        }
        let own = mine.holds(base);
        if self.held - own + share > self.pot && !self.taken {
            // First take from those who do not use what they have, then from those who have more than their share.
            for (addr, account) in &mut self.accounts {
                if *addr != sender && account.queued == 0 {
                    account.narrow(*addr, base, base, (&mut self.held, &mut self.wide), tell);
                }
            }
            share = self.share(self.wide + joins);
            for (addr, account) in &mut self.accounts {
                if *addr != sender {
                    account.narrow(*addr, base + share, base, (&mut self.held, &mut self.wide), tell);
                }
            }
        }
        if self.held - own + share > self.pot {
            self.taken = true;
            return;
        }
        self.taken = false;
        if let Some(account) = self.accounts.get_mut(&sender)
            && account.window < base + share
        {
            account.window = base + share;
            self.held = self.held - own + account.holds(base);
            self.wide += joins;
            tell(sender, account.say());
        }
    }
}

impl Account {
    /// What it takes of the pot: what was promised, or what is queued if that is more.
    fn holds(&self, base: u64) -> u64 {
        self.window.max(self.queued).saturating_sub(base)
    }

    /// Returns the credit that is due.
    fn say(&mut self) -> Credit {
        Credit { handled: std::mem::take(&mut self.unsaid), window: self.window, last: false }
    }

    /// Narrows the window to `window` if it is wider, and tells the sender.
    fn narrow(
        &mut self,
        addr: ProcAddr,
        window: u64,
        base: u64,
        (held, wide): (&mut u64, &mut usize),
        tell: &mut impl FnMut(ProcAddr, Credit),
    ) {
        if self.window > window {
            let before = self.holds(base);
            self.window = window;
            *held = *held - before + self.holds(base);
            *wide -= usize::from(window <= base);
            tell(addr, self.say());
        }
    }
}
