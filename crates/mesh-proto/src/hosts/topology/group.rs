//! The tree of one group, as arithmetic on numbers.

use crate::HostNo;

/// Hosts `base..base + count`. Counted from 0, the first `fan_out` are children of the controller, and any other host i
/// is a child of host i / `fan_out` - 1. So the children of a host are neighbours, and so is each level below it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) base: HostNo,
    pub(super) count: u32,
    /// At least 1; `u32::MAX` if all are children of the controller.
    pub(super) fan_out: u32,
}

impl Group {
    /// The number after the last of the group.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.base) + u64::from(self.count)
    }

    /// Whether no host in it relays.
    pub(super) fn is_flat(&self) -> bool {
        self.fan_out == u32::MAX
    }

    pub(super) fn contains(&self, host: HostNo) -> bool {
        host >= self.base && u64::from(host) < self.end()
    }

    /// The ancestors of a host of the group if all are well: nearest first, the controller last.
    pub(super) fn above(self, host: HostNo) -> impl Iterator<Item = HostNo> {
        std::iter::successors(Some(host), move |at| {
            let step = (*at).checked_sub(self.base)?;
            Some(if step < self.fan_out { 0 } else { self.base + step / self.fan_out - 1 })
        })
        .skip(1)
    }

    /// The controller's children in the group.
    pub(super) fn top(&self) -> (HostNo, u32) {
        (self.base, self.count.min(self.fan_out))
    }

    /// The hosts that have children: the lowest numbers.
    pub(super) fn inner(&self) -> (HostNo, u32) {
        (self.base, (self.count - 1) / self.fan_out)
    }

    /// The children of a run of neighbours, which are neighbours themselves.
    pub(super) fn under(&self, (first, len): (HostNo, u32)) -> (HostNo, u32) {
        let (fan_out, count) = (u64::from(self.fan_out), u64::from(self.count));
        let from = fan_out * (u64::from(first - self.base) + 1);
        let to = (from + fan_out * u64::from(len)).min(count);
        if from >= to {
            return (self.base, 0);
        }
        let narrow = |value| u32::try_from(value).unwrap_or(u32::MAX);
        (self.base + narrow(from), narrow(to - from))
    }

    /// A host and everything below it, level by level.
    pub(super) fn below(&self, host: HostNo) -> Vec<(HostNo, u32)> {
        if self.fan_out == 1 {
            return vec![(host, self.count - (host - self.base))];
        }
        std::iter::successors(Some((host, 1)), |level| Some(self.under(*level)).filter(|(_, len)| *len > 0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_under_a_host_has_it_as_parent() {
        for (count, fan_out) in [(1, 1), (1, 16), (7, 1), (30, 2), (100, 3), (273, 16), (300, 16), (50, u32::MAX)] {
            let group = Group { base: 5, count, fan_out };
            let hosts = || 5..5 + count;
            let covers = |(first, len): (HostNo, u32), host: HostNo| host >= first && host < first + len;
            for host in hosts() {
                let parent = group.above(host).next();
                assert_eq!(covers(group.top(), host), parent == Some(0), "{host} of {count} by {fan_out}");
                for other in hosts() {
                    assert_eq!(covers(group.under((other, 1)), host), parent == Some(other));
                    let is_below = host == other || group.above(host).any(|above| above == other);
                    assert_eq!(group.below(other).iter().any(|run| covers(*run, host)), is_below);
                }
                assert_eq!(covers(group.inner(), host), group.under((host, 1)).1 > 0);
                assert_eq!(group.above(host).last(), Some(0));
            }
        }
    }
}
