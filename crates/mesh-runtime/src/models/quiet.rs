//! A process that writes a line and then sends, the thread that reads pipes, and the one that polls the links (LOG-9).

use super::model;
use crate::logs::quiet::PipeWatch;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// A pipe, a link, and the set that both are in.
#[derive(Default)]
struct Kernel {
    unread: bool,
    sent: bool,
    watched: bool,
    ready: bool,
}

impl Kernel {
    fn write(&mut self) {
        self.unread = true;
        self.ready = self.watched;
    }

    fn watch(&mut self) {
        self.watched = true;
        self.ready = self.unread;
    }

    /// Whether the pipe is reported, and the link.
    fn poll(&mut self) -> (bool, bool) {
        let pipe = std::mem::take(&mut self.ready) && self.unread;
        self.watched &= !pipe;
        (pipe, self.sent)
    }
}

struct Host {
    kernel: Mutex<Kernel>,
    watch: PipeWatch,
    /// The line is on its way to be shown, and known to be.
    noted: AtomicBool,
}

impl Host {
    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    fn read(&self) {
        self.watch.begin(|_| self.kernel().watch());
        if self.kernel().unread {
            self.noted.store(true, Ordering::SeqCst);
            self.kernel().unread = false;
        }
    }

    /// Whether a message came, and is quiet.
    fn poll(&self) -> Option<bool> {
        self.watch.poll();
        let (pipe, link) = self.kernel().poll();
        if pipe {
            self.watch.written();
        }
        link.then(|| self.watch.is_quiet())
    }
}

#[test]
fn loom_what_a_quiet_message_follows_has_been_read() {
    static QUIET: AtomicUsize = AtomicUsize::new(0);
    model(5, || {
        let host = Arc::new(Host {
            kernel: Mutex::new(Kernel::default()),
            watch: PipeWatch::default(),
            noted: AtomicBool::new(false),
        });
        let writer = loom::thread::spawn({
            let host = Arc::clone(&host);
            move || {
                host.kernel().write();
                host.kernel().sent = true;
            }
        });
        let reader = loom::thread::spawn({
            let host = Arc::clone(&host);
            move || {
                host.read();
                host.read();
            }
        });
        if (0..2).find_map(|_| host.poll()) == Some(true) {
            QUIET.fetch_add(1, Ordering::SeqCst);
            assert!(host.noted.load(Ordering::SeqCst), "LOG-9: the line is still in the pipe");
        }
        writer.join().unwrap();
        reader.join().unwrap();
    });
    assert!(QUIET.load(Ordering::SeqCst) > 0, "no message was quiet");
}
