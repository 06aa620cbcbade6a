//! What a host and its processes use, as the kernel tells: for whoever looks in from another machine.

use mesh_proto::{HostNo, Stage};
use std::fmt::Write as _;
use std::fs::read_to_string;

/// What one process uses; nothing if it is gone.
#[derive(Debug, PartialEq)]
pub(crate) struct Used {
    /// As `ps` shows it: T if a signal has stopped it.
    pub(crate) state: char,
    /// Seconds of processor time.
    pub(crate) cpu: f64,
    pub(crate) threads: u64,
    /// Bytes in place, shared or not.
    pub(crate) rss: u64,
    /// The same with what is shared divided among those that share it; only if asked for.
    pub(crate) pss: Option<u64>,
}

impl Used {
    pub(crate) fn of(pid: u32, pss: bool) -> Option<Self> {
        let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut used = Self::read(&stat, rustix::param::clock_ticks_per_second(), rustix::param::page_size() as u64)?;
        if pss && let Ok(rollup) = read_to_string(format!("/proc/{pid}/smaps_rollup")) {
            used.pss = kilobytes(&rollup, "Pss:");
        }
        Some(used)
    }

    fn read(stat: &str, tick: u64, page: u64) -> Option<Self> {
        // The name before it is in parentheses, and may hold anything.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        #[expect(clippy::cast_precision_loss, reason = "a number of ticks that a process lives to see")]
        let cpu = (number(11)? + number(12)?) as f64 / tick as f64;
        let state = fields.first()?.chars().next()?;
        Some(Self { state, cpu, threads: number(17)?, rss: number(21)? * page, pss: None })
    }

    pub(crate) fn write(&self, out: &mut String) {
        let Self { state, cpu, threads, rss, pss } = self;
        let pss = pss.map_or("null".to_owned(), |pss| pss.to_string());
        let state = if state.is_ascii_alphabetic() { *state } else { '?' };
        let _ = write!(out, r#"["{state}",{cpu},{rss},{pss},{threads}]"#);
    }
}

fn kilobytes(text: &str, label: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(label))?;
    line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
}

/// What the machine is called.
pub(crate) fn machine() -> String {
    read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim_end().to_owned()).unwrap_or_default()
}

/// The host itself: its number, CPUs, load, memory, and what of that is free.
pub(crate) fn write_host(host: HostNo, out: &mut String) {
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let load = read_to_string("/proc/loadavg").ok();
    let load: f64 = load.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0);
    let memory = read_to_string("/proc/meminfo").unwrap_or_default();
    let (all, free) = (kilobytes(&memory, "MemTotal:"), kilobytes(&memory, "MemAvailable:"));
    let _ = write!(
        out,
        r#"{{"host":{host},"cpus":{cpus},"load":{load},"memory":{},"free":{}"#,
        all.unwrap_or(0),
        free.unwrap_or(0)
    );
}

/// How a proc is, in a word.
pub(crate) fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Starting => "starting",
        Stage::Running => "running",
        Stage::Stopping => "stopping",
        Stage::Ending | Stage::Ended => "ending",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_something() {
        let used = Used::of(std::process::id(), true).unwrap();
        assert!(used.rss > 0 && used.threads > 0 && used.state == 'R' || used.state == 'S');
        let mut out = String::new();
        used.write(&mut out);
        assert!(out.starts_with(&format!(r#"["{}","#, used.state)), "{out}");
    }

    #[test]
    fn a_name_may_look_like_the_rest() {
        let stat = "7 (a) R 1) (b) T 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 3 0 99 1000 25 rest";
        let expected = Used { state: 'T', cpu: 2.0, threads: 3, rss: 25 * 4096, pss: None };
        assert_eq!(Used::read(stat, 100, 4096), Some(expected));
        assert_eq!(Used::read("7 (a", 100, 4096), None);
    }
}
