//! Regions against a model that stores every coordinate and every rank.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;

use mesh_topology::{Extent, RankSet, Region, Selector, Span, TopologyError, Wire};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// One row per element, in row-major order: its coordinates and its rank.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    labels: Vec<String>,
    sizes: Vec<usize>,
    cells: Vec<(Vec<usize>, usize)>,
}

fn all_coords(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![vec![]], |rows, &size| {
        rows.iter().flat_map(|row| (0..size).map(|i| [row.as_slice(), &[i]].concat())).collect()
    })
}

impl Model {
    fn whole(labels: Vec<String>, sizes: Vec<usize>) -> Self {
        let cells = all_coords(&sizes).into_iter().zip(0..).collect();
        Self { labels, sizes, cells }
    }

    fn ranks(&self) -> Vec<usize> {
        self.cells.iter().map(|&(_, rank)| rank).collect()
    }

    fn with_dims(&self, labels: Vec<String>, sizes: Vec<usize>, ranks: Vec<usize>) -> Self {
        let cells: Vec<_> = all_coords(&sizes).into_iter().zip(ranks.iter().copied()).collect();
        assert_eq!(cells.len(), ranks.len());
        Self { labels, sizes, cells }
    }

    fn at(&self, axis: usize, index: usize) -> Self {
        let (mut labels, mut sizes) = (self.labels.clone(), self.sizes.clone());
        labels.remove(axis);
        sizes.remove(axis);
        let kept = self.cells.iter().filter(|(coords, _)| coords[axis] == index).map(|&(_, rank)| rank).collect();
        self.with_dims(labels, sizes, kept)
    }

    fn span(&self, axis: usize, indices: &[usize]) -> Self {
        let mut sizes = self.sizes.clone();
        sizes[axis] = indices.len();
        let find = |coords: Vec<usize>| {
            let mut wanted = coords;
            wanted[axis] = indices[wanted[axis]];
            self.cells.iter().find(|(coords, _)| *coords == wanted).unwrap().1
        };
        let ranks = all_coords(&sizes).into_iter().map(find).collect();
        self.with_dims(self.labels.clone(), sizes, ranks)
    }
}

/// The indices that a Python slice picks, by walking.
fn python_indices(span: Span, size: usize) -> Vec<usize> {
    let n = isize::try_from(size).unwrap();
    let step = span.step.unwrap_or(1);
    let from_end = |i: isize| if i < 0 { i + n } else { i };
    let start = span.start.map(from_end);
    let stop = span.stop.map(from_end);
    let mut picked = Vec::new();
    let mut i = match (start, step > 0) {
        (None, true) => 0,
        (None, false) => n - 1,
        (Some(s), true) => s.max(0),
        (Some(s), false) => s.min(n - 1),
    };
    while (0..n).contains(&i) && stop.is_none_or(|stop| if step > 0 { i < stop } else { i > stop }) {
        picked.push(usize::try_from(i).unwrap());
        i += step;
    }
    picked
}

/// An operation, applied to the dimensions that exist at that time.
#[derive(Debug, Clone)]
enum Op {
    At { axis: usize, index: isize },
    Span { axis: usize, span: Span },
    Split { axis: usize, divisor: usize, infer: u8 },
    Flatten,
    Rename { axis: usize },
}

fn end() -> impl Strategy<Value = Option<isize>> {
    prop_oneof![Just(None), (-9_isize..9).prop_map(Some)]
}

fn span() -> impl Strategy<Value = Span> {
    let step = prop_oneof![Just(None), (1_isize..4).prop_map(Some), (-3_isize..0).prop_map(Some)];
    (end(), end(), step).prop_map(|(start, stop, step)| Span::new(start, stop, step))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0..9_usize, -9_isize..9).prop_map(|(axis, index)| Op::At { axis, index }),
        4 => (0..9_usize, span()).prop_map(|(axis, span)| Op::Span { axis, span }),
        2 => (0..9_usize, 1..9_usize, 0..3_u8).prop_map(|(axis, divisor, infer)| Op::Split { axis, divisor, infer }),
        1 => Just(Op::Flatten),
        1 => (0..9_usize).prop_map(|axis| Op::Rename { axis }),
    ]
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0_usize), 20 => 1..7_usize], 0..4)
}

/// Applies one operation to both; they must agree on the outcome, or on its failure.
fn apply(region: Region, model: Model, op: &Op, fresh: &mut u32) -> (Region, Model) {
    *fresh += 1;
    let ndim = model.labels.len();
    match *op {
        Op::Flatten => {
            let ranks = model.ranks();
            let even =
                ranks.len() < 2 || ranks.windows(2).all(|w| w[1].wrapping_sub(w[0]) == ranks[1].wrapping_sub(ranks[0]));
            match region.flatten("all") {
                Ok(flat) => {
                    let sizes = vec![ranks.len()];
                    (flat, model.with_dims(vec!["all".into()], sizes, ranks))
                }
                Err(error) => {
                    assert!(!even, "{error}");
                    assert!(matches!(error, TopologyError::NotFlat { .. }));
                    (region, model)
                }
            }
        }
        _ if ndim == 0 => (region, model),
        Op::At { axis, index } => {
            let axis = axis % ndim;
            let size = isize::try_from(model.sizes[axis]).unwrap();
            let absolute = if index < 0 { index + size } else { index };
            match region.slice(&[(&model.labels[axis], Selector::At(index))]) {
                Ok(sliced) => (sliced, model.at(axis, usize::try_from(absolute).unwrap())),
                Err(_) => {
                    assert!(!(0..size).contains(&absolute));
                    (region, model)
                }
            }
        }
        Op::Span { axis, span } => {
            let axis = axis % ndim;
            let indices = python_indices(span, model.sizes[axis]);
            match region.slice(&[(&model.labels[axis], Selector::Span(span))]) {
                Ok(sliced) => (sliced, model.span(axis, &indices)),
                Err(error) => {
                    assert!(indices.is_empty() && model.sizes[axis] > 0, "{error}");
                    (region, model)
                }
            }
        }
        Op::Split { axis, divisor, infer } => {
            let axis = axis % ndim;
            let size = model.sizes[axis];
            let (outer, inner) = (format!("o{fresh}"), format!("i{fresh}"));
            let quotient = size / divisor;
            let given = |which, size| (infer != which).then_some(size);
            let expected = match infer {
                0 => (size.is_multiple_of(divisor)).then_some((quotient, divisor)),
                1 => (quotient > 0 && size.is_multiple_of(quotient)).then(|| (quotient, size / quotient)),
                _ => (quotient * divisor == size).then_some((quotient, divisor)),
            };
            let parts = [(outer.as_str(), given(0, quotient)), (inner.as_str(), given(1, divisor))];
            let split = region.split(&model.labels[axis], &parts);
            assert_eq!(split.is_ok(), expected.is_some(), "{split:?}");
            match (split, expected) {
                (Ok(split), Some((first, second))) => {
                    let (mut labels, mut sizes) = (model.labels.clone(), model.sizes.clone());
                    labels.splice(axis..=axis, [outer, inner]);
                    sizes.splice(axis..=axis, [first, second]);
                    (split, model.with_dims(labels, sizes, model.ranks()))
                }
                _ => (region, model),
            }
        }
        Op::Rename { axis } => {
            let axis = axis % ndim;
            let name = format!("r{fresh}");
            let renamed = region.rename(&[(&model.labels[axis], &name)]).unwrap();
            let mut labels = model.labels.clone();
            labels[axis] = name;
            (renamed, Model { labels, ..model })
        }
    }
}

fn build(sizes: &[usize], ops: &[Op]) -> (Region, Model) {
    let labels: Vec<String> = (0..sizes.len()).map(|i| format!("d{i}")).collect();
    let whole = Region::whole(&Extent::from_parts(&labels, sizes).unwrap());
    let mut fresh = 0;
    ops.iter()
        .fold((whole, Model::whole(labels, sizes.to_vec())), |(region, model), op| apply(region, model, op, &mut fresh))
}

fn region() -> impl Strategy<Value = (Region, Model)> {
    (sizes(), prop::collection::vec(op(), 0..6)).prop_map(|(sizes, ops)| build(&sizes, &ops))
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 1500,
        rng_seed: RngSeed::Fixed(2026),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// One more than any rank of a generated mesh.
const BEYOND: usize = 7 * 7 * 7 + 1;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_region_is_what_was_done_to_it((region, model) in region()) {
        prop_assert!(region.extent().labels().eq(model.labels.iter().map(String::as_str)));
        prop_assert_eq!(region.extent().sizes(), &model.sizes);
        prop_assert_eq!(region.len(), model.cells.len());
        prop_assert_eq!(region.iter().len(), model.cells.len());
        prop_assert_eq!(region.iter().collect::<Vec<_>>(), model.ranks());
    }

    #[test]
    fn top_1_membership_position_and_coordinates_agree((region, model) in region()) {
        for rank in (0..BEYOND).chain([usize::MAX, isize::MAX.unsigned_abs()]) {
            let row = model.cells.iter().position(|&(_, r)| r == rank);
            prop_assert_eq!(region.position(rank), row);
            prop_assert_eq!(region.contains(rank), row.is_some());
            let coords = row.map(|row| model.cells[row].0.clone());
            prop_assert_eq!(region.as_slice().coordinates(rank), coords.clone());
            prop_assert_eq!(region.point_of(rank).ok().map(|p| p.coords().collect::<Vec<_>>()), coords);
        }
        for (position, (coords, rank)) in model.cells.iter().enumerate() {
            prop_assert_eq!(region.rank_at(position), Ok(*rank));
            prop_assert_eq!(region.as_slice().rank_of(coords), Some(*rank));
        }
        prop_assert!(region.rank_at(model.cells.len()).is_err());
    }

    #[test]
    fn points_and_ranks_of_an_extent_are_inverse(sizes in sizes()) {
        let (region, model) = build(&sizes, &[]);
        let extent = region.extent();
        prop_assert_eq!(extent.points().len(), model.cells.len());
        for (point, (coords, rank)) in extent.points().zip(&model.cells) {
            prop_assert_eq!(point.rank(), *rank);
            prop_assert_eq!(&point.coords().collect::<Vec<_>>(), coords);
            let signed = coords.iter().map(|&c| isize::try_from(c).unwrap());
            let named: Vec<(&str, isize)> = extent.labels().zip(signed).rev().collect();
            prop_assert_eq!(extent.rank_of(&named), Ok(*rank));
        }
    }

    #[test]
    fn set_operations_are_those_of_sets(
        sizes in sizes(),
        left in prop::collection::vec(op(), 0..4),
        right in prop::collection::vec(op(), 0..4),
        window in (0..BEYOND, 0..BEYOND),
    ) {
        let ((a, model_a), (b, model_b)) = (build(&sizes, &left), build(&sizes, &right));
        let (a, b) = (a.as_slice(), b.as_slice());
        let (x, y): (BTreeSet<_>, BTreeSet<_>) = (model_a.ranks().into_iter().collect(), model_b.ranks().into_iter().collect());
        let list = |set: &RankSet| set.iter().collect::<Vec<_>>();
        let both: Vec<_> = x.intersection(&y).copied().collect();
        prop_assert_eq!(list(&a.intersection(b)), both.clone());
        prop_assert_eq!(list(&a.difference(b)), x.difference(&y).copied().collect::<Vec<_>>());
        prop_assert_eq!(a.is_subset(b), x.is_subset(&y));
        prop_assert_eq!(a.is_disjoint(b), both.is_empty());
        let range = window.0.min(window.1)..window.0.max(window.1);
        prop_assert_eq!(list(&a.within(range.clone())), x.range(range).copied().collect::<Vec<_>>());
        prop_assert_eq!(list(&a.to_set()), x.iter().copied().collect::<Vec<_>>());
        for set in [a.to_set(), a.intersection(b), a.difference(b)] {
            prop_assert!(set.runs().windows(2).all(|w| w[0].0 + w[0].1 < w[1].0));
            prop_assert!(set.runs().iter().all(|(_, len)| *len > 0));
            prop_assert_eq!(set.len(), list(&set).len());
        }
        prop_assert_eq!(a.is_dense(), x.len() < 2 || x.last().unwrap() - x.first().unwrap() + 1 == x.len());
    }

    #[test]
    fn everything_survives_the_wire((region, _) in region()) {
        prop_assert_eq!(&Region::from_wire(&region.to_wire()).unwrap(), &region);
    }
}
