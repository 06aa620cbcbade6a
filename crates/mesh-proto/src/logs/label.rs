//! The label before a line: who wrote it.

/// Appends `[trainers gpus=3] ` for one rank.
pub(super) fn one(name: &[u8], point: &[u8], host: &[u8], out: &mut Vec<u8>) {
    begin(name, out);
    if !point.is_empty() {
        out.push(b' ');
        out.extend_from_slice(point);
    }
    end(host, out);
}

/// Appends `[trainers gpus=0-7,9 x9] ` for several ranks: by coordinate if they have only one, otherwise by rank.
pub(super) fn many(name: &[u8], point: &[u8], host: &[u8], ranks: &mut [u32], out: &mut Vec<u8>) {
    begin(name, out);
    out.push(b' ');
    if !point.contains(&b',')
        && let Some(at) = point.iter().position(|byte| *byte == b'=')
    {
        out.extend_from_slice(&point[..=at]);
    }
    ranks.sort_unstable();
    let mut first = true;
    for run in ranks.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        if !std::mem::take(&mut first) {
            out.push(b',');
        }
        out.extend_from_slice(run[0].to_string().as_bytes());
        if let [_, .., last] = run {
            out.push(b'-');
            out.extend_from_slice(last.to_string().as_bytes());
        }
    }
    out.extend_from_slice(format!(" x{}", ranks.len()).as_bytes());
    end(host, out);
}

fn begin(name: &[u8], out: &mut Vec<u8>) {
    out.push(b'[');
    out.extend_from_slice(if name.is_empty() { b"procs" } else { name });
}

fn end(host: &[u8], out: &mut Vec<u8>) {
    if !host.is_empty() {
        out.extend_from_slice(b" on ");
        out.extend_from_slice(host);
    }
    out.extend_from_slice(b"] ");
}
