//! Numbers, texts and lists as bytes: the building blocks of control frames' bodies.

use crate::ProcAddr;
use bytes::Bytes;
use std::time::Duration;

/// Appends values, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn byte(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(crate) fn small(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn signed(mut self, value: i32) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn number(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn bytes(mut self, value: &[u8]) -> Self {
        self = self.number(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    pub(crate) fn text(self, value: &str) -> Self {
        self.bytes(value.as_bytes())
    }

    pub(crate) fn addr(self, addr: ProcAddr) -> Self {
        self.number(addr.mesh).small(addr.rank).small(addr.host)
    }

    /// In microseconds.
    pub(crate) fn time(self, time: Duration) -> Self {
        self.number(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    }

    pub(crate) fn list<T>(self, items: &[T], write: impl Fn(Self, &T) -> Self) -> Self {
        items.iter().fold(self.number(items.len() as u64), write)
    }

    pub(crate) fn done(self) -> Bytes {
        self.0.into()
    }
}

/// Reads what a [`Writer`] wrote. From other bytes it reads nothing, or something else, but it never panics.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(raw: &'a [u8]) -> Self {
        Self(raw)
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub(crate) fn small(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*word))
    }

    pub(crate) fn signed(&mut self) -> Option<i32> {
        let (word, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(i32::from_le_bytes(*word))
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub(crate) fn addr(&mut self) -> Option<ProcAddr> {
        Some(ProcAddr { mesh: self.number()?, rank: self.small()?, host: self.small()? })
    }

    pub(crate) fn time(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_micros)
    }

    /// As many items as the list claims. Allocates for items that exist, not for claimed ones.
    pub(crate) fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut items = Vec::new();
        for _ in 0..self.number()? {
            items.push(read(self)?);
        }
        Some(items)
    }
}

/// The `N` bytes at `at`, which must exist.
#[inline]
pub(crate) fn part<const N: usize>(raw: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&raw[at..at + N]);
    part
}

#[inline]
pub(crate) fn u16_at(raw: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(part(raw, at))
}

#[inline]
pub(crate) fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(part(raw, at))
}

#[inline]
pub(crate) fn u64_at(raw: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(part(raw, at))
}
