//! A list that is nearly always short.

use std::ops::Deref;

/// A list whose first two entries need no memory of their own: a frame has a header and a body, most packets have
/// one destination.
///
/// ```
/// # use mesh_proto::hosts::Few;
/// let mut few = Few::from(1);
/// few.push(2);
/// few.push(3);
/// assert_eq!(*few, [1, 2, 3]);
/// ```
#[derive(Clone, Debug)]
pub struct Few<T>(Repr<T>);

#[derive(Clone, Debug)]
enum Repr<T> {
    None,
    One([T; 1]),
    Two([T; 2]),
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(Repr::None)
    }

    /// Appends an entry.
    pub fn push(&mut self, value: T) {
        self.0 = match std::mem::replace(&mut self.0, Repr::None) {
            Repr::None => Repr::One([value]),
            Repr::One([first]) => Repr::Two([first, value]),
            Repr::Two([first, second]) => Repr::Many(vec![first, second, value]),
            Repr::Many(mut many) => {
                many.push(value);
                Repr::Many(many)
            }
        };
    }

    /// The last entry, to be changed.
    pub fn last_mut(&mut self) -> Option<&mut T> {
        match &mut self.0 {
            Repr::None => None,
            Repr::One([one]) | Repr::Two([_, one]) => Some(one),
            Repr::Many(many) => many.last_mut(),
        }
    }

    /// Drops the entries that `keep` says no to.
    pub fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        let mut all = match std::mem::replace(&mut self.0, Repr::None) {
            Repr::None => return,
            Repr::One(one) => Vec::from(one),
            Repr::Two(two) => Vec::from(two),
            Repr::Many(many) => many,
        };
        all.retain(keep);
        *self = Self::from(all);
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Repr::None => &[],
            Repr::One(one) => one,
            Repr::Two(two) => two,
            Repr::Many(many) => many,
        }
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T> From<T> for Few<T> {
    fn from(one: T) -> Self {
        Self(Repr::One([one]))
    }
}

impl<T> From<[T; 2]> for Few<T> {
    fn from(two: [T; 2]) -> Self {
        Self(Repr::Two(two))
    }
}

impl<T> From<Vec<T>> for Few<T> {
    fn from(many: Vec<T>) -> Self {
        if many.len() > 2 { Self(Repr::Many(many)) } else { many.into_iter().collect() }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut few = Self::new();
        values.into_iter().for_each(|value| few.push(value));
        few
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
