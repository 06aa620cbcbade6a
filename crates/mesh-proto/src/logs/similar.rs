//! When two lines are alike: if they are equal without their numbers.

/// Shorter runs of hexadecimal digits are words, such as `added` or `face`.
const LEAST_HEX: usize = 8;

/// Appends `text` to `out` with `#` in place of every number: whole, decimal or hexadecimal, with its sign.
pub(super) fn normalise(text: &[u8], out: &mut Vec<u8>) {
    let mut at = 0;
    while at < text.len() {
        let byte = text[at];
        let starts = at == 0 || !text[at - 1].is_ascii_alphanumeric();
        if starts && let Some(len) = hex(&text[at..]) {
            out.push(b'#');
            at += len;
        } else if byte.is_ascii_digit() {
            out.push(b'#');
            at += number(&text[at..]);
        } else if starts && matches!(byte, b'-' | b'+') && text.get(at + 1).is_some_and(u8::is_ascii_digit) {
            at += 1;
        } else {
            out.push(byte);
            at += 1;
        }
    }
}

/// The length of a hexadecimal number at the start of `text`: `0x7f`, or a long run with digits among its letters.
fn hex(text: &[u8]) -> Option<usize> {
    let prefix = if text.starts_with(b"0x") || text.starts_with(b"0X") { 2 } else { 0 };
    if prefix == 0 && !text.first().is_some_and(u8::is_ascii_hexdigit) {
        return None;
    }
    let run = text[prefix..].iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let whole = prefix + run;
    let ends = !text.get(whole).is_some_and(u8::is_ascii_alphanumeric);
    let long = run >= LEAST_HEX && text[..whole].iter().any(u8::is_ascii_digit);
    (run > 0 && ends && (prefix > 0 || long)).then_some(whole)
}

/// The length of the decimal number at the start of `text`, with its fraction and exponent.
fn number(text: &[u8]) -> usize {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut len = digits(0);
    if text.get(len) == Some(&b'.') {
        len += match digits(len + 1) {
            0 => 0,
            fraction => 1 + fraction,
        };
    }
    if matches!(text.get(len), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(text.get(len + 1), Some(b'-' | b'+')));
        len += match if len + 1 + sign <= text.len() { digits(len + 1 + sign) } else { 0 } {
            0 => 0,
            exponent => 1 + sign + exponent,
        };
    }
    len
}

#[cfg(test)]
mod tests {
    use super::normalise;

    fn of(text: &str) -> String {
        let mut out = Vec::new();
        normalise(text.as_bytes(), &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_of_all_kinds_are_taken_out() {
        for (text, expected) in [
            ("step 12 of 100", "step # of #"),
            ("loss=-0.25, lr 1e-05", "loss=#, lr #"),
            ("loss=0.5, lr 2.5E+3", "loss=#, lr #"),
            ("at 0x7ffe12 by 3f2a99c0de", "at # by #"),
            ("1234567a by abcdef1", "# by abcdef#"),
            ("0x7 0xg 0x", "# #xg #x"),
            ("1.5 1.x 1e5 1e+ +-1", "# #.x # #e+ +#"),
            ("added a face to cuda:3", "added a face to cuda:#"),
            ("rank3 of gpu7x", "rank# of gpu#x"),
            ("2026-11-20 22:15:01,123", "#-#-# #:#:#,#"),
            ("1. first, 5e", "#. first, #e"),
            ("a-b - c+", "a-b - c+"),
            ("", ""),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }
}
