//! A listener without free descriptors; in a separate process, since it uses them all up.

use mesh_runtime::tls::{Identity, Limits, Listener, ListenerEvent, Role, Store, dial};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_listener_that_is_out_of_descriptors_says_so_once_and_goes_on_when_there_are_some() {
    let dir = std::env::temp_dir().join(format!("mesh-no-fds-{}", std::process::id()));
    let store = Store::create(&dir, LONG, LONG).unwrap();
    let controller = Identity::load(store.dir()).unwrap();
    let host = Identity::load_as(store.dir(), Role::Host).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    let (tell, told) = mpsc::channel();
    let listener = Listener::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))], host, Limits::default(), move |event| {
        let _ = tell.send(event);
    })
    .unwrap();
    let addr = listener.addrs()[0];

    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(64);
    setrlimit(Resource::Nofile, limit).unwrap();
    // The client's end takes the last one: none is left to accept with.
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    drop(all.pop());
    let waiting = TcpStream::connect(addr).unwrap();
    assert!(matches!(told.recv_timeout(LONG).unwrap(), ListenerEvent::Stuck { .. }));
    assert!(
        matches!(told.recv_timeout(Duration::from_millis(300)), Err(mpsc::RecvTimeoutError::Timeout)),
        "told twice"
    );
    drop(waiting);
    drop(all);

    let dialed = dial(&addr.to_string(), &controller, None, LONG).unwrap();
    assert_eq!(dialed.peer.role, Role::Host);
    loop {
        match told.recv_timeout(LONG).unwrap() {
            ListenerEvent::Joined { peer, .. } => break assert_eq!(peer, controller.own()),
            ListenerEvent::Refused { .. } => {}
            ListenerEvent::Stuck { errno } => panic!("{errno}"),
        }
    }
}
