//! Limits on what strangers may cost: a share of a core, and lines in a log. No clock here: times are passed in.

use std::time::Duration;

/// A share of one core, and a burst beyond it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBudget {
    percent: u32,
    burst: Duration,
    /// Core time used beyond the share.
    debt: Duration,
    counted: Duration,
}

impl CpuBudget {
    pub(crate) fn new(percent: u32, burst: Duration, now: Duration) -> Self {
        Self { percent: percent.clamp(1, 100), burst, debt: Duration::ZERO, counted: now }
    }

    /// Notes core time used since the last call.
    pub(crate) fn spend(&mut self, spent: Duration, now: Duration) {
        let earned = now.saturating_sub(self.counted) * self.percent / 100;
        self.counted = now;
        self.debt = (self.debt + spent).saturating_sub(earned);
    }

    /// How long to rest before doing anything else; none while some of the burst is left.
    pub(crate) fn rest(&self) -> Option<Duration> {
        let over = self.debt.checked_sub(self.burst).filter(|over| !over.is_zero())?;
        Some(over * 100 / self.percent)
    }
}

/// Limits how often something is told: a number of times at once, then once a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    most: f64,
    left: f64,
    counted: Duration,
    untold: u64,
}

impl Allowance {
    pub(crate) fn new(most: u32, now: Duration) -> Self {
        Self { most: f64::from(most), left: f64::from(most), counted: now, untold: 0 }
    }

    /// Whether to tell, and if so how many were not told since the last time.
    pub(crate) fn tell(&mut self, now: Duration) -> Option<u64> {
        self.left = (self.left + now.saturating_sub(self.counted).as_secs_f64()).min(self.most.max(1.0));
        self.counted = now;
        if self.left < 1.0 {
            self.untold += 1;
            return None;
        }
        self.left -= 1.0;
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn whoever_works_without_pause_gets_the_share_after_the_burst() {
        let mut budget = CpuBudget::new(25, ms(100), ms(0));
        let (mut now, mut worked) = (ms(0), ms(0));
        while now < ms(10_000) {
            match budget.rest() {
                Some(rest) => {
                    now += rest;
                    budget.spend(ms(0), now);
                }
                None => {
                    now += ms(3);
                    worked += ms(3);
                    budget.spend(ms(3), now);
                }
            }
        }
        assert!(worked > ms(2_500) && worked < ms(2_500 + 100 + 10), "{worked:?}");
    }

    #[test]
    fn a_burst_after_quiet_is_not_held_up() {
        let mut budget = CpuBudget::new(50, ms(500), ms(0));
        budget.spend(ms(480), ms(480));
        assert_eq!(budget.rest(), None);
        budget.spend(ms(300), ms(780));
        // 780 used, 390 earned: still within the burst. Unused earlier time is not saved up beyond it.
        assert_eq!(budget.rest(), None);
        budget.spend(ms(0), ms(100_000));
        budget.spend(ms(1100), ms(101_100));
        assert_eq!(budget.rest(), Some(ms(100)));
    }

    #[test]
    fn what_is_not_told_is_counted() {
        let mut allowance = Allowance::new(2, ms(0));
        let told: Vec<_> = (0..5).map(|_| allowance.tell(ms(0))).collect();
        assert_eq!(told, [Some(0), Some(0), None, None, None]);
        assert_eq!(allowance.tell(ms(900)), None);
        assert_eq!(allowance.tell(ms(1000)), Some(4));
        assert_eq!(allowance.tell(ms(60_000)), Some(0));
        assert_eq!(allowance.tell(ms(60_000)), Some(0));
        assert_eq!(allowance.tell(ms(60_000)), None);
    }
}
