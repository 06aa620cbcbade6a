//! Measures what three processes cost a machine: bytes there and back through one in the middle, or past it, only.
//!
//! A call to another host goes from the caller over TCP to that host's agent, and from there over a Unix socket to the
//! actor's process; a call on the same host takes only the Unix socket. `chain far BYTES TIMES` sends BYTES over TCP to
//! a second process, which passes them over a Unix socket to a third, and waits for them to come back the same way;
//! `chain near BYTES TIMES` has no second. All block in `read`. Prints the seconds of each of TIMES round trips, one a
//! line, after a warm-up.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

type Failure = Box<dyn Error>;

/// Round trips of the warm-up.
const WARM_UP: usize = 50;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["near", size, times] => {
            let (_end, unix) = Process::with_socket()?;
            measure(unix, size.parse()?, times.parse()?)
        }
        ["far", size, times] => {
            let (_middle, said) = Process::spawn(&["middle", size], Stdio::null())?;
            let mut port = String::new();
            BufReader::new(said).read_line(&mut port)?;
            let tcp = TcpStream::connect((Ipv4Addr::LOCALHOST, port.trim().parse()?))?;
            tcp.set_nodelay(true)?;
            measure(tcp, size.parse()?, times.parse()?)
        }
        ["middle", size] => middle(size.parse()?),
        ["end"] => end(),
        _ => Err("usage: chain near|far BYTES TIMES".into()),
    }
}

/// Another process of this program; it ends when its socket does, at the latest when this is dropped.
struct Process(Child);

impl Process {
    fn spawn(arguments: &[&str], stdin: Stdio) -> Result<(Self, ChildStdout), Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.args(arguments).stdin(stdin).stdout(Stdio::piped()).spawn()?;
        let said = child.stdout.take().ok_or("the process has no stdout")?;
        Ok((Self(child), said))
    }

    /// Starts the last process. Returns it and the socket to it.
    fn with_socket() -> Result<(Self, UnixStream), Failure> {
        let (mine, its) = UnixStream::pair()?;
        let (process, _) = Self::spawn(&["end"], OwnedFd::from(its).into())?;
        Ok((process, mine))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(mut stream: impl Read + Write, size: usize, times: usize) -> Result<(), Failure> {
    let mut data = vec![1_u8; size];
    let mut taken = Vec::with_capacity(times);
    for turn in 0..WARM_UP + times {
        let start = Instant::now();
        stream.write_all(&data)?;
        stream.read_exact(&mut data)?;
        if turn >= WARM_UP {
            taken.push(start.elapsed());
        }
    }
    let mut out = io::stdout().lock();
    for each in taken {
        writeln!(out, "{:.9}", each.as_secs_f64())?;
    }
    Ok(())
}

/// Passes on what comes over TCP, and what comes back, until either side is gone.
fn middle(size: usize) -> Result<(), Failure> {
    let (_end, mut unix) = Process::with_socket()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{}", listener.local_addr()?.port())?;
    out.flush()?;
    let (mut tcp, _) = listener.accept()?;
    tcp.set_nodelay(true)?;
    let mut data = vec![0_u8; size];
    while more(tcp.read_exact(&mut data))? {
        unix.write_all(&data)?;
        unix.read_exact(&mut data)?;
        tcp.write_all(&data)?;
    }
    Ok(())
}

/// Echoes what comes from stdin, which is the socket, until the other side is gone.
fn end() -> Result<(), Failure> {
    let mut unix = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut buffer = vec![0_u8; 1 << 16];
    loop {
        match unix.read(&mut buffer)? {
            0 => return Ok(()),
            got => unix.write_all(&buffer[..got])?,
        }
    }
}

fn more(read: io::Result<()>) -> io::Result<bool> {
    match read {
        Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        other => other.map(|()| true),
    }
}
