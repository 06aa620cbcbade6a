//! The bytes of the verbs transport: its part of a handle, and the handshake. All messages have a fixed length.
//!
//! VRB-1: both ends prove that they know the owner's door key before a queue pair is made. Every message that sets one
//! up is sealed with that key and its connection's nonces.

use super::scan::{Gid, Link, RAILS};
use crate::bytes::{Reader, part, u32_at};
use crate::door::{Protocol, SEAL, Side, Talk};
use crate::error::TransferError;
use crate::handle::Token;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The transport's name in handles.
pub(crate) const NAME: &str = "ibverbs";
const VERSION: u8 = 1;
const WRITABLE: u8 = 1;
/// VRB-1
pub(super) static PROTOCOL: Protocol = Protocol { magic: *b"MXV1", owner: b"server", client: b"client" };
pub(super) const CONNECT: usize = 29 + SEAL;
pub(super) const ANSWER: usize = 11 + SEAL;
/// Says that the client's queue pair is ready.
pub(super) const READY: u8 = b'R';
/// Asks whether an export is live.
pub(super) const ASK: u8 = b'A';
pub(super) const QUESTION: usize = 24;

/// One port of the owner, as in handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rail {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) link: Link,
    pub(super) mtu: u8,
    pub(super) rate: u32,
    pub(super) key: u32,
}

/// This transport's part of a handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Section {
    pub(super) writable: bool,
    /// The rail nearest to the memory.
    pub(super) nearest: usize,
    pub(super) door: SocketAddr,
    pub(super) key: Token,
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) slot: u32,
    pub(super) generation: u32,
    pub(super) rails: Vec<Rail>,
}

impl Section {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(61 + 28 * self.rails.len());
        out.push(VERSION);
        out.push((u8::from(self.writable) * WRITABLE) | ((self.nearest as u8 & 3) << 1));
        out.extend_from_slice(&self.door.port().to_le_bytes());
        let address = match self.door.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        out.extend_from_slice(&address.octets());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.address.to_le_bytes());
        out.extend_from_slice(&self.length.to_le_bytes());
        out.extend_from_slice(&self.slot.to_le_bytes());
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.push(self.rails.len() as u8);
        for rail in &self.rails {
            out.extend_from_slice(&rail.gid);
            out.extend_from_slice(&rail.lid.to_le_bytes());
            out.push(if rail.link == Link::InfiniBand { 1 } else { 2 });
            out.push(rail.mtu);
            out.extend_from_slice(&rail.rate.to_le_bytes());
            out.extend_from_slice(&rail.key.to_le_bytes());
        }
        out
    }

    /// Decodes bytes that anybody may have written; refuses those that `encode` would not write.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, TransferError> {
        let section = Self::read(bytes)?;
        if section.encode() == bytes { Ok(section) } else { Err(damaged()) }
    }

    fn read(bytes: &[u8]) -> Result<Self, TransferError> {
        let mut rest = Reader::new(bytes, damaged);
        let [version, flags] = rest.array()?;
        if version != VERSION || flags & !(WRITABLE | 6) != 0 {
            return Err(damaged());
        }
        let port = rest.u16()?;
        let ip = Ipv6Addr::from(rest.array::<16>()?).to_canonical();
        let key = rest.array()?;
        let (address, length) = (rest.u64()?, rest.u64()?);
        address.checked_add(length).ok_or_else(damaged)?;
        let (slot, generation, count) = (rest.u32()?, rest.u32()?, rest.u8()?);
        if !(1..=RAILS).contains(&usize::from(count)) {
            return Err(damaged());
        }
        let rails = (0..count).map(|_| Self::rail(&mut rest)).collect::<Result<Vec<Rail>, _>>()?;
        rest.end()?;
        let nearest = usize::from(flags >> 1);
        if nearest >= rails.len() {
            return Err(damaged());
        }
        Ok(Self {
            writable: flags & WRITABLE != 0,
            nearest,
            door: SocketAddr::new(ip, port),
            key,
            address,
            length,
            slot,
            generation,
            rails,
        })
    }

    fn rail(rest: &mut Reader<'_>) -> Result<Rail, TransferError> {
        let (gid, lid) = (rest.array()?, rest.u16()?);
        let [link, mtu] = rest.array()?;
        let link = match link {
            1 => Link::InfiniBand,
            2 => Link::Ethernet,
            _ => return Err(damaged()),
        };
        let (rate, key) = (rest.u32()?, rest.u32()?);
        if is_mtu(mtu) { Ok(Rail { gid, lid, link, mtu, rate, key }) } else { Err(damaged()) }
    }
}

/// The library's encoding: 1 for 256 bytes, 5 for 4096.
fn is_mtu(mtu: u8) -> bool {
    (1..=5).contains(&mtu)
}

/// One end of a queue pair, as the other end needs to know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct End {
    pub(super) number: u32,
    /// The number of its first packet.
    pub(super) first: u32,
    pub(super) mtu: u8,
    /// The most reads under way at once.
    pub(super) reads: u8,
}

impl End {
    fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&[self.mtu, self.reads]);
    }

    fn read(rest: &mut Reader<'_>) -> Option<Self> {
        let (number, first) = (rest.u32().ok()?, rest.u32().ok()?);
        let [mtu, reads] = rest.array().ok()?;
        let fits = number < 1 << 24 && first < 1 << 24 && is_mtu(mtu);
        fits.then_some(Self { number, first, mtu, reads })
    }
}

/// A client's request: a queue pair on a rail of the owner, to connect with the client's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connect {
    pub(super) rail: u8,
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) end: End,
}

impl Connect {
    pub(super) fn encode(&self, talk: &Talk) -> Vec<u8> {
        let mut out = vec![self.rail];
        out.extend_from_slice(&self.gid);
        out.extend_from_slice(&self.lid.to_le_bytes());
        self.end.encode(&mut out);
        talk.seal(Side::Client, out)
    }

    /// None if the sender has not proved that it knows the key, or the values are invalid.
    pub(super) fn decode(talk: &Talk, bytes: &[u8; CONNECT]) -> Option<Self> {
        let mut rest = Reader::new(talk.open(Side::Client, bytes)?, damaged);
        let (rail, gid, lid) = (rest.u8().ok()?, rest.array().ok()?, rest.u16().ok()?);
        Some(Self { rail, gid, lid, end: End::read(&mut rest)? })
    }
}

/// The owner's answer: its end, or none if it cannot.
pub(super) fn encode_answer(talk: &Talk, end: Option<End>) -> Vec<u8> {
    let mut out = vec![u8::from(end.is_none())];
    end.unwrap_or_default().encode(&mut out);
    talk.seal(Side::Owner, out)
}

/// The outer option is none if this is not the owner's answer.
pub(super) fn decode_answer(talk: &Talk, bytes: &[u8; ANSWER]) -> Option<Option<End>> {
    let mut rest = Reader::new(talk.open(Side::Owner, bytes)?, damaged);
    match rest.u8().ok()? {
        0 => End::read(&mut rest).map(Some),
        _ => Some(None),
    }
}

/// What the owner says of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Live,
    Gone,
    Refused,
}

impl Fate {
    pub(super) fn of(byte: u8) -> Option<Self> {
        [Self::Live, Self::Gone, Self::Refused].into_iter().find(|fate| *fate as u8 == byte)
    }
}

pub(super) fn encode_question(slot: u32, generation: u32, token: &Token) -> Vec<u8> {
    [[ASK].as_slice(), &slot.to_le_bytes(), &generation.to_le_bytes(), token].concat()
}

/// Decodes what follows the letter.
pub(super) fn decode_question(bytes: &[u8; QUESTION]) -> (u32, u32, Token) {
    (u32_at(bytes, 0), u32_at(bytes, 4), part(bytes, 8))
}

fn damaged() -> TransferError {
    TransferError::invalid("the handle's part for the transport ibverbs is damaged")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn section(rails: usize) -> Section {
        let rail = |n: usize| Rail {
            gid: [n as u8; 16],
            lid: n as u16,
            link: if n.is_multiple_of(2) { Link::Ethernet } else { Link::InfiniBand },
            mtu: 3,
            rate: 100_000,
            key: 7 + n as u32,
        };
        Section {
            writable: true,
            nearest: rails - 1,
            door: "10.77.0.1:4000".parse().unwrap(),
            key: [9; 16],
            address: 0x7f00_0000_1000,
            length: 4096,
            slot: 3,
            generation: 4,
            rails: (0..rails).map(rail).collect(),
        }
    }

    fn talk() -> Talk {
        Talk { protocol: &PROTOCOL, door: [1; 16], realm: [2; 16], client: [3; 16], owner: [4; 16] }
    }

    const END: End = End { number: 0x12_3456, first: 0xab_cdef, mtu: 3, reads: 16 };

    #[test]
    fn a_section_is_what_it_was_and_short() {
        for rails in 1..=RAILS {
            let section = section(rails);
            let bytes = section.encode();
            assert!(bytes.len() <= 256);
            assert_eq!(Section::decode(&bytes).unwrap(), section);
            assert!(Section::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(Section::decode(&[bytes, vec![0]].concat()).is_err());
        }
        let global = Section { door: "[2001:db8::1]:4000".parse().unwrap(), writable: false, ..section(1) };
        assert_eq!(Section::decode(&global.encode()).unwrap(), global);
    }

    /// The layout that the other engine reads and writes.
    #[test]
    fn a_section_is_laid_out_as_agreed() {
        let bytes = section(2).encode();
        assert_eq!(bytes.len(), 61 + 2 * 28);
        assert_eq!(bytes[..4], [1, 0b011, 0xa0, 0x0f]);
        assert_eq!(bytes[4..20], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1]);
        assert_eq!(bytes[20..36], [9; 16]);
        assert_eq!(bytes[36..44], 0x7f00_0000_1000_u64.to_le_bytes());
        assert_eq!(bytes[52..60], [3, 0, 0, 0, 4, 0, 0, 0]);
        assert_eq!(bytes[60], 2);
        assert_eq!(bytes[61 + 16..61 + 28], [0, 0, 2, 3, 0xa0, 0x86, 1, 0, 7, 0, 0, 0]);
    }

    #[test]
    fn a_section_that_makes_no_sense_is_refused() {
        let wrong = |at: usize, byte: u8| {
            let mut bytes = section(2).encode();
            bytes[at] = byte;
            Section::decode(&bytes).unwrap_err()
        };
        for (at, byte) in
            [(0, 2), (1, 8), (1, 0b101), (60, 0), (60, 3), (60, 5), (61 + 18, 3), (61 + 19, 0), (61 + 19, 6)]
        {
            wrong(at, byte);
        }
        let far = Section { address: u64::MAX - 10, ..section(1) };
        assert!(Section::decode(&far.encode()).is_err());
    }

    #[test]
    fn messages_are_sealed_for_one_connection_and_one_side() {
        let connect = Connect { rail: 1, gid: [5; 16], lid: 6, end: END };
        let bytes: [u8; CONNECT] = connect.encode(&talk()).try_into().unwrap();
        assert_eq!(Connect::decode(&talk(), &bytes), Some(connect));
        for at in 0..CONNECT {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(Connect::decode(&talk(), &changed), None, "byte {at}");
        }
        let later = Talk { owner: [8; 16], ..talk() };
        assert_eq!(Connect::decode(&later, &bytes), None);
        let stranger = Talk { door: [8; 16], ..talk() };
        assert_eq!(Connect::decode(&stranger, &bytes), None);
        let answer: [u8; ANSWER] = encode_answer(&talk(), Some(END)).try_into().unwrap();
        assert_eq!(decode_answer(&talk(), &answer), Some(Some(END)));
        assert_eq!(decode_answer(&later, &answer), None);
        let refusal: [u8; ANSWER] = encode_answer(&talk(), None).try_into().unwrap();
        assert_eq!(decode_answer(&talk(), &refusal), Some(None));
        let proof = talk().prove(Side::Owner);
        assert!(talk().proves(Side::Owner, &proof));
        assert!(!talk().proves(Side::Client, &proof));
        assert!(!later.proves(Side::Owner, &proof));
    }

    /// Computed by another program, to show that both engines agree.
    #[test]
    fn the_proof_is_as_agreed() {
        let hex: String = talk().prove(Side::Client).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "268a9cb5f4e56a41206e59b07fe1ff699b874ad46b300e56aae12d874e63b626");
        let sealed: String = encode_answer(&talk(), Some(END)).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sealed, "0056341200efcdab0003104b8b4cd7ad35bff8c39eb271a6d0aae7");
    }

    #[test]
    fn numbers_of_more_than_24_bits_and_wrong_sizes_are_refused() {
        for end in [
            End { number: 1 << 24, ..END },
            End { first: 1 << 24, ..END },
            End { mtu: 0, ..END },
            End { mtu: 6, ..END },
        ] {
            let connect = Connect { rail: 0, gid: [5; 16], lid: 6, end };
            assert_eq!(Connect::decode(&talk(), &connect.encode(&talk()).try_into().unwrap()), None);
            assert_eq!(decode_answer(&talk(), &encode_answer(&talk(), Some(end)).try_into().unwrap()), None);
        }
    }

    #[test]
    fn questions_and_fates() {
        let bytes = encode_question(1, 2, &[3; 16]);
        assert_eq!((bytes[0], bytes.len()), (ASK, 1 + QUESTION));
        assert_eq!(decode_question(bytes[1..].try_into().unwrap()), (1, 2, [3; 16]));
        assert_eq!([0, 1, 2, 3].map(Fate::of), [Some(Fate::Live), Some(Fate::Gone), Some(Fate::Refused), None]);
    }

    proptest! {
        #[test]
        fn bytes_are_a_section_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..260), at in 0..117_usize, byte: u8) {
            if let Ok(section) = Section::decode(&bytes) {
                prop_assert_eq!(section.encode(), bytes);
            }
            let mut changed = section(2).encode();
            changed[at] = byte;
            if let Ok(section) = Section::decode(&changed) {
                prop_assert_eq!(section.encode(), changed);
            }
        }
    }
}
