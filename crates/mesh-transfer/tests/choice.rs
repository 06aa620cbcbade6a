//! Which transports are tried, and in which order (CHO-1, CHO-2).

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use mesh_transfer::{Capabilities, Distance, Need, Ours, choose};
use proptest::prelude::*;
use std::collections::BTreeSet;

const NAMES: [&str; 5] = ["shm", "tcp", "verbs", "other", "pigeon"];

fn ours() -> impl Strategy<Value = Vec<Ours>> {
    let bits = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let each = (bits, prop::option::weighted(0.3, Just("broken here".to_owned())));
    (prop::collection::vec(each, 4), prop::sample::subsequence(&NAMES[..4], 0..=4)).prop_map(|(facts, names)| {
        let each = names.into_iter().zip(facts);
        each.map(|(name, ((copies, atomics, remote, one_sided), broken))| Ours {
            name: name.to_owned(),
            capabilities: Capabilities { copies, atomics, remote, one_sided },
            broken,
        })
        .collect()
    })
}

fn distance() -> impl Strategy<Value = Distance> {
    prop_oneof![Just(Distance::Process), Just(Distance::Host), Just(Distance::Elsewhere)]
}

proptest! {
    #[test]
    fn each_is_tried_or_has_a_reason(
        ours in ours(),
        theirs in prop::sample::subsequence(&NAMES[..], 0..=5).prop_shuffle(),
        distance in distance(),
        copies in any::<bool>(),
        atomics in any::<bool>(),
        forced in prop::option::weighted(0.3, prop::sample::select(&NAMES[..])),
    ) {
        let need = Need { copies, atomics };
        let choice = choose(&ours, &theirs, distance, need, forced);
        // Every transport appears exactly once.
        let told: Vec<&str> = choice.candidates.iter().map(String::as_str)
            .chain(choice.passed.iter().map(|(name, _)| name.as_str())).collect();
        let all: BTreeSet<&str> = ours.iter().map(|each| each.name.as_str()).chain(theirs.iter().copied()).collect();
        prop_assert_eq!(told.len(), all.len());
        prop_assert_eq!(told.into_iter().collect::<BTreeSet<_>>(), all);
        prop_assert!(choice.passed.iter().all(|(_, why)| !why.is_empty()));
        // CHO-1
        let of = |name: &String| ours.iter().find(|each| each.name == *name).unwrap();
        for each in &ours {
            let can = each.capabilities;
            let fits = theirs.contains(&each.name.as_str())
                && each.broken.is_none()
                && (distance != Distance::Elsewhere || can.remote)
                && (!copies || can.copies)
                && (!atomics || can.atomics)
                && forced.is_none_or(|forced| forced == each.name);
            prop_assert_eq!(choice.candidates.contains(&each.name), fits);
        }
        // CHO-2
        let rank = |name: &String| {
            (!of(name).capabilities.one_sided, theirs.iter().position(|other| other == name).unwrap())
        };
        prop_assert!(choice.candidates.windows(2).all(|two| rank(&two[0]) < rank(&two[1])));
    }
}

#[test]
fn reasons_say_what_is_the_matter() {
    let shm = Capabilities { copies: true, atomics: false, remote: false, one_sided: true };
    let ours = [Ours { name: "shm".to_owned(), capabilities: shm, broken: None }];
    let why = |distance, need, forced| {
        let choice = choose(&ours, &["shm"], distance, need, forced);
        choice.passed.first().map(|(_, why)| why.clone())
    };
    let copies = Need { copies: true, atomics: false };
    let atomics = Need { copies: false, atomics: true };
    assert_eq!(why(Distance::Host, copies, None), None);
    assert!(why(Distance::Elsewhere, copies, None).unwrap().contains("another host"));
    assert!(why(Distance::Host, atomics, None).unwrap().contains("atomic"));
    assert!(why(Distance::Host, copies, Some("tcp")).unwrap().contains("'tcp' was asked for"));
}
