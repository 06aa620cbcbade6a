//! Clocks that are set while a job runs: certificates depend on the wall clock, liveness does not.

use super::*;
use mesh_proto::hosts::{Beat, Heartbeat};

const DAY: Duration = Duration::from_secs(24 * 3600);
const WINDOW: Duration = Duration::from_secs(10);

/// What a gateway asks about a peer that is heard each second, for a minute in whose middle the clock is set.
fn minute(job: &Job, set: impl Fn(SystemTime) -> SystemTime) -> Result<(), Reason> {
    let peer = job.host.own();
    let began = SystemTime::now();
    let mut heartbeat = Heartbeat::new(WINDOW, Duration::ZERO);
    for second in 1..60 {
        let now = Duration::from_secs(second);
        heartbeat.heard(now);
        loop {
            match heartbeat.on_tick(now) {
                Beat::Quiet => break,
                Beat::Ping => {}
                beat => panic!("{beat:?} of a host that lives, in second {second}"),
            }
        }
        let wall = if second < 30 { began + now } else { set(began + now) };
        job.controller.check_peer(&peer, wall)?;
    }
    Ok(())
}

#[test]
fn a_clock_that_is_set_by_a_day_costs_no_host_that_is_connected() {
    let job = Job::new();
    assert_eq!(minute(&job, |wall| wall + DAY), Ok(()));
    // Its certificate is not valid yet then, but was when it was admitted.
    assert_eq!(minute(&job, |wall| wall - DAY), Ok(()));
    assert_eq!(minute(&job, |wall| wall + 8 * DAY), Err(Reason::Expired), "certificates of a week");
}
