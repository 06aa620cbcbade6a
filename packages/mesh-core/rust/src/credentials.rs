//! Folders of credentials, created and read by Python.

use crate::door;
use crate::errors::raise_credentials;
use crate::time::duration;
use mesh_runtime::tls::{self, CredentialError, Entry, Store};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// A certificate: its role, job, serial number, fingerprint, when its validity begins and ends, and when it was revoked.
type Told = (&'static str, String, String, String, f64, f64, Option<f64>);

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn tell(entry: Entry) -> Told {
    let Entry { facts, revoked } = entry;
    let (from, until) = (seconds(facts.not_before), seconds(facts.not_after));
    (facts.role.name(), facts.job, facts.serial, facts.fingerprint, from, until, revoked.map(seconds))
}

fn leave<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, CredentialError> + Send) -> PyResult<T> {
    door::outside(py, body).map_err(|error| raise_credentials(py, &error))
}

/// Creates a folder for a new job. The certificates of its controller and hosts are valid for the given seconds.
#[pyfunction]
pub(crate) fn credentials_new(py: Python<'_>, path: PathBuf, lifetime: f64, hosts: f64) -> PyResult<()> {
    let (lifetime, hosts) = (duration(lifetime)?, duration(hosts)?);
    leave(py, || Store::create(&path, lifetime, hosts).map(drop))
}

/// Whether a folder of credentials has an authority, or is a member's.
#[pyfunction]
pub(crate) fn credentials_owner(py: Python<'_>, path: PathBuf) -> PyResult<bool> {
    leave(py, || Store::is_owners(&path))
}

/// Returns the contents of a folder's certificates.
#[pyfunction]
pub(crate) fn credentials_list(py: Python<'_>, path: PathBuf) -> PyResult<Vec<Told>> {
    leave(py, || Ok(tls::certificates_in(&path)?.into_iter().map(tell).collect()))
}

/// Creates a folder for a host, or for an observer, who may look into jobs and do nothing else.
#[pyfunction]
pub(crate) fn credentials_issue(
    py: Python<'_>,
    path: PathBuf,
    out: PathBuf,
    lifetime: f64,
    observer: bool,
) -> PyResult<Told> {
    let lifetime = duration(lifetime)?;
    leave(py, || {
        let store = Store::open(&path)?;
        let made = if observer { store.issue_observer(&out, lifetime) } else { store.issue_host(&out, lifetime) };
        made.map(|facts| tell(Entry { facts, revoked: None }))
    })
}

/// Issues new certificates for the keys in a folder.
#[pyfunction]
pub(crate) fn credentials_renew(py: Python<'_>, path: PathBuf, out: PathBuf, lifetime: f64) -> PyResult<Vec<Told>> {
    let lifetime = duration(lifetime)?;
    leave(py, || {
        let made = Store::open(&path)?.renew(&out, lifetime)?;
        Ok(made.into_iter().map(|facts| tell(Entry { facts, revoked: None })).collect())
    })
}

/// Revokes a certificate, named by its serial number, its fingerprint, the beginning of either, or its file.
#[pyfunction]
pub(crate) fn credentials_revoke(py: Python<'_>, path: PathBuf, which: &str) -> PyResult<Told> {
    leave(py, || Store::open(&path)?.revoke(which).map(tell))
}
