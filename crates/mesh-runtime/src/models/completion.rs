use super::model;
use crate::completion::{Completion, Fate};
use crate::reactor::Reactor;
use crate::standing::Standing;
use crate::wait::Waiter;
use loom::cell::UnsafeCell;
use loom::thread::spawn;
use std::sync::{Arc, Weak};

fn finish(completion: &Completion, reactor: &Reactor, fate: Fate, store: impl FnOnce()) -> bool {
    let first = completion.begin(fate);
    if first {
        store();
        let (waiters, _) = completion.show();
        waiters.iter().for_each(|waiter| waiter.notify(reactor));
    }
    first
}

/// CMP-1, without a wake-up that is lost.
#[test]
fn loom_who_waits_for_a_completion_is_woken_and_sees_what_was_stored() {
    model(3, || {
        let reactor = Arc::new(Reactor::new().unwrap());
        let completion = Arc::new(Completion::of(Weak::new(), Arc::new(Standing::new())));
        let stored = Arc::new(UnsafeCell::new(0));
        let racers = [1, 2].map(|number| {
            let (reactor, completion, stored) = (reactor.clone(), completion.clone(), stored.clone());
            spawn(move || {
                finish(&completion, &reactor, Fate::Status(number), || {
                    // SAFETY: loom fails the test where two are at it at once.
                    stored.with_mut(|stored| unsafe { *stored = number });
                })
            })
        });
        completion.expect();
        while !completion.is_done() {
            Waiter::current().park(None, &|| completion.is_done());
        }
        // SAFETY: as above.
        let seen = stored.with(|stored| unsafe { *stored });
        assert_eq!(completion.fate(), Some(Fate::Status(seen)));
        let firsts = racers.into_iter().filter_map(|racer| racer.join().ok()).filter(|first| *first).count();
        assert_eq!(firsts, 1);
    });
}

#[test]
fn loom_who_waits_for_tokens_gets_them_all() {
    model(3, || {
        let reactor = Arc::new(Reactor::new().unwrap());
        let list = Arc::new(Completion::of(Weak::new(), Arc::new(Standing::new())));
        let senders = [1, 2].map(|token| {
            let (reactor, list) = (reactor.clone(), list.clone());
            spawn(move || list.add(token).0.iter().for_each(|waiter| waiter.notify(&*reactor)))
        });
        let mut taken = Vec::new();
        while taken.len() < 2 {
            list.expect();
            while list.arrived() == 0 {
                Waiter::current().park(None, &|| list.arrived() > 0);
            }
            list.leave();
            taken.extend(list.take());
        }
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}
