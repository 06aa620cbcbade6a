//! What travels instead of the memory: a few hundred bytes that name it, its owner, and the transports that reach it.
//!
//! HDL-1: bytes that `encode` would not write are refused, whoever sent them. A handle holds no memory addresses, so a
//! forged one at most names what does not exist.

use crate::bytes::Reader;
use crate::error::TransferError;

const MAGIC: [u8; 4] = *b"MXH\x01";
/// Longer handles are refused unread.
pub const MAX_HANDLE: usize = 4096;
/// The most transports that a handle may name.
pub(crate) const MAX_SECTIONS: usize = 16;
const MAX_NAME: usize = 64;
/// The section that belongs to no transport: why some transports do not offer the memory.
pub(crate) const REFUSALS: &str = "-";
/// The longest of those reasons.
const MAX_REASON: usize = 200;
const MAX_HOST: usize = 64;
const WRITABLE: u8 = 1;

/// A random number that identifies one incarnation of one process.
pub type RealmId = [u8; 16];
/// A random number that each operation must show.
pub type Token = [u8; 16];

/// A transport that may reach the memory, with what it needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// The transport's name.
    pub name: String,
    /// Read only by the transport of that name.
    pub data: Vec<u8>,
}

/// Names memory of a process. Anyone who has one may use the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The incarnation of the owner.
    pub realm: RealmId,
    /// The owner's machine since its last boot.
    pub boot: [u8; 16],
    /// The owner's pid, for people.
    pub pid: u32,
    /// The owner's machine, for people.
    pub host: String,
    /// Shown for each operation.
    pub token: Token,
    /// The slot in the owner's table of exports.
    pub slot: u32,
    /// How often the slot has been used; never 0.
    pub generation: u32,
    /// The length of the whole export.
    pub length: u64,
    /// Where in the export this buffer begins.
    pub start: u64,
    /// The length of this buffer.
    pub len: u64,
    /// Whether it may be written to.
    pub writable: bool,
    /// The transports by which the owner can be reached, in its order.
    pub sections: Vec<Section>,
}

impl Handle {
    /// The same memory, narrowed to `len` bytes from `start` on, relative to this buffer.
    pub fn slice(&self, start: u64, len: u64) -> Result<Self, TransferError> {
        self.check(start, len)?;
        Ok(Self { start: self.start + start, len, ..self.clone() })
    }

    /// Whether `len` bytes at `offset` lie inside this buffer.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), TransferError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(TransferError::invalid(format!(
                "offset {offset} and length {len} must lie inside the buffer, which has {}",
                crate::error::Bytes(self.len)
            ))),
        }
    }

    /// What that transport needs to know.
    pub fn section(&self, name: &str) -> Option<&[u8]> {
        self.sections.iter().find(|section| section.name == name).map(|section| section.data.as_slice())
    }

    /// Why a transport does not offer the memory, if the owner says so.
    pub fn refusal(&self, name: &str) -> Option<String> {
        let said = std::str::from_utf8(self.section(REFUSALS)?).ok()?;
        let why = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))?;
        Some(why.chars().filter(|letter| !letter.is_control()).collect())
    }

    /// The owner in words, for errors.
    pub fn owner(&self) -> String {
        format!("pid {} on host {}", self.pid, self.host)
    }

    /// Encodes it as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        out.extend_from_slice(&MAGIC);
        out.push(if self.writable { WRITABLE } else { 0 });
        out.extend_from_slice(&self.realm);
        out.extend_from_slice(&self.boot);
        out.extend_from_slice(&self.pid.to_le_bytes());
        out.extend_from_slice(&self.token);
        out.extend_from_slice(&self.slot.to_le_bytes());
        out.extend_from_slice(&self.generation.to_le_bytes());
        for number in [self.length, self.start, self.len] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let host = cut(&self.host, MAX_HOST).as_bytes();
        out.push(host.len() as u8);
        out.extend_from_slice(host);
        out.push(self.sections.len() as u8);
        for section in &self.sections {
            out.push(section.name.len() as u8);
            out.extend_from_slice(section.name.as_bytes());
            out.extend_from_slice(&(section.data.len() as u16).to_le_bytes());
            out.extend_from_slice(&section.data);
        }
        out
    }

    /// Decodes bytes that anybody may have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        if bytes.len() > MAX_HANDLE {
            return Err(bad(format!("it has {} bytes, more than the limit of {MAX_HANDLE}", bytes.len())));
        }
        let mut rest = Reader::new(bytes, || bad("it is cut off"));
        if rest.array::<4>()? != MAGIC {
            return Err(bad("it does not begin like a handle of this version"));
        }
        let flags = rest.u8()?;
        if flags & !WRITABLE != 0 {
            return Err(bad(format!("unknown flags {flags:#x}")));
        }
        let handle = Self {
            writable: flags & WRITABLE != 0,
            realm: rest.array()?,
            boot: rest.array()?,
            pid: rest.u32()?,
            token: rest.array()?,
            slot: rest.u32()?,
            generation: rest.u32()?,
            length: rest.u64()?,
            start: rest.u64()?,
            len: rest.u64()?,
            host: text(&mut rest, MAX_HOST)?,
            sections: sections(&mut rest)?,
        };
        if !rest.rest.is_empty() {
            return Err(bad(format!("{} bytes follow its end", rest.rest.len())));
        }
        if handle.generation == 0 {
            return Err(bad("generation 0 is never used"));
        }
        match handle.start.checked_add(handle.len) {
            Some(end) if end <= handle.length => Ok(handle),
            _ => Err(bad("its window does not lie inside the memory")),
        }
    }
}

/// Compares in constant time, so that nobody can guess a token byte by byte.
pub(crate) fn is_same(a: &Token, b: &Token) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b))) == 0
}

/// Whether this may be a transport's name.
pub fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain)
}

fn bad(why: impl std::fmt::Display) -> TransferError {
    TransferError::invalid(format!("these bytes are not a buffer's handle: {why}"))
}

fn text(rest: &mut Reader<'_>, limit: usize) -> Result<String, TransferError> {
    let len = usize::from(rest.u8()?);
    if len > limit {
        return Err(bad("a name in it is too long"));
    }
    let text = std::str::from_utf8(rest.take(len)?).map_err(|_| bad("a name in it is not text"))?;
    Ok(text.to_owned())
}

fn sections(rest: &mut Reader<'_>) -> Result<Vec<Section>, TransferError> {
    let count = usize::from(rest.u8()?);
    if count > MAX_SECTIONS {
        return Err(bad("it names too many transports"));
    }
    let mut found: Vec<Section> = Vec::with_capacity(count);
    for _ in 0..count {
        let name = text(rest, MAX_NAME)?;
        if !is_name(&name) || found.iter().any(|other| other.name == name) {
            return Err(bad("it names a transport twice, or by an invalid name"));
        }
        let len = usize::from(rest.u16()?);
        found.push(Section { name, data: rest.take(len)?.to_vec() });
    }
    Ok(found)
}

/// A line of the section of refusals: why a transport does not offer some memory.
pub(crate) fn refusal(name: &str, why: &str) -> String {
    format!("{name}: {}\n", cut(&why.replace('\n', " "), MAX_REASON))
}

/// Cuts a text to at most `most` bytes.
fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
