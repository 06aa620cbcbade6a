//! This side's credentials, read again from time to time: certificates are renewed and revoked while a job runs.

use crate::error::RuntimeError;
use crate::locks::lock;
use crate::tls::Identity;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
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

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Credentials {
    identity: OnceLock<Arc<Identity>>,
    recheck: Mutex<Recheck>,
}

/// Whether two paths name the same folder.
fn same_folder(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

impl Credentials {
    pub(super) fn get(&self) -> Option<&Arc<Identity>> {
        self.identity.get()
    }

    /// Returns the credentials that were set first. They must be from the same folder.
    pub(super) fn agree(&self, identity: &Arc<Identity>) -> Result<&Arc<Identity>, RuntimeError> {
        let known = self.identity.get_or_init(|| Arc::clone(identity));
        if same_folder(known.dir(), identity.dir()) {
            Ok(known)
        } else {
            Err(RuntimeError::OtherCredentials { dir: known.dir().to_owned() })
        }
    }

    /// Checks again, if it is time.
    pub(super) fn recheck(&self, now: Duration) -> Option<Looked> {
        let identity = self.identity.get()?;
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
        Some(Looked { identity: Arc::clone(identity), revoked, complaint: is_news.then_some(complaint) })
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
