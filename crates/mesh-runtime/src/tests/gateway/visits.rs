//! Looking into a job through one of its hosts (VIS-2).

use super::Trio;
use crate::tests::SOON;
use crate::visits::{VisitError, Visited, jobs_at, visit};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

impl Trio {
    /// Visits through a host. Returns the visitor's end, the controller's, and how the visit ends.
    fn visitor(&self, nth: usize) -> (UnixStream, UnixStream, crate::VisitEnd) {
        let before = self.controller.heard(|heard| heard.visitors);
        let address = self.sites[nth].address();
        let Visited { socket, end } = visit(&address, &self.job.observer, self.controller.gateway.job(), SOON).unwrap();
        self.controller.until("a visitor", |heard| heard.visitors == before + 1);
        (socket.into(), self.controller.visits.take_visitor().unwrap().into(), end)
    }
}

fn ends(mut stream: UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    rest
}

#[test]
fn what_a_visitor_and_the_controller_say_arrives_both_ways() {
    let trio = Trio::plain(1);
    let address = trio.sites[1].address();
    assert_eq!(jobs_at(&address, &trio.job.observer, SOON).unwrap(), [trio.controller.gateway.job()]);
    let (mut visitor, mut answerer, end) = trio.visitor(1);
    let said: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || {
            let mut heard = vec![0; 2_000_000];
            answerer.read_exact(&mut heard).unwrap();
            answerer.write_all(&heard).unwrap();
            answerer
        });
        visitor.write_all(&said).unwrap();
        let mut heard = vec![0; said.len()];
        visitor.read_exact(&mut heard).unwrap();
        assert!(heard == said);
        drop(visitor);
        assert_eq!(ends(echo.join().unwrap()), [], "the visitor has left");
    });
    assert_eq!(end.why(), None);
    trio.all_well();
}

#[test]
fn a_visit_ends_with_the_answerer_the_host_and_the_job() {
    let trio = Trio::plain(2);
    let (visitor, answerer, end) = trio.visitor(0);
    drop(answerer);
    assert_eq!((ends(visitor), end.why()), (vec![], None));

    let (through, answerer, end) = trio.visitor(0);
    let (visitor, _kept, other) = trio.visitor(1);
    trio.sites[0].member.gateway.end_job(mesh_proto::hosts::Parting::Stopped, "its agent was stopped");
    assert_eq!(ends(through), []);
    assert!(end.why().is_some_and(|why| why.contains("its agent was stopped")), "{:?}", end.why());
    assert_eq!(ends(answerer), [], "the host has gone, and its visitor with it");

    trio.controller.close();
    assert_eq!(ends(visitor), []);
    assert_eq!(other.why(), None, "the end of the job is no failure");
    let job = trio.controller.gateway.job();
    let refused = visit(&trio.sites[1].address(), &trio.job.observer, job, SOON);
    // It is no longer let in; if it was just in time, it is sent away.
    match refused {
        Err(VisitError::Refused { .. } | VisitError::Dial(_) | VisitError::Strange { .. }) => {}
        Ok(Visited { socket, end }) => {
            assert_eq!(ends(socket.into()), []);
            assert!(end.why().is_some());
        }
        Err(error) => panic!("{error}"),
    }
}
