//! Figures, beside those of rustls's own blocking stream in the same run:
//! `cargo test --release -p mesh-tls tests::speed -- --ignored --nocapture --test-threads 1`.

use super::*;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

const BLOCK: usize = 256 * 1024;
const TOTAL: usize = 2 << 30;

/// The cost of a transfer: wall time, and the two threads' core time, which does not depend on other load.
struct Took {
    wall: Duration,
    sender: Duration,
    receiver: Duration,
}

fn cpu_time() -> Duration {
    Duration::try_from(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)).unwrap()
}

fn rate(name: &str, took: &Took) -> f64 {
    let per = |time: Duration| TOTAL as f64 / time.as_secs_f64() / 1e9;
    let (wall, sender, receiver) = (per(took.wall), per(took.sender), per(took.receiver));
    println!("{name:<32} {wall:.2} GB/s; by time on a core: sender {sender:.2}, receiver {receiver:.2} GB/s");
    wall
}

fn poll(fd: std::os::fd::BorrowedFd<'_>, flags: rustix::event::PollFlags) {
    let _ = rustix::event::poll(&mut [rustix::event::PollFd::from_borrowed_fd(fd, flags)], None);
}

fn ours(job: &Job, backwards: bool) -> Took {
    let (client, server) = pair(job);
    let (out, into) = if backwards { (server, client) } else { (client, server) };
    let (mut reader, _rw) = into.into_split().unwrap();
    let (_wr, mut writer) = out.into_split().unwrap();
    let reading = std::thread::spawn(move || {
        let mut buf = vec![0; BLOCK];
        let mut got = 0;
        while got < TOTAL {
            match reader.read(&mut buf) {
                Ok(n) => got += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    poll(reader.as_fd(), rustix::event::PollFlags::IN)
                }
                Err(error) => panic!("{error}"),
            }
        }
        cpu_time()
    });
    let (start, cpu) = (Instant::now(), cpu_time());
    let block = vec![7; BLOCK];
    let mut sent = 0;
    while sent < TOTAL {
        match writer.write(&[IoSlice::new(&block[sent % BLOCK..])]) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => poll(writer.as_fd(), rustix::event::PollFlags::OUT),
            Err(error) => panic!("{error}"),
        }
    }
    while !writer.flush().unwrap() {
        poll(writer.as_fd(), rustix::event::PollFlags::OUT);
    }
    let sender = cpu_time() - cpu;
    let receiver = reading.join().unwrap();
    Took { wall: start.elapsed(), sender, receiver }
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let server = listener.accept().unwrap().0;
    for socket in [&client, &server] {
        socket.set_nodelay(true).unwrap();
    }
    (client, server)
}

type Blocking<C> = rustls::StreamOwned<C, TcpStream>;

fn plain_pair(job: &Job) -> (Blocking<rustls::ClientConnection>, Blocking<rustls::ServerConnection>) {
    let (client, server) = sockets();
    let (config, name) = job.controller.client(None).unwrap();
    let client = rustls::ClientConnection::new(config, name).map(|conn| Blocking::new(conn, client)).unwrap();
    let server = rustls::ServerConnection::new(job.host.server()).map(|conn| Blocking::new(conn, server)).unwrap();
    (client, server)
}

fn plain(job: &Job) -> Took {
    let (mut client, mut server) = plain_pair(job);
    let reading = std::thread::spawn(move || {
        let mut buf = vec![0; BLOCK];
        server.read_exact(&mut buf[..1]).unwrap();
        let (start, cpu) = (Instant::now(), cpu_time());
        let mut got = 0;
        while got < TOTAL {
            got += server.read(&mut buf).unwrap();
        }
        (start.elapsed(), cpu_time() - cpu)
    });
    client.write_all(&[1]).unwrap();
    client.flush().unwrap();
    let cpu = cpu_time();
    let block = vec![7; BLOCK];
    for _ in 0..TOTAL / BLOCK {
        client.write_all(&block).unwrap();
    }
    let sender = cpu_time() - cpu;
    let (wall, receiver) = reading.join().unwrap();
    Took { wall, sender, receiver }
}

#[test]
#[ignore = "a measurement"]
fn throughput() {
    let job = Job::new();
    for round in 0..3 {
        let rustls = rate("rustls, blocking stream", &plain(&job));
        let up = rate("this, client to server", &ours(&job, false));
        let down = rate("this, server to client", &ours(&job, true));
        println!("round {round}: {:.2}x, {:.2}x", up / rustls, down / rustls);
    }
}

#[test]
#[ignore = "a measurement"]
fn round_trip() {
    const TIMES: u32 = 20_000;
    let job = Job::new();
    for _ in 0..3 {
        let (mut client, mut server) = pair(&job);
        let echo = std::thread::spawn(move || {
            let mut buf = [0; 4096];
            loop {
                match server.read(&mut buf) {
                    Ok(0) => return,
                    Ok(n) => drop(server.write(&[IoSlice::new(&buf[..n])]).unwrap()),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        poll(server.as_fd(), rustix::event::PollFlags::IN);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let start = Instant::now();
        for _ in 0..TIMES {
            client.write(&[IoSlice::new(&[1; 300])]).unwrap();
            poll(client.as_fd(), rustix::event::PollFlags::IN);
            assert_eq!(client.read(&mut [0; 4096]).unwrap(), 300);
        }
        println!("this, 300 bytes there and back    {:?}", start.elapsed() / TIMES);
        client.close_notify();
        echo.join().unwrap();

        let (mut client, mut server) = plain_pair(&job);
        let echo = std::thread::spawn(move || {
            let mut buf = [0; 4096];
            while let Ok(n @ 1..) = server.read(&mut buf) {
                server.write_all(&buf[..n]).unwrap();
            }
        });
        client.write_all(&[1; 300]).unwrap();
        client.read_exact(&mut [0; 300]).unwrap();
        let start = Instant::now();
        for _ in 0..TIMES {
            client.write_all(&[1; 300]).unwrap();
            client.read_exact(&mut [0; 300]).unwrap();
        }
        println!("rustls, 300 bytes there and back  {:?}", start.elapsed() / TIMES);
        client.conn.send_close_notify();
        let _ = client.flush();
        drop(client);
        echo.join().unwrap();
    }
}

#[test]
#[ignore = "a measurement"]
fn handshakes() {
    const TIMES: u32 = 300;
    let job = Job::new();
    let door = Door::open(&job.host, Limits::default());
    let start = Instant::now();
    for _ in 0..TIMES {
        door.dial(&job.controller, None).unwrap();
        door.joined();
    }
    println!("a handshake, both sides  {:?}", start.elapsed() / TIMES);
}
