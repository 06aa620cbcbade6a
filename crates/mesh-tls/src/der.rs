//! Just enough DER to read what this crate's own authority writes: certificates and revocation lists.
//!
//! Reading proves nothing: signatures are checked elsewhere, before anything read here counts.

/// The bytes are not what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

pub(crate) const INTEGER: u8 = 0x02;
pub(crate) const BIT_STRING: u8 = 0x03;
pub(crate) const OCTET_STRING: u8 = 0x04;
pub(crate) const OID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
pub(crate) const SEQUENCE: u8 = 0x30;

/// A run of elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Der<'a>(pub(crate) &'a [u8]);

/// One element: its tag, its contents, and all its bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element<'a> {
    pub(crate) tag: u8,
    pub(crate) body: &'a [u8],
    pub(crate) whole: &'a [u8],
}

impl<'a> Der<'a> {
    pub(crate) fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    /// The next element, whatever its tag.
    pub(crate) fn any(&mut self) -> Result<Element<'a>, Malformed> {
        let (&tag, rest) = self.0.split_first().ok_or(Malformed)?;
        let (&first, rest) = rest.split_first().ok_or(Malformed)?;
        let (len, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f)).ok_or(Malformed)?;
                (bytes.iter().fold(0, |len, &byte| len << 8 | usize::from(byte)), rest)
            }
            _ => return Err(Malformed),
        };
        let (body, after) = rest.split_at_checked(len).ok_or(Malformed)?;
        let whole = &self.0[..self.0.len() - after.len()];
        self.0 = after;
        Ok(Element { tag, body, whole })
    }

    /// The next element, which must have this tag.
    pub(crate) fn expect(&mut self, tag: u8) -> Result<&'a [u8], Malformed> {
        let element = self.any()?;
        if element.tag == tag { Ok(element.body) } else { Err(Malformed) }
    }

    pub(crate) fn sequence(&mut self) -> Result<Der<'a>, Malformed> {
        self.expect(SEQUENCE).map(Der)
    }

    /// Skips the next element if it has this tag. Returns whether it did.
    pub(crate) fn skip_if(&mut self, tag: u8) -> Result<bool, Malformed> {
        if self.peek() != Some(tag) {
            return Ok(false);
        }
        self.any()?;
        Ok(true)
    }

    /// A time in seconds since 1970.
    pub(crate) fn time(&mut self) -> Result<u64, Malformed> {
        let element = self.any()?;
        let text = element.body;
        let digits = match element.tag {
            UTC_TIME if text.len() == 13 => 2,
            GENERALIZED_TIME if text.len() == 15 => 4,
            _ => return Err(Malformed),
        };
        if text.last() != Some(&b'Z') {
            return Err(Malformed);
        }
        let number = |at: usize, len: usize| {
            text[at..at + len].iter().try_fold(0_u64, |n, byte| match byte {
                b'0'..=b'9' => Ok(n * 10 + u64::from(byte - b'0')),
                _ => Err(Malformed),
            })
        };
        let year = match number(0, digits)? {
            short @ 0..=49 if digits == 2 => 2000 + short,
            short if digits == 2 => 1900 + short,
            year => year,
        };
        let [month, day, hour, minute, second] = [0, 2, 4, 6, 8].map(|at| number(digits + at, 2));
        let (month, day) = (month?, day?);
        if year < 1970 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
            return Err(Malformed);
        }
        Ok(((days_to(year, month) + day - 1) * 24 + hour?) * 3600 + minute? * 60 + second?)
    }
}

/// Days from 1970 to the first of a month.
fn days_to(year: u64, month: u64) -> u64 {
    let leaps = |year: u64| year / 4 - year / 100 + year / 400;
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let months = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let before: u64 = months.iter().zip(1..month).map(|(days, _)| days).sum();
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969) + before
}

/// The value of an unsigned integer without the zero that keeps it positive.
pub(crate) fn unsigned(body: &[u8]) -> &[u8] {
    match body {
        [0, rest @ ..] if !rest.is_empty() => rest,
        body => body,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_over_leap_years_and_both_notations() {
        for (tag, text, seconds) in [
            (UTC_TIME, "700101000000Z", 0),
            (UTC_TIME, "000301000000Z", 951_868_800),
            (UTC_TIME, "261121013357Z", 1_795_224_837),
            (GENERALIZED_TIME, "20500228235959Z", 2_529_705_599),
            (GENERALIZED_TIME, "21000301000000Z", 4_107_542_400),
        ] {
            let mut der = vec![tag, u8::try_from(text.len()).unwrap()];
            der.extend_from_slice(text.as_bytes());
            assert_eq!(Der(&der).time(), Ok(seconds), "{text}");
        }
        for text in ["700101000000+", "70010100000Z", "7001AA000000Z", "701301000000Z"] {
            let mut der = vec![UTC_TIME, u8::try_from(text.len()).unwrap()];
            der.extend_from_slice(text.as_bytes());
            assert_eq!(Der(&der).time(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn lengths_that_promise_more_than_there_is_are_refused() {
        for der in
            [&[][..], &[0x30], &[0x30, 1], &[0x30, 0x81], &[0x30, 0x82, 1], &[0x30, 0x84, 0, 0, 0, 0], &[0x30, 0x80]]
        {
            assert!(Der(der).any().is_err(), "{der:?}");
        }
        assert_eq!(Der(&[0x30, 0x81, 1, 7]).expect(SEQUENCE), Ok(&[7][..]));
    }
}
