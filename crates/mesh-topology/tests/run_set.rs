//! Sets of runs, against plain sets of numbers.

use mesh_topology::{RunNumber, RunSet};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::collections::BTreeSet;
use std::fmt::Debug;

type Runs = Vec<(u32, u32)>;

fn few() -> impl Strategy<Value = Runs> {
    prop::collection::vec((0..60_u32, 0..8_u32), 0..4)
}

/// Few and many runs: some operations work differently for many.
fn runs() -> impl Strategy<Value = Runs> {
    prop_oneof![few(), prop::collection::vec((0..60_u32, 0..5_u32), 4..12)]
}

fn numbers<N: RunNumber>(runs: &Runs) -> BTreeSet<N> {
    runs.iter().flat_map(|(first, len)| *first..first + len).map(|number| N::narrow(number.into())).collect()
}

fn set<N: RunNumber>(runs: &Runs) -> RunSet<N> {
    RunSet::from_runs(runs.iter().map(|(first, len)| (N::narrow((*first).into()), N::narrow((*len).into()))).collect())
}

/// The set holds these numbers, in their only valid form.
fn is<N: RunNumber + Debug>(set: &RunSet<N>, numbers: &BTreeSet<N>) {
    assert!(set.iter().eq(numbers.iter().copied()), "{set:?} is not {numbers:?}");
    assert_eq!(set, &numbers.iter().copied().collect());
    assert_eq!((set.len(), set.is_empty()), (numbers.len(), numbers.is_empty()));
    assert_eq!((set.first(), set.last()), (numbers.first().copied(), numbers.last().copied()));
    assert!(set.runs().iter().all(|(_, len)| len.widen() > 0));
    assert!(set.runs().windows(2).all(|pair| pair[0].0.widen() + pair[0].1.widen() < pair[1].0.widen()));
}

fn agrees<N: RunNumber + Debug>(left: &Runs, right: &Runs, pieces: usize, gone: u32) {
    let (a, b) = (set::<N>(left), set::<N>(right));
    let (x, y) = (numbers::<N>(left), numbers::<N>(right));
    let both = x.union(&y).copied().collect();
    let less = x.difference(&y).copied().collect();
    is(&a, &x);
    is(&a.union(&b), &both);
    is(&a.intersection(&b), &x.intersection(&y).copied().collect());
    is(&a.difference(&b), &less);
    assert_eq!(a.overlaps(&b), !x.is_disjoint(&y));

    let mut changed = a.clone();
    changed.extend_by(&b);
    is(&changed, &both);
    changed = a.clone();
    changed.reduce_by(&b);
    is(&changed, &less);

    let gone = N::narrow(gone.into());
    let (mut changed, mut rest) = (a.clone(), x.clone());
    assert_eq!(a.contains(gone), x.contains(&gone));
    assert_eq!(changed.remove(gone), rest.remove(&gone));
    is(&changed, &rest);

    let parts = a.split(pieces);
    assert_eq!(parts.len(), pieces.min(a.len()));
    assert!(parts.iter().all(|part| !part.is_empty() && part.len() <= a.len().div_ceil(pieces)));
    assert!(parts.iter().flat_map(RunSet::iter).eq(a.iter()));

    let (mut one_by_one, mut by_runs) = (RunSet::new(), RunSet::new());
    x.iter().for_each(|number| one_by_one.push(*number));
    a.runs().iter().for_each(|(first, len)| by_runs.push_run(*first, *len));
    is(&one_by_one, &x);
    is(&by_runs, &x);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 5000,
        rng_seed: RngSeed::Fixed(16),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn operations_agree_with_those_of_plain_sets(left in runs(), right in runs(), pieces in 1..10_usize, gone in 0..70_u32) {
        agrees::<u32>(&left, &right, pieces, gone);
        agrees::<usize>(&left, &right, pieces, gone);
    }
}

#[test]
fn the_highest_number_is_a_member_like_any_other() {
    let mut top = RunSet::from_runs(vec![(u32::MAX, 1), (u32::MAX - 1, 1)]);
    assert_eq!(top.runs(), [(u32::MAX - 1, 2)]);
    assert_eq!(top.difference(&RunSet::one(u32::MAX)).runs(), [(u32::MAX - 1, 1)]);
    assert_eq!(top.intersection(&RunSet::one(u32::MAX)).runs(), [(u32::MAX, 1)]);
    assert_eq!(top.iter().collect::<Vec<_>>(), [u32::MAX - 1, u32::MAX]);
    assert!(top.remove(u32::MAX) && !top.contains(u32::MAX));
    assert_eq!(top.last(), Some(u32::MAX - 1));
}

#[test]
fn the_highest_number_may_be_pushed_twice() {
    let mut set = RunSet::one(5_u32);
    set.push(5);
    assert_eq!(set.runs(), [(5, 1)]);
}

#[test]
#[should_panic(expected = "numbers must be pushed in ascending order")]
fn lower_numbers_are_not_pushed() {
    RunSet::range(5_u32, 2).push(5);
}
