//! `TOP-3`: whatever the bytes, decoding ends without a panic, and its result is sound.

use mesh_topology::{Region, Selector, Slice, Span, Wire};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn config() -> ProptestConfig {
    ProptestConfig { cases: 5000, rng_seed: RngSeed::Fixed(3), failure_persistence: None, ..ProptestConfig::default() }
}

/// Decodes as every type; a value that comes out must encode to the bytes it came from.
fn decode_all(bytes: &[u8]) {
    fn check<T: Wire>(bytes: &[u8]) -> Option<T> {
        let mut rest = bytes;
        let value = T::read_wire(&mut rest).ok()?;
        assert_eq!(value.to_wire(), bytes[..bytes.len() - rest.len()]);
        Some(value)
    }
    if let Some(slice) = check::<Slice>(bytes) {
        probe(&slice);
    }
    if let Some(region) = check::<Region>(bytes) {
        probe(region.as_slice());
        assert_eq!(region.extent().sizes(), region.as_slice().sizes());
        let _ = region.flatten("all");
        for label in region.extent().labels() {
            let _ = region.slice(&[(label, Selector::Span(Span::every(-2)))]);
            let _ = region.slice(&[(label, Selector::At(-1))]);
            let _ = region.split(label, &[("x", None), ("y", Some(2))]);
        }
    }
}

/// Asks what can be asked without walking a view that may be enormous.
fn probe(slice: &Slice) {
    let bounds = slice.bounds();
    for (position, rank) in slice.iter().take(100).enumerate() {
        assert!(bounds.contains(&rank));
        assert_eq!(slice.position(rank), Some(position));
        assert_eq!(slice.rank_at(position), Some(rank));
    }
    if let Some(last) = slice.len().checked_sub(1) {
        let rank = slice.rank_at(last).expect("a position below the length");
        assert_eq!(slice.position(rank), Some(last));
    }
    let _ = slice.within(bounds.start..bounds.start.saturating_add(64));
}

fn valid() -> impl Strategy<Value = Vec<u8>> {
    let dim = (0..5_usize, -40..40_isize);
    (0..50_usize, prop::collection::vec(dim, 0..4)).prop_map(|(offset, dims)| {
        let (sizes, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        let labels: Vec<String> = (0..sizes.len()).map(|i| format!("d{i}")).collect();
        match Slice::new(offset, &sizes, &strides).and_then(|slice| Region::new(&labels, slice)) {
            Ok(region) => region.to_wire(),
            Err(_) => Vec::new(),
        }
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        decode_all(&bytes);
    }

    #[test]
    fn small_noise(bytes in prop::collection::vec(prop_oneof![0..5_u8, any::<u8>()], 0..24)) {
        decode_all(&bytes);
    }

    #[test]
    fn damaged_regions(bytes in valid(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = bytes;
        if !bytes.is_empty() {
            let place = at.index(bytes.len());
            bytes[place] = byte;
            decode_all(&bytes);
            bytes.truncate(cut.index(bytes.len()));
        }
        decode_all(&bytes);
    }
}
