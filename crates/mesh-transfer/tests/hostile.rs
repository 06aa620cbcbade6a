//! Bytes that nobody honest sends: nothing panics, nothing grows, nothing is taken for what it is not (HDL-1).

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use mesh_transfer::{ErrorKind, Handle, MAX_HANDLE, Section};
use proptest::prelude::*;

fn handle() -> impl Strategy<Value = Handle> {
    let section = ("[a-z][a-z0-9_-]{0,20}", prop::collection::vec(any::<u8>(), 0..100));
    let ids = (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<[u8; 16]>());
    let numbers = (any::<u32>(), any::<u32>(), 1..=u32::MAX, any::<bool>());
    let window = (any::<u64>(), any::<prop::sample::Index>(), any::<prop::sample::Index>());
    (ids, numbers, window, "[a-z0-9.é-]{0,30}", prop::collection::btree_map(section.0, section.1, 0..5)).prop_map(
        |((realm, boot, token), (pid, slot, generation, writable), (length, start, len), host, sections)| {
            let inside = |at: prop::sample::Index, limit: u64| {
                if limit == 0 { 0 } else { at.index(usize::try_from(limit).unwrap()) as u64 }
            };
            let start = inside(start, length);
            let len = inside(len, length - start);
            let sections = sections.into_iter().map(|(name, data)| Section { name, data }).collect();
            Handle { realm, boot, pid, host, token, slot, generation, length, start, len, writable, sections }
        },
    )
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(handle in handle()) {
        let bytes = handle.encode();
        prop_assert!(bytes.len() <= MAX_HANDLE);
        prop_assert_eq!(Handle::decode(&bytes).unwrap(), handle);
    }

    #[test]
    fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        prop_assert_eq!(Handle::decode(&bytes).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn changed_handles_are_refused_or_are_what_they_say(
        handle in handle(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
        extra in prop::collection::vec(any::<u8>(), 0..8),
    ) {
        let mut bytes = handle.encode();
        for (at, mask) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        bytes.extend(extra);
        if let Ok(read) = Handle::decode(&bytes) {
            prop_assert_eq!(read.encode(), bytes);
            prop_assert!(read.start.checked_add(read.len).is_some_and(|end| end <= read.length));
        }
    }

    #[test]
    fn slices_stay_inside(handle in handle(), start in any::<u64>(), len in any::<u64>()) {
        match handle.slice(start, len) {
            Ok(slice) => {
                prop_assert!(slice.start >= handle.start);
                prop_assert!(slice.start + slice.len <= handle.start + handle.len);
            }
            Err(error) => {
                prop_assert_eq!(error.kind, ErrorKind::Invalid);
                prop_assert!(start.checked_add(len).is_none_or(|end| end > handle.len));
            }
        }
    }
}

#[test]
fn a_handle_that_is_too_long_is_refused_unread() {
    let bytes = vec![0; MAX_HANDLE + 1];
    assert!(Handle::decode(&bytes).unwrap_err().message.contains("4097 bytes"));
}
