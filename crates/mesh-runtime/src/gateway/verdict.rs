//! What gateways report of hosts, and what the controller says of them. Whatever is decided by it is a code; texts are for
//! people alone.

use mesh_proto::hosts::{Fate, Standing};
use mesh_proto::{Exit, Frame, Header, HostNo, Kind, Part, ProcAddr, Target, flags};
use std::fmt;

/// What a host that relays for another has seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// It is heard again.
    Well,
    /// It is silent.
    Suspect,
    /// It will not come back.
    Dead {
        /// Why, for the program.
        fate: Fate,
        /// Why, for people.
        why: String,
    },
}

impl Report {
    pub(super) fn dead(fate: Fate, why: impl Into<String>) -> Self {
        Self::Dead { fate, why: why.into() }
    }

    pub(super) fn frame(&self, me: ProcAddr, host: HostNo) -> Frame {
        let mut header = Header::new(Kind::HostLost, me, ProcAddr::CONTROLLER);
        header.actor = u64::from(host);
        let (fate, why) = match self {
            Self::Well => return standing_frame(Standing::Live, header, None),
            Self::Suspect => return standing_frame(Standing::Suspect, header, None),
            Self::Dead { fate, why } => {
                header.flags = flags::DEAD;
                (fate, why)
            }
        };
        Frame::build(header, None, why.as_bytes(), &[code(fate.code())])
    }

    pub(super) fn read(frame: &Frame) -> Self {
        if frame.header.flags & flags::DEAD != 0 {
            return Self::dead(Fate::of(code_in(frame).into()), String::from_utf8_lossy(frame.name()));
        }
        match standing_in(frame) {
            Standing::Live => Self::Well,
            _ => Self::Suspect,
        }
    }
}

/// A code as a part of a frame: what is in the header of a cast differs from receiver to receiver.
fn code(code: u8) -> Part {
    Part::Inline(bytes::Bytes::copy_from_slice(&[code]))
}

fn code_in(frame: &Frame) -> u8 {
    match frame.parts().as_deref() {
        Ok([Part::Inline(code), ..]) => code.first().copied().unwrap_or_default(),
        _ => 0,
    }
}

/// A frame that says that a host is live or suspect; nobody is told of the death of a host by that alone.
pub(super) fn standing_frame(standing: Standing, header: Header, target: Option<&Target>) -> Frame {
    Frame::build(header, target, b"", &[code(u8::from(standing != Standing::Live))])
}

/// What [`standing_frame`] says.
pub(super) fn standing_in(frame: &Frame) -> Standing {
    if code_in(frame) == 0 { Standing::Live } else { Standing::Suspect }
}

/// Why a host is dead, as everybody hears of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    /// For the program.
    pub(super) fate: Fate,
    /// What people call the host; empty where there is none to name.
    pub(super) label: String,
    /// For people.
    pub(super) why: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fate, label, why } = self;
        match fate {
            _ if label.is_empty() => f.write_str(why),
            Fate::Released => write!(f, "its host ({label}) was let go: {why}"),
            Fate::NotAttached | Fate::NotAuthenticated => write!(f, "its host ({label}) cannot be used: {why}"),
            _ => write!(f, "its host ({label}) is dead: {why}"),
        }
    }
}

impl Verdict {
    /// Of a host that is not part of the job.
    pub(super) fn absent(why: String) -> Self {
        Self { fate: Fate::Absent, label: String::new(), why }
    }

    /// The notice of it.
    pub(super) fn frame(&self, me: ProcAddr, to: ProcAddr, target: Option<&Target>, host: HostNo) -> Frame {
        let mut header = Header::new(Kind::HostDown, me, to);
        header.actor = u64::from(host);
        let label = Part::Inline(self.label.clone().into());
        Frame::build(header, target, self.why.as_bytes(), &[code(self.fate.code()), label])
    }

    pub(super) fn read(frame: &Frame) -> Self {
        let label = match frame.parts().as_deref() {
            Ok([_, Part::Inline(label)]) => String::from_utf8_lossy(label).into_owned(),
            _ => String::new(),
        };
        let why = String::from_utf8_lossy(frame.name()).into_owned();
        Self { fate: Fate::of(code_in(frame).into()), label, why }
    }

    /// The end of a proc of that host.
    pub(super) fn ended(&self) -> mesh_proto::Ended {
        let orderly = self.fate == Fate::Released;
        mesh_proto::Ended { exit: Exit::Host(self.fate), orderly, ..crate::agent::unmade(self.to_string()) }
    }
}

/// Why a host was dialed in vain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missed {
    /// For the program.
    pub(super) fate: Fate,
    /// For people.
    pub(super) why: String,
    /// It is certainly not there, or not any more: trying again is of no use.
    pub(super) gone: bool,
}

impl Missed {
    /// It may be reached another time.
    pub(super) fn for_now(why: impl Into<String>) -> Self {
        Self { fate: Fate::Unreachable, why: why.into(), gone: false }
    }

    /// It never will.
    pub(super) fn for_good(fate: Fate, why: impl Into<String>) -> Self {
        Self { fate, why: why.into(), gone: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_verdicts_arrive_as_they_were_sent() {
        let me = ProcAddr::agent(3);
        for report in
            [Report::Well, Report::Suspect, Report::dead(Fate::Silent, "it is silent"), Report::dead(Fate::Left, "")]
        {
            assert_eq!(Report::read(&report.frame(me, 7)), report);
        }
        let verdict =
            Verdict { fate: Fate::Expelled, label: "b7, tcp://b7:1".to_owned(), why: "x is dead: y".to_owned() };
        let cast = verdict.frame(me, ProcAddr::CONTROLLER, Some(&super::super::agents(1, 9)), 7);
        assert_eq!(Verdict::read(&cast.for_one(ProcAddr::agent(4), 3)), verdict, "whoever of many it is for");
        let suspect = standing_frame(Standing::Suspect, cast.header, Some(&super::super::agents(1, 9)));
        assert_eq!(standing_in(&suspect.for_one(ProcAddr::agent(1), 0)), Standing::Suspect);
        let frame = verdict.frame(me, ProcAddr::CONTROLLER, None, 7);
        assert_eq!((Verdict::read(&frame), frame.header.actor), (verdict.clone(), 7));
        assert_eq!(verdict.to_string(), "its host (b7, tcp://b7:1) is dead: x is dead: y");
        assert_eq!(verdict.ended().exit, Exit::Host(Fate::Expelled));
        assert_eq!(Verdict::absent("who?".to_owned()).to_string(), "who?");
    }
}
