//! What gateways tell each other in the bodies of greetings: short lists of numbers and texts.

use bytes::Bytes;
use mesh_proto::HostNo;
use std::time::Duration;

/// Numbers and texts, one after the other.
#[derive(Debug, Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn number(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn text(mut self, value: &str) -> Self {
        self = self.number(value.len() as u64);
        self.0.extend_from_slice(value.as_bytes());
        self
    }

    pub(super) fn done(self) -> Bytes {
        self.0.into()
    }
}

/// Reads what a [`Writer`] has written; whatever else it is given, it finds nothing.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl Reader<'_> {
    pub(super) fn number(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    pub(super) fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    pub(super) fn text(&mut self) -> Option<String> {
        let len = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

/// What a host is told when it is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attachment {
    /// The controller's call that its reply answers.
    pub(super) call: u64,
    /// Where the group that it is attached with begins, how many hosts are in it, and to how many each relays.
    pub(super) base: HostNo,
    pub(super) count: u32,
    pub(super) fan_out: u32,
    /// After how much silence a host is dead.
    pub(super) window: Duration,
    /// How long a host that does not listen yet is waited for by the one above it.
    pub(super) patience: Duration,
    /// Whether it has dialed the controller itself, and so is its child.
    pub(super) dialed: bool,
    /// The hosts below it, and where they can be reached.
    pub(super) below: Vec<(HostNo, String)>,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Attachment {
    pub(super) fn encode(&self) -> Bytes {
        let writer = Writer::default()
            .number(self.call)
            .number(u64::from(self.base))
            .number(u64::from(self.count))
            .number(u64::from(self.fan_out))
            .number(micros(self.window))
            .number(micros(self.patience))
            .number(u64::from(self.dialed))
            .number(self.below.len() as u64);
        let all = self.below.iter();
        all.fold(writer, |writer, (host, address)| writer.number(u64::from(*host)).text(address)).done()
    }

    pub(super) fn decode(raw: &[u8]) -> Option<Self> {
        let mut reader = Reader(raw);
        let mut told = Self {
            call: reader.number()?,
            base: reader.small()?,
            count: reader.small()?,
            fan_out: reader.small()?,
            window: Duration::from_micros(reader.number()?),
            patience: Duration::from_micros(reader.number()?),
            dialed: reader.number()? != 0,
            below: Vec::new(),
        };
        for _ in 0..reader.number()? {
            let host = reader.small()?;
            told.below.push((host, reader.text()?));
        }
        Some(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_survives_the_way_and_a_piece_of_one_is_none() {
        let told = Attachment {
            call: 7,
            base: 1,
            count: 3,
            fan_out: 2,
            window: Duration::from_millis(1500),
            patience: Duration::from_secs(30),
            dialed: false,
            below: vec![(3, "tcp://b3:7000".to_owned()), (9, String::new())],
        };
        let raw = told.encode();
        assert_eq!(Attachment::decode(&raw), Some(told));
        assert!((0..raw.len()).all(|cut| Attachment::decode(&raw[..cut]).is_none()));
    }
}
