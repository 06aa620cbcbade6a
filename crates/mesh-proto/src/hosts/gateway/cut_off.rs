//! A controller that is cut off from all of its hosts, or has slept: GTW-4.

use super::{Gateway, Peer, Wire};
use crate::HostNo;
use crate::hosts::{HostSet, Standing};
use std::time::Duration;

/// A host of the job, and its last signs of life.
struct Sign {
    host: HostNo,
    /// When it was last heard; none if others relay to it and it never was.
    heard: Option<Duration>,
    last: Duration,
}

impl<W: Wire> Gateway<W> {
    /// Since when a connection that should exist is missing.
    pub(super) fn lost_since(&self, peer: &Peer<W::Connection>) -> Option<Duration> {
        peer.lost_since.map(|since| since.max(self.cut_off.back))
    }

    /// Whether this is the controller of a job with a hold.
    fn holds(&self) -> bool {
        self.me == 0 && !self.hold.is_zero()
    }

    /// At every tick: notices that this side is cut off. Checks all hosts only when that may be found.
    pub(super) fn notice_cut_off(&mut self, wire: &W, now: Duration) {
        if !self.holds() {
            return;
        }
        self.notice_sleep(now);
        if self.cut_off.look_at <= now {
            self.held(wire, now);
        }
    }

    /// At the controller of a job with a hold: the hosts that may be silent because this side is, or was until just
    /// now, cut off from all. A host is itself missing if any other was heard well after it.
    pub(super) fn held(&mut self, wire: &W, now: Duration) -> HostSet {
        if !self.holds() {
            return HostSet::default();
        }
        let signs = self.signs(wire);
        let (window, half) = (self.window, self.window / 2);
        let just_back = self.is_just_back(now);
        // The two hosts heard last: every other host is compared with the last one.
        let mut latest: [Option<(Duration, HostNo)>; 2] = [None; 2];
        for sign in &signs {
            let heard = sign.heard.map(|at| (at, sign.host));
            if heard > latest[0] {
                latest = [heard, latest[0]];
            } else if heard > latest[1] {
                latest[1] = heard;
            }
        }
        let alone = |sign: &Sign| {
            let other = latest.into_iter().flatten().find(|(_, host)| *host != sign.host);
            sign.last + half <= now && other.is_none_or(|(at, _)| at <= sign.last + half)
        };
        // Half a window without any of them is enough: the first may be heard again before the window is over.
        let all_silent = latest[0].is_some_and(|(at, _)| at + half <= now);
        if all_silent || signs.iter().any(|sign| sign.last + window <= now && alone(sign)) {
            self.cut_off.at = Some(now);
            self.cut_off.look_at = now;
        } else {
            let silent = latest[0].map(|(at, _)| at + half);
            let ends = signs.iter().map(|sign| sign.last + window).filter(|end| *end > now);
            self.cut_off.look_at = ends.chain(silent).fold(now + half, Duration::min);
        }
        let held = signs.iter().filter(|sign| just_back || alone(sign));
        held.map(|sign| sign.host).collect()
    }

    /// The signs of life of all hosts that are attached and not dead.
    fn signs(&self, wire: &W) -> Vec<Sign> {
        let sign = |(host, peer): (&HostNo, &Peer<W::Connection>)| {
            let attached = peer.incarnation != 0 || peer.introduction.is_some();
            if !attached || self.topology.standing(*host) == Standing::Dead {
                return None;
            }
            let heard = peer.connection.as_ref().map(|connection| wire.heard_at(connection)).or(peer.heard);
            // A host that others relay to was perhaps never heard directly.
            Some(Sign { host: *host, heard, last: heard.or(self.lost_since(peer))? })
        };
        self.peers.iter().filter_map(sign).collect()
    }

    /// Whether this side was cut off until less than a window ago.
    fn is_just_back(&self, now: Duration) -> bool {
        self.cut_off.at.is_some_and(|at| now.saturating_sub(at) < self.window)
    }

    /// Treats a time in which this process did not run as one in which it was cut off: its machine slept, or it was
    /// stopped. Connections lost meanwhile may be noticed, and the first of them restored, before the next tick.
    fn notice_sleep(&mut self, now: Duration) {
        if now.saturating_sub(self.cut_off.ran) > self.window / 2 {
            self.cut_off.at = Some(now);
        }
        self.cut_off.ran = now;
    }

    /// At the controller: a host was connected to. If it is the first, the others' silence counts from now on.
    pub(super) fn back_again(&mut self, now: Duration) {
        if !self.holds() {
            return;
        }
        self.notice_sleep(now);
        if self.is_just_back(now) {
            self.cut_off.at = Some(now);
            self.cut_off.back = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::Packet;

    const SECOND: Duration = Duration::from_secs(1);

    /// A wire over which nothing passes.
    struct Cut;

    impl Wire for Cut {
        type Connection = ();

        fn send(&self, (): &(), _: &Packet, _: Duration) {}

        fn is_open(&self, (): &()) -> bool {
            false
        }

        fn has_room(&self, (): &()) -> bool {
            false
        }

        fn heard_at(&self, (): &()) -> Duration {
            Duration::ZERO
        }

        fn sent_at(&self, (): &()) -> Duration {
            Duration::ZERO
        }

        fn is_same(&self, (): &(), (): &()) -> bool {
            true
        }

        fn wake(&self) {}
    }

    /// A controller that has lost the connections to two hosts, and last checked on them when it heard them.
    fn controller() -> Gateway<Cut> {
        let mut gateway = Gateway::new(0, 1);
        (gateway.window, gateway.hold) = (2 * SECOND, 60 * SECOND);
        assert!(gateway.topology.add_group(1, 2, 16));
        for host in [1, 2] {
            let lost = Peer { incarnation: 1, lost_since: Some(SECOND), heard: Some(SECOND), ..Peer::default() };
            gateway.peers.insert(host, lost);
        }
        gateway.notice_cut_off(&Cut, SECOND);
        gateway
    }

    fn lost_since(gateway: &Gateway<Cut>, host: HostNo) -> Option<Duration> {
        gateway.lost_since(&gateway.peers[&host])
    }

    /// GTW-4: the first host may be back before the next tick.
    #[test]
    fn the_first_host_that_is_back_after_a_sleep_gives_the_others_their_time() {
        let mut gateway = controller();
        let now = 9 * SECOND;
        gateway.back_again(now);
        let first = gateway.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(now));
        assert_eq!(lost_since(&gateway, 2), Some(now));
        assert!(gateway.held(&Cut, now).contains(2));
        // No longer than the window, in which the first is still heard.
        gateway.peers.get_mut(&1).unwrap().heard = Some(now + SECOND);
        gateway.notice_cut_off(&Cut, now + SECOND);
        assert!(!gateway.held(&Cut, now + 2 * SECOND).contains(2));
    }

    #[test]
    fn a_host_that_is_lost_while_the_controller_runs_gets_no_more_time_from_another_that_is_back() {
        let mut gateway = controller();
        let first = gateway.peers.get_mut(&1).unwrap();
        (first.lost_since, first.heard) = (None, Some(3 * SECOND));
        for tenth in 10..30 {
            gateway.notice_cut_off(&Cut, tenth * SECOND / 10);
        }
        gateway.back_again(3 * SECOND);
        assert_eq!(lost_since(&gateway, 2), Some(SECOND));
        assert!(!gateway.held(&Cut, 3 * SECOND).contains(2));
    }
}
