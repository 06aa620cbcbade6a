//! Who may look into jobs.

use super::ends::PacketEnd;
use super::pump::Over;
use super::{Answerer, Visits};
use crate::greeting::{GREETING, hang_up, refuse, say};
use crate::tls::{Identity, PeerFacts, TlsStream};
use mesh_proto::hosts::{Look, PacketDecoder, Refusal, Refuse};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

/// The most visitors of one agent, including those who have not said yet what they want.
const MOST: usize = 32;
/// The answer about a job that this host has no part in.
pub(crate) const NO_SUCH_JOB: &str = "there is no such job here, or it has ended";

/// A visitor's place, as long as it is held.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes a place, if one is free.
    pub(crate) fn take(taken: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |n: usize| (n < MOST).then_some(n + 1);
        taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        Some(Self(Arc::clone(taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Tells a visitor that there is no place, without waiting.
pub(crate) fn turn_away(mut stream: TlsStream) {
    let text = format!("{MOST} others, the maximum, are looking into jobs through this host; try again later");
    let _ = say(&mut stream, &Refuse { code: Refusal::Busy, text }.packet(0), Instant::now());
    hang_up(stream);
}

/// The jobs that a visitor may choose from, and how to get into one.
pub(crate) trait Jobs {
    /// The processes of the jobs' gateways.
    type Process: Answerer;

    /// The jobs.
    fn list(&self) -> Vec<u64>;
    /// The way into a job.
    fn find(&self, job: u64) -> Option<Arc<Visits<Self::Process>>>;
}

/// Answers a visitor who has dialed, until they leave.
pub(crate) fn receive(
    jobs: &impl Jobs,
    look: Look,
    mut stream: TlsStream,
    decoder: PacketDecoder,
    (facts, identity): (&PeerFacts, &Identity),
    tell: &dyn Fn(&str),
) {
    let until = Instant::now() + GREETING;
    if !facts.role.may_look() {
        let text = format!("a {}'s certificate does not let anybody look into jobs", facts.role);
        tell(&format!("somebody was refused: {text}"));
        return refuse(stream, Refusal::NotAllowed, text);
    }
    if look.job == 0 {
        let _ = say(&mut stream, &Look::welcome(&jobs.list()).packet(0), until);
        return hang_up(stream);
    }
    let Some(visits) = jobs.find(look.job) else {
        return refuse(stream, Refusal::NoSuchJob, NO_SUCH_JOB.to_owned());
    };
    if say(&mut stream, &Look::welcome(&[]).packet(0), until).is_ok() {
        let holds = || {
            let why = identity.check_peer(facts, SystemTime::now()).err();
            why.map_or(Ok(()), |why| {
                Err(Over::refused(Refusal::NotAllowed, format!("your certificate is no longer valid: {why}")))
            })
        };
        visits.be_visited(PacketEnd::new(stream, decoder), holds);
    }
}
