//! `mesh-sim`: a job of many hosts in virtual time, as tables and curves.

use mesh_sim::{Figures, Model, charts, figures, measure, table};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "usage: mesh-sim [options]
       mesh-sim measure

Runs jobs of many hosts in virtual time, with the state machines of the runtime, and prints tables of how they fare.
`measure` prints what the state machines cost on this machine.

options:
  --hosts N[,N...]      sizes of the jobs (10,100,1000,10000,100000)
  --procs N             procs on each host (8)
  --fan-out N           to how many hosts one relays (16)
  --latency TIME        of a link, one way: 100us, 1ms (100us)
  --bandwidth GBITS     of each host, each way (10)
  --payload BYTES       arguments of a call (256)
  --reply BYTES         one reply (32)
  --packet TIME         what a gateway spends on a packet, read or written (5us)
  --endpoint TIME       what an endpoint takes (30us)
  --spawn TIME          making one proc (12ms)
  --measured            the costs of the state machines as they are on this machine, not as they were on another
  --out DIR             writes DIR/simulated.md and curves as DIR/simulated-*.svg too";

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("mesh-sim: {message}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run(mut args: impl Iterator<Item = String>) -> Result<(), String> {
    let mut model = Model::default();
    let mut sizes = vec![10, 100, 1_000, 10_000, 100_000];
    let mut out: Option<PathBuf> = None;
    while let Some(option) = args.next() {
        match option.as_str() {
            "measure" => return measured(),
            "--help" | "-h" => {
                println!("{USAGE}");
                return Ok(());
            }
            "--measured" => {
                model.costs = measure::costs();
                continue;
            }
            _ => {}
        }
        let value = args.next().ok_or_else(|| format!("{option} wants a value"))?;
        let bad = || format!("{value:?} is no value for {option}");
        let number = || value.parse::<u32>().ok().filter(|number| *number > 0).ok_or_else(bad);
        match option.as_str() {
            "--hosts" => {
                let parse = |size: &str| size.parse().ok().filter(|size| (1..1_000_000).contains(size));
                sizes = value.split(',').map(parse).collect::<Option<Vec<u32>>>().ok_or_else(bad)?;
            }
            "--procs" => model.procs = number()?,
            "--fan-out" => model.fan_out = number()?,
            "--latency" => model.latency = time(&value).ok_or_else(bad)?,
            "--bandwidth" => model.bandwidth = u64::from(number()?) * 125_000_000,
            "--payload" => model.payload = number()? as usize,
            "--reply" => model.reply = number()? as usize,
            "--packet" => {
                let each = time(&value).ok_or_else(bad)?;
                (model.costs.packet_in, model.costs.packet_out) = (each, each);
            }
            "--endpoint" => model.costs.endpoint = time(&value).ok_or_else(bad)?,
            "--spawn" => model.costs.spawn = time(&value).ok_or_else(bad)?,
            "--out" => out = Some(value.into()),
            other => return Err(format!("there is no option {other}")),
        }
    }
    let mut all: Vec<Figures> = Vec::new();
    for hosts in sizes {
        let begun = Instant::now();
        all.push(figures(&Model { hosts, ..model.clone() }));
        eprintln!("{hosts} hosts: {:.1} s of real time", begun.elapsed().as_secs_f64());
    }
    let page = table(&model, &all);
    print!("{page}");
    if let Some(folder) = out {
        let failed = |error: std::io::Error| format!("cannot write to {}: {error}", folder.display());
        std::fs::create_dir_all(&folder).map_err(failed)?;
        std::fs::write(folder.join("simulated.md"), page).map_err(failed)?;
        for (name, chart) in charts(&all) {
            std::fs::write(folder.join(format!("simulated-{name}.svg")), chart.svg()).map_err(failed)?;
        }
    }
    Ok(())
}

fn measured() -> Result<(), String> {
    for (what, cost) in measure::measure().map_err(|error| format!("cannot measure: {error}"))? {
        println!("{:>9.3} µs  {what}", cost.as_nanos() as f64 / 1e3);
    }
    Ok(())
}

/// 100us, 2ms, 1s.
fn time(text: &str) -> Option<Duration> {
    let units = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let (digits, unit) = units.iter().find_map(|(name, nanos)| Some((text.strip_suffix(name)?, *nanos)))?;
    Some(Duration::from_nanos(digits.parse::<u64>().ok()?.checked_mul(unit)?))
}
