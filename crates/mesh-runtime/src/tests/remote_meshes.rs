//! Meshes of other hosts, and when they are forgotten.

use crate::remote_meshes::RemoteMeshes;
use mesh_proto::{Placement, ProcAddr};
use mesh_topology::{Region, Slice};

const fn at(mesh: u64, rank: u32) -> ProcAddr {
    ProcAddr { mesh, rank, host: 1 }
}

#[test]
fn a_mesh_is_forgotten_with_its_last_rank() {
    let remote = RemoteMeshes::new(0);
    for mesh in 1..=1000 {
        remote.note(mesh, &Placement::On(1), 2);
    }
    for mesh in 1..=1000 {
        remote.ended(at(mesh, 1));
        remote.ended(at(mesh, 1));
        assert_eq!(remote.len(), 1001 - mesh as usize);
        remote.ended(at(mesh, 0));
    }
    assert_eq!(remote.len(), 0);
    remote.ended(at(7, 0));
}

#[test]
fn ranks_that_were_not_sent_to_do_not_count_for_those_that_were() {
    let remote = RemoteMeshes::new(0);
    remote.note(5, &Placement::On(1), 1);
    remote.ended(at(5, 3));
    assert_eq!(remote.on(1), [at(5, 0)]);
    remote.note(5, &Placement::On(1), 2);
    remote.ended(at(5, 0));
    assert_eq!((remote.len(), remote.on(2).len()), (1, 0));
    remote.ended(at(5, 1));
    assert_eq!(remote.len(), 0);
}

/// Hosts 1 and 2 have two ranks each.
fn spread() -> Placement {
    let hosts = Slice::new(1, &[2], &[1]).and_then(|slice| Region::new(&["hosts"], slice));
    Placement::spread(hosts.unwrap(), 2)
}

fn told(remote: &RemoteMeshes, host: u32) -> Vec<ProcAddr> {
    let mut on = remote.on(host);
    on.sort_unstable();
    on
}

// AFR-1
#[test]
fn ranks_that_are_known_one_at_a_time_end_with_their_own_hosts() {
    let ranks: Vec<ProcAddr> = (0..4).map(|rank| spread().addr(5, rank)).collect();
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        // Something is sent to the whole mesh before any of them, after each, or never.
        for whole_at in 0..=5 {
            let remote = RemoteMeshes::new(0);
            for (place, rank) in order.into_iter().enumerate() {
                if place == whole_at {
                    remote.note(5, &spread(), 4);
                }
                remote.note_one(ranks[rank]);
            }
            if whole_at == 4 {
                remote.note(5, &spread(), 4);
            }
            assert_eq!(told(&remote, 1), ranks[..2], "order {order:?}, all at {whole_at}");
            assert_eq!(told(&remote, 2), ranks[2..], "order {order:?}, all at {whole_at}");
            for rank in order {
                assert_eq!(remote.len(), 1);
                remote.ended(ranks[rank]);
            }
            assert_eq!(remote.len(), 0);
        }
    }
}

#[test]
fn one_rank_says_nothing_of_others() {
    let remote = RemoteMeshes::new(0);
    remote.note_one(at(5, 3));
    assert_eq!(remote.on(1), [at(5, 3)]);
    remote.ended(at(5, 0));
    assert_eq!(remote.len(), 1);
    remote.ended(at(5, 3));
    assert_eq!(remote.len(), 0);
}
