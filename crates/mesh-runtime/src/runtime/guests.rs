//! Scripts that join the job of a controller that outlives them, and leave it again.
//!
//! A guest is a process of the controller's host that was not forked: it connected by itself, and its link is that
//! connection. Each has its own address, so nothing meant for an earlier guest reaches it, and nothing that an earlier
//! one still sends is accepted (MOV-2): all guests are incarnations of one rank.
//!
//! GST-1: a guest that has lost its link is no longer part of the job, and every use of its runtime says so; its
//! process lives on.
//! GST-2: what a guest has spawned stays when it goes (FAM-5).

use super::Runtime;
use crate::error::RuntimeError;
use mesh_proto::control::{Goodbye, Told};
use mesh_proto::{EndReason, Ended, Event, Exit, GUEST_MESHES, Moved, ProcAddr, Run};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

impl Runtime {
    /// Admits a script to the job as guest `number`: the process `pid`, at the other end of `link`. The previous guest,
    /// if any, is no longer part of the job. Returns the new one's seat on the host's board.
    ///
    /// # Errors
    /// If the runtime is closed, is not the controller's, or the connection cannot be used.
    pub fn let_in(&self, link: OwnedFd, number: u32, pid: u32) -> Result<u32, RuntimeError> {
        self.usable()?;
        if self.me != ProcAddr::CONTROLLER {
            return Err(RuntimeError::NotController);
        }
        rustix::io::ioctl_fionbio(&link, true).map_err(RuntimeError::os("ioctl"))?;
        let addr = guest(number);
        if number > 0 {
            self.dismiss(number - 1);
            self.hand_over(number)?;
        }
        self.agent.admit(self, addr, link, pid)
    }

    /// Where another process of this user finds the host's board.
    pub fn board_path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.board.fd().as_raw_fd())
    }

    /// Tells everybody that this guest has the rank of those before it (MOV-2).
    fn hand_over(&self, number: u32) -> Result<(), RuntimeError> {
        let run = Run { first: 0, count: 1, at: guest(number), incarnation: number };
        let moved = Moved { mesh: GUEST_MESHES, version: number, runs: vec![run], left: vec![guest(number - 1)] };
        self.publish(Told::Moved(moved)).map(drop)
    }

    /// Ends a guest's part in the job, whether its process lives or not.
    pub fn dismiss(&self, number: u32) {
        let addr = guest(number);
        if let Some(link) = self.switch.link_of(addr) {
            link.close(&self.reactor);
        }
        // What it wanted can no longer be learnt.
        self.on_proc(addr, Event::Goodbye(EndReason::Unstated));
        self.on_proc(addr, Event::Exited(Exit::Unknown));
    }

    /// Leaves the job, as a script that has joined it: what it sent arrives, and what it spawned stays (GST-2).
    pub fn leave(&self, limit: Duration) {
        if let Some(up) = self.switch.links().into_iter().find(|_| self.me.is_guest() && !self.is_closed()) {
            self.drain_answers(limit);
            self.standing.leave();
            up.send(&self.reactor, &Goodbye { reason: EndReason::Unstated }.frame(self.me, up.peer));
            up.drain(&self.reactor, limit);
            // What it shares lives as long as this process: the agent hangs up once it has read and mapped all of it.
            up.wait_end(limit);
        }
        self.close(Duration::ZERO);
    }

    /// Whether this script had joined a job, and has lost it.
    pub fn has_lost_job(&self) -> bool {
        self.standing.is_lost()
    }

    /// This script's link has ended without a goodbye: it is no longer part of the job (GST-1).
    pub(crate) fn lose_job(&self) {
        if !self.standing.lose() {
            return;
        }
        let Some(this) = self.this() else { return };
        let end = move || {
            let ended = Arc::new(Ended::unmade(EndReason::JobLost));
            this.calls.fail_all(&this.reactor, &ended);
            this.close(Duration::ZERO);
        };
        // Not on a thread that reads links, which ends with the runtime.
        let _ = std::thread::Builder::new().name("mesh-lost".to_owned()).spawn(end);
    }
}

fn guest(number: u32) -> ProcAddr {
    ProcAddr { mesh: GUEST_MESHES + u64::from(number), rank: 0, host: 0 }
}
