//! Meshes of other hosts, and when they are forgotten.

use crate::afar::Afar;
use mesh_proto::{Placement, ProcAddr};

const fn at(mesh: u64, rank: u32) -> ProcAddr {
    ProcAddr { mesh, rank, host: 1 }
}

#[test]
fn a_mesh_is_forgotten_with_its_last_rank() {
    let mut afar = Afar::default();
    for mesh in 1..=1000 {
        afar.note(mesh, &Placement::On(1), 2);
    }
    for mesh in 1..=1000 {
        afar.ended(at(mesh, 1));
        afar.ended(at(mesh, 1));
        assert_eq!(afar.len(), 1001 - mesh as usize);
        afar.ended(at(mesh, 0));
    }
    assert_eq!(afar.len(), 0);
    afar.ended(at(7, 0));
}

#[test]
fn ranks_that_were_not_sent_to_do_not_count_for_those_that_were() {
    let mut afar = Afar::default();
    afar.note(5, &Placement::On(1), 1);
    afar.ended(at(5, 3));
    assert_eq!(afar.on(1), [at(5, 0)]);
    afar.note(5, &Placement::On(1), 2);
    afar.ended(at(5, 0));
    assert_eq!((afar.len(), afar.on(2).len()), (1, 0));
    afar.ended(at(5, 1));
    assert_eq!(afar.len(), 0);
}
