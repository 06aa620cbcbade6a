//! This side's credentials, read again from time to time: certificates are renewed and revoked while a job runs.
//!
//! CRD-1: all hosts that a job has at one time use the same credentials. Once all of them are gone, others may be used.

use crate::error::RuntimeError;
use crate::locks::lock;
use crate::tls::Identity;
use mesh_proto::HostNo;
use mesh_proto::hosts::HostSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often the credentials and those of connected hosts are checked again.
const RECHECK: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Recheck {
    /// When the next check is due.
    at: Duration,
    /// The problem that the last check found, or empty.
    complaint: String,
}

/// The result of checking the credentials again.
pub(super) struct Looked {
    /// Checks the certificates of connected hosts.
    pub(super) identity: Arc<Identity>,
    /// The list of revocations, if it changed.
    pub(super) revoked: Option<Vec<u8>>,
    /// The problem, if it is new.
    pub(super) complaint: Option<String>,
}

/// The credentials in use, and for which hosts.
#[derive(Debug, Default)]
struct InUse {
    identity: Option<Arc<Identity>>,
    hosts: Vec<HostSet>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    in_use: Mutex<InUse>,
    recheck: Mutex<Recheck>,
}

/// Whether two paths name the same folder.
fn same_folder(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

impl Credentials {
    pub(super) fn get(&self) -> Option<Arc<Identity>> {
        lock(&self.in_use).identity.clone()
    }

    /// Returns the credentials to use for more hosts: those that are in use, which must be from the same folder, or these if all
    /// hosts that used others are gone (CRD-1). `changed` runs in that case.
    pub(super) fn agree(
        &self,
        identity: &Arc<Identity>,
        hosts: HostSet,
        is_gone: impl Fn(HostNo) -> bool,
        changed: impl FnOnce(),
    ) -> Result<Arc<Identity>, RuntimeError> {
        let mut in_use = lock(&self.in_use);
        // Of hosts that came and went, nothing is kept.
        in_use.hosts.retain(|hosts| !hosts.iter().all(&is_gone));
        let agreed = match in_use.identity.take() {
            Some(known) if same_folder(known.dir(), identity.dir()) => known,
            Some(known) if !in_use.hosts.is_empty() => {
                let dir = known.dir().to_owned();
                in_use.identity = Some(known);
                return Err(RuntimeError::OtherCredentials { dir });
            }
            before => {
                if before.is_some() {
                    changed();
                }
                Arc::clone(identity)
            }
        };
        in_use.identity = Some(Arc::clone(&agreed));
        in_use.hosts.push(hosts);
        Ok(agreed)
    }

    /// Checks again, if it is time.
    pub(super) fn recheck(&self, now: Duration) -> Option<Looked> {
        let identity = self.get()?;
        let mut recheck = lock(&self.recheck);
        if now < recheck.at {
            return None;
        }
        recheck.at = now + RECHECK;
        let (revoked, complaint) = match identity.reload_if_changed() {
            Ok(changed) => (identity.revocations().filter(|_| changed), String::new()),
            Err(error) => (None, format!("failed to read the credentials again: {error}")),
        };
        // A lasting problem is reported once.
        let is_news = !complaint.is_empty() && complaint != recheck.complaint;
        recheck.complaint.clone_from(&complaint);
        Some(Looked { identity, revoked, complaint: is_news.then_some(complaint) })
    }

    /// When the next check is due.
    pub(super) fn due(&self) -> Duration {
        lock(&self.recheck).at
    }

    /// Has the next turn check again.
    pub(super) fn recheck_soon(&self) {
        lock(&self.recheck).at = Duration::ZERO;
    }
}
