//! The identity of this process: its incarnation and its machine.

use crate::error::{ErrorKind, TransferError};
use crate::handle::{RealmId, Token};
use rustix::process::getpid;
use rustix::rand::{GetRandomFlags, getrandom};

/// This incarnation of this process, as its handles name it.
#[derive(Clone, Debug)]
pub struct Realm {
    /// A random number, drawn once.
    pub id: RealmId,
    /// The machine since its last boot: only processes with the same one can share memory.
    pub boot: [u8; 16],
    /// The process's pid.
    pub pid: u32,
    /// When it started, in ticks since boot; with the pid, it identifies a process for good.
    pub started: u64,
    /// The machine's name, for people.
    pub host: String,
}

impl Realm {
    /// This process, with a fresh number.
    pub fn draw() -> Result<Self, TransferError> {
        let pid = pid();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let started = started_at("/proc/self/stat")
            .ok_or_else(|| TransferError::transport("cannot read /proc/self/stat. Mount /proc in the container."))?;
        Ok(Self { id: random()?, boot: uuid(&boot), pid, started, host: host.trim_end().to_owned() })
    }

    /// An error in a forked copy of the process that this belongs to.
    pub fn check_fork(&self) -> Result<(), TransferError> {
        if pid() == self.pid {
            return Ok(());
        }
        Err(TransferError::new(
            ErrorKind::Forked,
            format!(
                "process {} is a fork of process {}, whose buffers it cannot use. Start processes with spawn or exec, \
                 or fork before the first buffer is made.",
                pid(),
                self.pid
            ),
        ))
    }
}

pub(crate) fn pid() -> u32 {
    getpid().as_raw_nonzero().get().unsigned_abs()
}

/// When that process was started, if it is there and is no zombie.
pub(crate) fn started(pid: u32) -> Option<u64> {
    started_at(&format!("/proc/{pid}/stat"))
}

fn started_at(path: &str) -> Option<u64> {
    start_in(&std::fs::read(path).ok()?)
}

fn start_in(stat: &[u8]) -> Option<u64> {
    // The name, in brackets, may hold anything.
    let behind = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(&stat[behind..]).ok()?.split_ascii_whitespace().collect();
    // The first thread may have ended, and others go on: the state is its own.
    let threads = fields.get(17)?.parse::<u64>().ok()?;
    match *fields.first()? {
        "Z" | "X" if threads <= 1 => None,
        _ => fields.get(19)?.parse().ok(),
    }
}

pub(crate) fn random() -> Result<Token, TransferError> {
    let mut bytes = [0; 16];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).map_err(TransferError::os("draw a random number"))?;
    if got == bytes.len() { Ok(bytes) } else { Err(TransferError::transport("cannot draw a random number")) }
}

fn uuid(text: &str) -> [u8; 16] {
    let digits: Vec<u8> = text.bytes().filter_map(|c| char::from(c).to_digit(16).map(|d| d as u8)).collect();
    std::array::from_fn(|i| match (digits.get(2 * i), digits.get(2 * i + 1)) {
        (Some(high), Some(low)) => high << 4 | low,
        _ => 0,
    })
}

/// The inode of this process's namespace of that kind.
pub(crate) fn namespace(kind: &str) -> u64 {
    let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::start_in;

    fn stat(name: &[u8], state: &str, threads: u32) -> Vec<u8> {
        let behind = format!(") {state} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 {threads} 18 4711 20 21\n");
        [b"77 (", name, behind.as_bytes()].concat()
    }

    #[test]
    fn a_process_has_ended_with_its_last_thread() {
        for name in [b"python".as_slice(), b") Z 1 (", b"\xff\n"] {
            assert_eq!(start_in(&stat(name, "S", 1)), Some(4711));
            assert_eq!(start_in(&stat(name, "Z", 2)), Some(4711));
            assert_eq!(start_in(&stat(name, "Z", 1)), None);
            assert_eq!(start_in(&stat(name, "X", 1)), None);
        }
        assert_eq!(start_in(b""), None);
    }
}
