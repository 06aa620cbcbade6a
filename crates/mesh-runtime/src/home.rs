//! The host that a process is on: what people call it, what its agent starts fork servers with, and the job's own folder there.

use crate::fork_server::{ForkServerSpec, Spare, Standby};
use crate::locks::lock;
use mesh_proto::HostNo;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Tells a fork server what its host is called.
const HOST_NAME: &str = "_MESH_HOST";
/// Tells a fork server where the job's folder is.
const SCRATCH: &str = "MESH_HOST_SCRATCH";
/// The newest list of revocations that the host was sent.
const REVOKED: &str = "revoked.crl";

/// What a host agent starts fork servers with: its own interpreter and environment, not those of a controller elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct AgentEnvironment {
    /// The command of its interpreter.
    pub(crate) python: Vec<OsString>,
    /// Its environment.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// The job's own folder on this host.
    pub(crate) scratch: Option<PathBuf>,
    /// What can be its first fork server.
    pub(crate) standby: Spare,
}

/// See the module. Both are said once.
#[derive(Debug, Default)]
pub(crate) struct Home {
    name: OnceLock<String>,
    environment: OnceLock<AgentEnvironment>,
    /// What can be the first fork server of a script.
    script_standby: Spare,
}

impl Home {
    /// The first word counts.
    pub(crate) fn set(&self, name: String, environment: AgentEnvironment) {
        let _ = self.name.set(name);
        let _ = self.environment.set(environment);
    }

    /// Keeps a copy of the script for its first fork server.
    pub(crate) fn keep_standby(&self, standby: Standby) {
        *lock(&self.script_standby) = Some(standby);
    }

    /// What people call the host, if that was said.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.get().map(String::as_str)
    }

    /// What people call the host, which has this number.
    pub(crate) fn called(&self, host: HostNo) -> String {
        self.name().map_or_else(|| format!("host {host}"), str::to_owned)
    }

    /// The standby of the script, or of the host if the host's own interpreter is asked for; if there is one still.
    pub(crate) fn standby_for(&self, fork_server: &ForkServerSpec) -> Option<Standby> {
        let standby = lock(&self.script_standby).take();
        if let Some(standby) = standby {
            return Some(standby);
        }
        let home = self.environment.get().filter(|home| fork_server.argv.starts_with(&home.python))?;
        lock(&home.standby).take()
    }

    /// What was asked for elsewhere is started with this host's interpreter and environment; what is said of the latter
    /// comes on top.
    pub(crate) fn settle_in(&self, fork_server: &mut ForkServerSpec) {
        let (Some(home), Some(name)) = (self.environment.get(), self.name()) else { return };
        let rest = fork_server.argv.drain(..).skip(1);
        let argv = home.python.iter().cloned().chain(rest).collect();
        let own = home.env.iter().filter(|(key, _)| fork_server.env.iter().all(|(said, _)| said != key));
        let mut env: Vec<_> = own.cloned().chain(fork_server.env.iter().cloned()).collect();
        env.push((HOST_NAME.into(), name.into()));
        env.extend(home.scratch.iter().map(|scratch| (SCRATCH.into(), scratch.into())));
        *fork_server = ForkServerSpec { argv, env, plan: std::mem::take(&mut fork_server.plan) };
    }

    /// Has the job's processes on this host find a list of revocations.
    pub(crate) fn hand_on_revocations(&self, list: &[u8]) -> io::Result<()> {
        let Some(scratch) = self.environment.get().and_then(|home| home.scratch.as_ref()) else { return Ok(()) };
        // Whole or not at all; it is signed, so that whoever reads it need not trust the file.
        let part = scratch.join(".revoked");
        std::fs::write(&part, list).and_then(|()| std::fs::rename(&part, scratch.join(REVOKED)))
    }
}
