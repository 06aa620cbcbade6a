//! Gateways of several hosts in one process, over real connections, without processes and without Python.

mod dialers;
mod ends;
mod garbage;
mod losses;
mod member;
mod road;
mod visits;

use member::{Job, Member, Site, attach, is_up};
use std::sync::Arc;

/// A controller and two connected hosts.
struct Trio {
    job: Job,
    controller: Arc<Member>,
    sites: [Arc<Site>; 2],
}

impl Trio {
    /// `lead` turns each host's address into the one to dial.
    fn new(fan_out: u32, lead: impl Fn(usize, String) -> String) -> Self {
        let job = Job::new();
        let controller = Member::controller();
        let sites = [1, 2].map(|host| Site::new(&job.host, host));
        let addresses: Vec<_> = sites.iter().enumerate().map(|(nth, site)| lead(nth, site.address())).collect();
        let outcomes = attach(&controller, &job, &addresses, fan_out);
        assert!(outcomes.iter().all(is_up), "{outcomes:?}");
        Self { job, controller, sites }
    }

    fn plain(fan_out: u32) -> Self {
        Self::new(fan_out, |_, address| address)
    }

    /// Nobody has died, and no message has come back.
    fn all_well(&self) {
        for member in self.sites.iter().map(|site| &site.member).chain([&self.controller]) {
            assert!(member.heard(|heard| heard.died.is_empty() && heard.bounced.is_empty()));
        }
    }
}

impl Drop for Trio {
    fn drop(&mut self) {
        self.controller.close();
        self.sites.iter().for_each(|site| site.close());
    }
}
