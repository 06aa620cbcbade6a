//! Measures one rustls stream over loopback between two processes: the yardstick for traffic between hosts.
//!
//! `rawtls SEND RECEIVE TIMES` starts a server process, sends it SEND bytes in writes of 256 KiB, waits for RECEIVE
//! bytes, and prints the seconds this took, one a line, TIMES times after one warm-up. TLS 1.3 with AES-128-GCM; what
//! arrives is decrypted into a reused buffer and not kept, so nothing that keeps it can be quicker. `rawtls serve` is
//! the other process: it writes its port and certificate to stdout, and its key nowhere.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, ConnectionCommon, RootCertStore, ServerConfig, ServerConnection, SideData,
    StreamOwned,
};

type Failure = Box<dyn Error>;

const NAME: &str = "rawtls.local";
/// Bytes per write and read.
const CHUNK: usize = 256 << 10;
/// Holds the length of what follows, and of the answer.
const HEAD: usize = 16;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => serve(),
        [send, receive, times] => measure(send.parse()?, receive.parse()?, times.parse()?),
        _ => Err("usage: rawtls SEND RECEIVE TIMES (bytes, bytes, count)".into()),
    }
}

/// The server process; ends when this is dropped, however this process ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(send: usize, receive: usize, times: usize) -> Result<(), Failure> {
    let mut server = Server(
        Command::new(std::env::current_exe()?)
            .arg("serve")
            .stdin(Stdio::piped()) // its end tells the server that this process is gone
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let mut said = BufReader::new(server.0.stdout.take().ok_or("the server has no stdout")?);
    let mut line = String::new();
    said.read_line(&mut line)?;
    let (port, length) = line.trim().split_once(' ').ok_or("the server did not start")?;
    let mut certificate = vec![0; length.parse()?];
    said.read_exact(&mut certificate)?;

    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(certificate))?;
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse()?))?;
    let connection = ClientConnection::new(Arc::new(config), ServerName::try_from(NAME)?)?;
    let mut stream = open(connection, tcp)?;

    // Write it beforehand, so that no page is touched for the first time while it is sent.
    let data = vec![1_u8; HEAD + send];
    let mut buffer = vec![0_u8; CHUNK];
    let mut taken = Vec::with_capacity(times);
    for _ in 0..=times {
        let start = Instant::now();
        let mut head = [0_u8; HEAD];
        head[..8].copy_from_slice(&(send as u64).to_le_bytes());
        head[8..].copy_from_slice(&(receive as u64).to_le_bytes());
        if send <= CHUNK {
            // One record, as for a small message.
            buffer.clear();
            buffer.extend_from_slice(&head);
            buffer.extend_from_slice(&data[..send]);
            stream.write_all(&buffer)?;
            buffer.resize(CHUNK, 0);
        } else {
            stream.write_all(&head)?;
            write_chunks(&mut stream, &data[..send])?;
        }
        stream.flush()?;
        read_exactly(&mut stream, receive, &mut buffer)?;
        taken.push(start.elapsed());
    }
    let mut out = io::stdout().lock();
    for each in &taken[1..] {
        writeln!(out, "{:.9}", each.as_secs_f64())?;
    }
    Ok(())
}

fn serve() -> Result<(), Failure> {
    let issued = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
    let certificate = issued.cert.der();
    let key = PrivatePkcs8KeyDer::from(issued.signing_key.serialize_der());
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{} {}", listener.local_addr()?.port(), certificate.len())?;
    out.write_all(certificate)?;
    out.flush()?;
    std::thread::spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        std::process::exit(0);
    });

    let (tcp, _) = listener.accept()?;
    let mut stream = open(ServerConnection::new(Arc::new(config))?, tcp)?;
    let mut buffer = vec![0_u8; CHUNK];
    let mut answer = Vec::new();
    loop {
        let mut head = [0_u8; HEAD];
        match stream.read_exact(&mut head) {
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let (length, reply) = head.split_at(8);
        let length = usize::try_from(u64::from_le_bytes(length.try_into()?))?;
        let reply = usize::try_from(u64::from_le_bytes(reply.try_into()?))?;
        read_exactly(&mut stream, length, &mut buffer)?;
        answer.resize(reply, 1);
        write_chunks(&mut stream, &answer)?;
        stream.flush()?;
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..ring::default_provider()
    })
}

fn open<C, S>(mut connection: C, tcp: TcpStream) -> io::Result<StreamOwned<C, TcpStream>>
where
    C: std::ops::DerefMut<Target = ConnectionCommon<S>>,
    S: SideData,
{
    tcp.set_nodelay(true)?;
    // Encrypts a whole write before it is sent; by default rustls takes 64 KiB at a time.
    connection.set_buffer_limit(Some(2 * CHUNK));
    Ok(StreamOwned::new(connection, tcp))
}

fn write_chunks(stream: &mut impl Write, data: &[u8]) -> io::Result<()> {
    data.chunks(CHUNK).try_for_each(|chunk| stream.write_all(chunk))
}

fn read_exactly(stream: &mut impl Read, length: usize, buffer: &mut [u8]) -> io::Result<()> {
    let mut left = length;
    while left > 0 {
        let size = left.min(buffer.len());
        match stream.read(&mut buffer[..size])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => left -= got,
        }
    }
    Ok(())
}
