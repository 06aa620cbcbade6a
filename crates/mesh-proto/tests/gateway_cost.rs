//! The cost of a gateway's tick, by how often it looks at its connections.

use mesh_proto::HostNo;
use mesh_proto::control::Terms;
use mesh_proto::hosts::gateway::{Event, Gateway, GatewayOptions, Wire};
use mesh_proto::hosts::{HostSet, Packet};
use std::cell::Cell;
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(10);

/// Connections on which nothing is received, and which count how often they are asked.
#[derive(Debug, Default)]
struct Quiet {
    looks: Cell<u64>,
}

impl Wire for Quiet {
    type Connection = HostNo;

    fn send(&self, _: &HostNo, _: &Packet, _: Duration) {}

    fn is_open(&self, _: &HostNo) -> bool {
        true
    }

    fn has_room(&self, _: &HostNo) -> bool {
        true
    }

    fn heard_at(&self, _: &HostNo) -> Duration {
        self.looks.set(self.looks.get() + 1);
        Duration::ZERO
    }

    fn sent_at(&self, _: &HostNo) -> Duration {
        Duration::ZERO
    }

    fn is_same(&self, one: &HostNo, other: &HostNo) -> bool {
        one == other
    }

    fn wake(&self) {}
}

/// The controller of a job, connected to all of its hosts.
fn controller(hosts: u32, hold: Duration) -> (Gateway<Quiet>, Quiet) {
    let (mut gateway, wire) = (Gateway::new(0, 1), Quiet::default());
    let options = GatewayOptions { window: WINDOW, fan_out: hosts, patience: Duration::ZERO, hold };
    let addresses: Vec<Option<String>> = (1..=hosts).map(|host| Some(format!("host{host}"))).collect();
    gateway.attach(1, &addresses, &options);
    let _ = gateway.on(Event::Proven(HostSet::range(1, hosts)), Duration::ZERO, &wire);
    for host in 1..=hosts {
        let terms = Some(Terms { window: WINDOW });
        let up = Event::Connected { host, connection: host, incarnation: 7, terms, dialed: true };
        let _ = gateway.on(up, Duration::ZERO, &wire);
    }
    (gateway, wire)
}

/// How many connections `count` ticks looked at before any heartbeat was due, and how long one tick took.
fn ticks(hosts: u32, hold: Duration, count: u32) -> (u64, Duration) {
    let (mut gateway, wire) = controller(hosts, hold);
    let _ = gateway.on(Event::Tick, Duration::from_millis(1), &wire);
    wire.looks.set(0);
    let begun = Instant::now();
    for tick in 0..count {
        let now = Duration::from_millis(2) + Duration::from_micros(200) * tick;
        let actions = gateway.on(Event::Tick, now, &wire);
        assert!(actions.is_empty());
        gateway.next_tick(now);
    }
    (wire.looks.get(), begun.elapsed() / count)
}

#[test]
fn a_tick_at_which_nothing_is_due_looks_at_no_host() {
    for hold in [Duration::ZERO, 6 * WINDOW] {
        let (looks, each) = ticks(10_000, hold, 1000);
        println!("a tick with 10,000 idle hosts, hold {hold:?}: {each:?}, {looks} looks");
        assert_eq!(looks, 0);
    }
}

#[test]
fn every_heartbeat_is_looked_at_when_it_is_due() {
    let (mut gateway, wire) = controller(100, Duration::ZERO);
    let first = gateway.next_tick(Duration::ZERO);
    assert_eq!(first, WINDOW / 10, "the first ping");
    let _ = gateway.on(Event::Tick, first, &wire);
    assert_eq!(wire.looks.get(), 100);
    let _ = gateway.on(Event::Tick, first, &wire);
    assert_eq!(wire.looks.get(), 100, "once");
}
