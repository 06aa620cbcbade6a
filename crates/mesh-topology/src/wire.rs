//! A compact encoding that is safe to decode from anyone.
//!
//! Numbers are LEB128 in their shortest form, signed ones zigzagged. A label is a length byte and UTF-8.
//!
//! | type | bytes |
//! | --- | --- |
//! | `Slice` | count, offset, then size and stride of each dimension |
//! | `Region` | slice, then the label of each dimension |
//!
//! Every value has exactly one encoding, and decoding makes the same checks as the constructors.

use crate::{MAX_DIMS, MAX_LABEL_LEN, Region, Result, Slice, TopologyError};

/// Conversion to bytes and back. Decoding never panics, and allocates in proportion to its input (`TOP-3`).
///
/// ```
/// # use mesh_topology::{Extent, Region, Wire};
/// let region = Region::whole(&Extent::new([("hosts", 2), ("gpus", 8)])?);
/// let bytes = region.to_wire();
/// assert_eq!(bytes, b"\x02\x00\x02\x10\x08\x02\x05hosts\x04gpus");
/// assert_eq!(Region::from_wire(&bytes)?, region);
/// # Ok::<(), mesh_topology::TopologyError>(())
/// ```
pub trait Wire: Sized {
    /// Appends the encoding.
    fn write_wire(&self, out: &mut Vec<u8>);

    /// Reads one value from the front of `bytes`, and moves `bytes` past it. After an error, the position of `bytes` is
    /// unspecified.
    fn read_wire(bytes: &mut &[u8]) -> Result<Self>;

    /// The encoding.
    fn to_wire(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write_wire(&mut out);
        out
    }

    /// Decodes a value that takes up all of `bytes`.
    fn from_wire(mut bytes: &[u8]) -> Result<Self> {
        let value = Self::read_wire(&mut bytes)?;
        if bytes.is_empty() { Ok(value) } else { Err(malformed("message", "bytes are left over")) }
    }
}

impl Wire for Slice {
    fn write_wire(&self, out: &mut Vec<u8>) {
        put(out, self.ndim());
        put(out, self.offset());
        for (&size, &stride) in self.sizes().iter().zip(self.strides()) {
            put(out, size);
            put(out, (stride.cast_unsigned() << 1) ^ (stride >> (isize::BITS - 1)).cast_unsigned());
        }
    }

    fn read_wire(bytes: &mut &[u8]) -> Result<Self> {
        let count = get_count(bytes)?;
        let offset = get(bytes)?;
        let (mut sizes, mut strides) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for _ in 0..count {
            sizes.push(get(bytes)?);
            let zigzag = get(bytes)?;
            strides.push((zigzag >> 1).cast_signed() ^ -((zigzag & 1).cast_signed()));
        }
        let slice = Self::new(offset, &sizes, &strides)?;
        if slice.strides() == strides { Ok(slice) } else { Err(malformed("slice", "it is empty, but has strides")) }
    }
}

impl Wire for Region {
    fn write_wire(&self, out: &mut Vec<u8>) {
        self.as_slice().write_wire(out);
        self.extent().labels().for_each(|label| put_label(out, label));
    }

    fn read_wire(bytes: &mut &[u8]) -> Result<Self> {
        let slice = Slice::read_wire(bytes)?;
        let labels: Vec<&str> = (0..slice.ndim()).map(|_| get_label(bytes)).collect::<Result<_>>()?;
        Self::new(&labels, slice)
    }
}

fn malformed(what: &'static str, why: &'static str) -> TopologyError {
    TopologyError::Malformed { what, why }
}

fn put(out: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn get(bytes: &mut &[u8]) -> Result<usize> {
    let mut number = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let Some((&byte, rest)) = bytes.split_first() else {
            return Err(malformed("number", "the bytes end within it"));
        };
        *bytes = rest;
        let low = u64::from(byte & 0x7f);
        if (low << shift) >> shift != low {
            break;
        }
        number |= low << shift;
        if byte & 0x80 == 0 {
            if byte == 0 && shift > 0 {
                return Err(malformed("number", "it is not in its shortest form"));
            }
            return usize::try_from(number).map_err(|_| malformed("number", "it is too large"));
        }
    }
    Err(malformed("number", "it is too large"))
}

fn get_count(bytes: &mut &[u8]) -> Result<usize> {
    let got = get(bytes)?;
    if got > MAX_DIMS { Err(TopologyError::TooManyDims { got }) } else { Ok(got) }
}

fn put_label(out: &mut Vec<u8>, label: &str) {
    // Labels are at most MAX_LABEL_LEN bytes, so the length fits.
    out.push(label.len() as u8);
    out.extend_from_slice(label.as_bytes());
}

fn get_label<'a>(bytes: &mut &'a [u8]) -> Result<&'a str> {
    let (&len, rest) = bytes.split_first().ok_or_else(|| malformed("label", "the bytes end before it"))?;
    let len = usize::from(len);
    if len > MAX_LABEL_LEN {
        return Err(malformed("label", "it is too long"));
    }
    let (label, rest) = rest.split_at_checked(len).ok_or_else(|| malformed("label", "the bytes end within it"))?;
    *bytes = rest;
    std::str::from_utf8(label).map_err(|_| malformed("label", "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;

    #[test]
    fn numbers_have_one_encoding() {
        for number in [0, 1, 127, 128, 300, u32::MAX as usize, usize::MAX] {
            let mut out = Vec::new();
            put(&mut out, number);
            assert_eq!(get(&mut &out[..]), Ok(number));
        }
        let why = |mut bytes: &[u8]| match get(&mut bytes).unwrap_err() {
            TopologyError::Malformed { why, .. } => why,
            other => panic!("{other}"),
        };
        assert!(why(&[0x80, 0x00]).contains("shortest"));
        assert!(why(&[0x80]).contains("end"));
        assert!(why(&[0xff; 20]).contains("too large"));
        assert!(why(&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02]).contains("too large"));
    }

    #[test]
    fn top_3_a_count_is_no_reason_to_allocate() {
        let mut bytes = Vec::new();
        put(&mut bytes, usize::MAX);
        assert!(matches!(Region::from_wire(&bytes), Err(TopologyError::TooManyDims { .. })));
    }

    #[test]
    fn what_is_left_over_is_an_error_only_where_it_must_not_be() {
        let region = Region::whole(&Extent::new([("a", 3)]).unwrap());
        let mut bytes = region.to_wire();
        bytes.push(9);
        assert!(Region::from_wire(&bytes).is_err());
        let mut rest = &bytes[..];
        assert_eq!(Region::read_wire(&mut rest), Ok(region));
        assert_eq!(rest, [9]);
    }

    #[test]
    fn decoding_checks_what_constructors_check() {
        let twice = b"\x02\x00\x02\x04\x02\x02\x01a\x01a";
        assert!(matches!(Region::from_wire(twice), Err(TopologyError::DuplicateLabel { .. })));
        assert!(matches!(Slice::from_wire(&[1, 0, 4, 0]), Err(TopologyError::Overlapping { .. })));
    }
}
