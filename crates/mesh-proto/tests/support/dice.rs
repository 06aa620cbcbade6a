//! Numbers from a seed, the same in every run.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::fmt::Debug;

#[derive(Debug)]
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number below `sides`; 0 if `sides` is 0.
    pub(crate) fn roll<T: TryFrom<u64, Error: Debug> + TryInto<u64, Error: Debug>>(&mut self, sides: T) -> T {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        T::try_from((x ^ (x >> 31)) % sides.try_into().unwrap().max(1)).unwrap()
    }
}
