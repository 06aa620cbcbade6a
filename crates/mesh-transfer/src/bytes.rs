//! Reading untrusted bytes, with numbers in little-endian order.

use crate::error::TransferError;
use std::net::IpAddr;

/// Takes values off the front. `damaged` makes the error for missing bytes or invalid values.
pub(crate) struct Reader<'a> {
    pub(crate) rest: &'a [u8],
    damaged: fn() -> TransferError,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(rest: &'a [u8], damaged: fn() -> TransferError) -> Self {
        Self { rest, damaged }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], TransferError> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(self.damaged)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], TransferError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or_else(self.damaged)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, TransferError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, TransferError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, TransferError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, TransferError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads an address written by [`put_ip`].
    pub(crate) fn ip(&mut self) -> Result<IpAddr, TransferError> {
        match self.u8()? {
            4 => Ok(IpAddr::from(self.array::<4>()?)),
            6 => Ok(IpAddr::from(self.array::<16>()?)),
            _ => Err((self.damaged)()),
        }
    }

    /// Fails if bytes are left.
    pub(crate) fn end(&self) -> Result<(), TransferError> {
        if self.rest.is_empty() { Ok(()) } else { Err((self.damaged)()) }
    }
}

/// Writes the version of an address, and its bytes.
pub(crate) fn put_ip(out: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => out.extend([4].into_iter().chain(ip.octets())),
        IpAddr::V6(ip) => out.extend([6].into_iter().chain(ip.octets())),
    }
}

/// Returns `N` bytes of a message from `at` on. Panics if there are fewer: for messages of fixed length.
pub(crate) fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

/// Returns the 32-bit number at `at` in a message of fixed length.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(part(bytes, at))
}

/// Returns the 64-bit number at `at` in a message of fixed length.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(part(bytes, at))
}
