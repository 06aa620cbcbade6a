//! Figures as tables and curves.

use crate::chart::{Chart, Series};
use crate::model::Model;
use crate::node::Load;
use crate::scenario::{Figures, Work};
use std::fmt::Write;
use std::time::Duration;

/// The figures as a page of tables.
#[must_use]
pub fn table(model: &Model, all: &[Figures]) -> String {
    let costs = &model.costs;
    let mut out = format!(
        "# A job in virtual time\n\nThe state machines of the runtime, driven by `mesh-sim`: {} procs a host, fan-out \
         {}, links of {} one way and {} Gbit/s, calls with {} bytes of arguments and replies of {} bytes. A gateway \
         spends {} on a packet read and {} on one written, {} ps on a byte, {} on a run of destinations that it \
         numbers, {} on a run of shares that it takes and {} on a reply; an endpoint takes {}, a TLS handshake {} at either end, a proc's \
         start {}.\n",
        model.procs,
        model.fan_out,
        time(model.latency),
        // Bits per second of real networks: far within range.
        model.bandwidth as f64 * 8e-9,
        model.payload,
        model.reply,
        time(costs.packet_in),
        time(costs.packet_out),
        costs.byte_ps,
        time(costs.number),
        time(costs.share),
        time(costs.outcome),
        time(costs.endpoint),
        time(costs.handshake),
        time(costs.spawn),
    );
    let mut line = |text: &str| {
        out.push_str(text);
        out.push('\n');
    };
    line("\n## Times\n");
    line("From the caller's sending to the last host, or to the last reply at the caller.\n");
    line(
        "| hosts | attach | spawn | cast | cast and gather | replies all different | arguments of 1 MiB | \
         leaf dead, all know | relay dead, all know | silent relay dead, all know |",
    );
    line("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for figures in all {
        let mut row = format!("| {} ", count(figures.hosts.into()));
        for value in times(figures) {
            let _ = write!(row, "| {} ", time(value));
        }
        line(&format!("{row}|"));
    }
    for (title, pick) in [
        ("What one cast and gather makes a host do", (|figures| &figures.call) as fn(&Figures) -> &Work),
        ("What attaching and spawning make a host do", |figures| &figures.start),
    ] {
        line(&format!("\n## {title}\n"));
        line("Packets and bytes read and written, acknowledgements included, and time that its gateway is busy.\n");
        line("| hosts | controller | busiest other host | median host |");
        line("| ---: | --- | --- | --- |");
        for figures in all {
            let work = pick(figures);
            let [controller, busiest, median] = [work.controller, work.busiest, work.median].map(load);
            line(&format!("| {} | {controller} | {busiest} | {median} |", count(figures.hosts.into())));
        }
    }
    line("\n## Connections of a host\n");
    line("| hosts | controller | busiest other host | median host |");
    line("| ---: | ---: | ---: | ---: |");
    for figures in all {
        let [controller, busiest, median] =
            [figures.call.controller, figures.call.busiest, figures.call.median].map(|load| load.connections);
        line(&format!("| {} | {controller} | {busiest} | {median} |", count(figures.hosts.into())));
    }
    out
}

/// The figures as pictures: the name and content of each.
#[must_use]
pub fn charts(all: &[Figures]) -> Vec<(&'static str, Chart)> {
    let curve = |name: &str, value: &dyn Fn(&Figures) -> f64| Series {
        name: name.to_owned(),
        points: all.iter().map(|figures| (f64::from(figures.hosts), value(figures))).collect(),
    };
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let times = Chart {
        title: "A job in virtual time".to_owned(),
        across: "hosts".to_owned(),
        up: "milliseconds".to_owned(),
        series: vec![
            curve("attach and spawn", &|figures| millis(figures.attach + figures.spawn)),
            curve("cast", &|figures| millis(figures.cast)),
            curve("cast and gather", &|figures| millis(figures.gather)),
            curve("with 1 MiB", &|figures| millis(figures.large)),
            curve("relay dead, all know", &|figures| millis(figures.relay_dead)),
        ],
    };
    let packets = |load: Load| load.packets as f64;
    let work = Chart {
        title: "Packets of one host for one cast and gather".to_owned(),
        across: "hosts".to_owned(),
        up: "packets read and written".to_owned(),
        series: vec![
            curve("controller", &|figures| packets(figures.call.controller)),
            curve("busiest other host", &|figures| packets(figures.call.busiest)),
            curve("median host", &|figures| packets(figures.call.median)),
        ],
    };
    let kilobytes = |load: Load| load.bytes as f64 / 1e3;
    let bytes = Chart {
        title: "Bytes of one host for one cast and gather".to_owned(),
        across: "hosts".to_owned(),
        up: "kilobytes read and written".to_owned(),
        series: vec![
            curve("controller", &|figures| kilobytes(figures.call.controller)),
            curve("busiest other host", &|figures| kilobytes(figures.call.busiest)),
            curve("median host", &|figures| kilobytes(figures.call.median)),
        ],
    };
    vec![("times", times), ("packets", work), ("bytes", bytes)]
}

fn times(figures: &Figures) -> [Duration; 9] {
    [
        figures.attach,
        figures.spawn,
        figures.cast,
        figures.gather,
        figures.distinct,
        figures.large,
        figures.leaf_dead,
        figures.relay_dead,
        figures.silent_dead,
    ]
}

fn load(load: Load) -> String {
    format!("{} packets, {:.1} kB, {}", count(load.packets), load.bytes as f64 / 1e3, time(load.busy))
}

/// With three significant digits.
fn time(time: Duration) -> String {
    let nanos = time.as_nanos() as f64;
    let (value, unit) = match nanos {
        ..1e3 => (nanos, "ns"),
        ..1e6 => (nanos / 1e3, "µs"),
        ..1e9 => (nanos / 1e6, "ms"),
        _ => (nanos / 1e9, "s"),
    };
    let digits = if value >= 100.0 || value.fract() == 0.0 { 0 } else { 1 + usize::from(value < 10.0) };
    format!("{value:.digits$} {unit}")
}

fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
