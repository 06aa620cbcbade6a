//! A proxy between two hosts that a test blocks and breaks.

use crate::locks::lock;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

#[derive(Default)]
struct State {
    /// Both ends of the connections made so far.
    ends: Mutex<Vec<[TcpStream; 2]>>,
    blocked: Mutex<bool>,
    opened: Condvar,
    closed: AtomicBool,
    /// The direction in which the next connection is damaged.
    damage: Mutex<Option<Way>>,
}

/// From the dialer, or to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    There,
    Back,
}

impl State {
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, mut damaged: bool) {
        let mut buffer = [0; 16 << 10];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            if std::mem::take(&mut damaged) {
                buffer[n / 2] ^= 0x40;
            }
            let blocked = lock(&self.blocked);
            drop(self.opened.wait_while(blocked, |blocked| *blocked).unwrap_or_else(PoisonError::into_inner));
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    fn cut(&self) {
        for end in lock(&self.ends).drain(..).flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// Dialing its address reaches a host; once it is dropped, connections are refused.
pub(super) struct Road {
    address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Road {
    pub(super) fn to(address: &str) -> Self {
        let to: SocketAddr = address.parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, state) = (listener.local_addr().unwrap(), Arc::new(State::default()));
        let on = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let mut passing = Vec::new();
            for here in listener.incoming().map_while(Result::ok) {
                if on.closed.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(there) = TcpStream::connect(to) else { continue };
                let clone = |end: &TcpStream| end.try_clone().unwrap();
                lock(&on.ends).push([clone(&here), clone(&there)]);
                let damage = lock(&on.damage).take();
                for (from, to, way) in [(clone(&here), clone(&there), Way::There), (there, here, Way::Back)] {
                    let on = Arc::clone(&on);
                    passing.push(std::thread::spawn(move || on.pass(from, to, damage == Some(way))));
                }
            }
            drop(listener);
            on.cut();
            passing.into_iter().for_each(|thread| thread.join().unwrap());
        });
        Self { address, state, thread: Some(thread) }
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Breaks all connections; new ones can be made.
    pub(super) fn cut(&self) {
        self.state.cut();
    }

    /// Breaks all connections. The next one has a byte of its handshake changed.
    pub(super) fn damage(&self, way: Way) {
        *lock(&self.state.damage) = Some(way);
        self.cut();
    }

    /// Whether the connection that was to be damaged has been made.
    pub(super) fn has_damaged(&self) -> bool {
        lock(&self.state.damage).is_none()
    }

    /// Blocks or unblocks all traffic.
    pub(super) fn block(&self, blocked: bool) {
        *lock(&self.state.blocked) = blocked;
        self.state.opened.notify_all();
    }

    /// Writes garbage into all connections.
    pub(super) fn garble(&self) {
        for end in lock(&self.state.ends).iter_mut().flatten() {
            let _ = end.write_all(&[0x5a; 64]);
        }
    }
}

impl Drop for Road {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::SeqCst);
        // Blocked bytes never arrive.
        self.cut();
        // Wake the thread, which takes no more connections.
        let _ = TcpStream::connect(self.address);
        self.block(false);
        let _ = self.thread.take().unwrap().join();
    }
}
