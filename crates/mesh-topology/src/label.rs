//! The names of dimensions: which are valid, and which one a mistyped name probably means.

use crate::{MAX_LABEL_LEN, Result, TopologyError};

/// Checks one label.
pub(crate) fn check(label: &str) -> Result<()> {
    let bad = |why| Err(TopologyError::BadLabel { label: label.chars().take(MAX_LABEL_LEN).collect(), why });
    if label.is_empty() {
        bad("it is empty")
    } else if label.len() > MAX_LABEL_LEN {
        bad("it is too long")
    } else if label.chars().any(|c| c.is_whitespace() || c.is_control()) {
        bad("it contains a space or a control character")
    } else if label.contains([',', '=']) {
        // Shapes are written with these as separators.
        bad("it contains a comma or an equals sign")
    } else {
        Ok(())
    }
}

/// Checks that no label occurs twice. Quadratic, but faster than hashing for at most 16 labels.
pub(crate) fn check_unique<S: AsRef<str>>(labels: &[S]) -> Result<()> {
    for (i, label) in labels.iter().enumerate() {
        if labels[..i].iter().any(|other| other.as_ref() == label.as_ref()) {
            return Err(TopologyError::DuplicateLabel { label: label.as_ref().to_owned() });
        }
    }
    Ok(())
}

/// The candidate nearest to `name`, if it is close enough to be what was meant.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Work and memory stay bounded whatever is passed as a name.
    if name.len() > MAX_LABEL_LEN {
        return None;
    }
    candidates
        .map(|candidate| (distance(name, candidate), candidate))
        .filter(|&(d, candidate)| {
            let longer = candidate.chars().count().max(name.chars().count());
            // At most a third may differ, and something must match.
            d <= longer.div_ceil(3) && d < longer
        })
        .min_by_key(|&(d, _)| d)
        .map(|(_, candidate)| candidate)
}

/// The edit distance, ignoring case; two neighbours that changed places count as one edit.
fn distance(a: &str, b: &str) -> usize {
    let lower = |text: &str| text.chars().flat_map(char::to_lowercase).collect::<Vec<_>>();
    let (a, b) = (lower(a), lower(b));
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                changed.min(rows[i][j - 1] + 1).min(rows[i - 1][j] + 1)
            };
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                rows[i][j] = rows[i][j].min(rows[i - 2][j - 2] + 1);
            }
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_visible_and_not_empty() {
        assert!(check("gpus").is_ok());
        assert!(check(&"x".repeat(MAX_LABEL_LEN)).is_ok());
        for bad in ["", "a b", "a\n", "a,b", "a=b", &"x".repeat(MAX_LABEL_LEN + 1)] {
            assert!(matches!(check(bad), Err(TopologyError::BadLabel { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let names = || ["hosts", "gpus"].into_iter();
        assert_eq!(nearest("gpu", names()), Some("gpus"));
        assert_eq!(nearest("tpc", ["shm", "tcp"].into_iter()), Some("tcp"));
        assert_eq!(nearest("GPUS", names()), Some("gpus"));
        assert_eq!(nearest("hsots", names()), Some("hosts"));
        assert_eq!(nearest("b", ["a"].into_iter()), None);
        assert_eq!(nearest("host", names()), Some("hosts"));
        assert_eq!(nearest("tensor", names()), None);
        assert_eq!(nearest(&"gpus".repeat(1000), names()), None);
    }

    #[test]
    fn a_repeated_label_is_named() {
        let error = check_unique(&["a", "b", "a"]).unwrap_err();
        assert_eq!(error, TopologyError::DuplicateLabel { label: "a".into() });
    }
}
