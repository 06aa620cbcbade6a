//! Credential files: read with care, and written completely or not at all.

use super::error::CredentialError;
use rustix::fs::{Mode, OFlags};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub(crate) const CA: &str = "ca.pem";
pub(crate) const CA_KEY: &str = "ca.key";
pub(crate) const CRL: &str = "crl.pem";

/// No credential file is longer; a list of 10,000 revocations takes a tenth of it.
const MOST: u64 = 4 << 20;

/// Distinguishes versions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// The stamp of a file; none if it does not exist.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some(Stamp { inode: meta.ino(), size: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) })
}

fn read_open(file: File, path: &Path) -> Result<Vec<u8>, CredentialError> {
    let mut bytes = Vec::new();
    let n = file.take(MOST).read_to_end(&mut bytes).map_err(CredentialError::io("read", path))?;
    if n as u64 >= MOST {
        return Err(CredentialError::Broken { path: path.into(), why: "it is far too long".to_owned() });
    }
    Ok(bytes)
}

fn read_text(file: File, path: &Path) -> Result<String, CredentialError> {
    let invalid =
        |error| CredentialError::io("read", path)(std::io::Error::new(std::io::ErrorKind::InvalidData, error));
    String::from_utf8(read_open(file, path)?).map_err(|error| invalid(error.utf8_error()))
}

fn open(path: &Path) -> Result<File, CredentialError> {
    File::open(path).map_err(CredentialError::io("read", path))
}

pub(crate) fn read(path: &Path) -> Result<String, CredentialError> {
    read_text(open(path)?, path)
}

/// Reads a revocation list. It is signed, so the file need not be trusted.
pub(crate) fn read_list(path: &Path) -> Result<Vec<u8>, CredentialError> {
    read_open(open(path)?, path)
}

/// Reads a file that decides who is trusted, which no other user may have written.
pub(crate) fn read_trusted(path: &Path) -> Result<String, CredentialError> {
    let file = open(path)?;
    let meta = file.metadata().map_err(CredentialError::io("look at", path))?;
    let user = rustix::process::geteuid().as_raw();
    if meta.uid() != user && meta.uid() != 0 {
        return Err(CredentialError::Owner { path: path.into(), owner: meta.uid(), user });
    }
    if meta.mode() & 0o002 != 0 {
        return Err(CredentialError::Writable { path: path.into(), mode: meta.mode() & 0o7777 });
    }
    read_text(file, path)
}

/// Reads a key, which must belong to this user, and be unreadable for others.
pub(crate) fn read_key(path: &Path) -> Result<String, CredentialError> {
    let file = open(path)?;
    // Of the opened file, not of what now has its name.
    let meta = file.metadata().map_err(CredentialError::io("look at", path))?;
    let mode = meta.mode() & 0o7777;
    if mode & !0o600 != 0 {
        return Err(CredentialError::Readable { path: path.into(), mode });
    }
    let user = rustix::process::geteuid().as_raw();
    if meta.uid() != user {
        return Err(CredentialError::Owner { path: path.into(), owner: meta.uid(), user });
    }
    read_text(file, path)
}

/// Makes a folder that only its owner can enter. It must not exist yet.
pub(crate) fn make_dir(path: &Path) -> Result<(), CredentialError> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(CredentialError::Exists { path: path.into() })
        }
        made => made.map_err(CredentialError::io("make the folder", path)),
    }
}

/// Writes a file of mode 0600 so that nobody ever sees a part of it, even after a crash.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), CredentialError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", random()));
    let part = dir.join(name);
    let write = || -> std::io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&part)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        sync_dir(dir);
        Ok(())
    };
    write().map_err(|error| {
        let _ = std::fs::remove_file(&part);
        CredentialError::Io { what: "write", path: path.into(), error }
    })
}

/// A random number for a unique name.
pub(crate) fn random() -> u64 {
    super::provider::random::<8>().map_or(0, u64::from_ne_bytes)
}

/// Syncs a folder's entries to disk. A file system that cannot do that is no reason to fail.
pub(crate) fn sync_dir(dir: &Path) {
    if let Ok(dir) = rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::fs::fsync(&dir);
    }
}

fn broken(what: &'static str) -> impl FnOnce(pem::Error) -> CredentialError {
    move |error| {
        let why = match error {
            pem::Error::NoItemsFound => format!("it holds no{}", what.trim_start_matches("read a")),
            other => format!("{other:?}"),
        };
        CredentialError::Crypto { what, why }
    }
}

/// The first certificate of a PEM file.
pub(crate) fn one_certificate(pem: &str) -> Result<CertificateDer<'static>, CredentialError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(broken("read a certificate"))
}

/// The revocation list of a PEM file.
pub(crate) fn one_list(pem: &str) -> Result<CertificateRevocationListDer<'static>, CredentialError> {
    CertificateRevocationListDer::from_pem_slice(pem.as_bytes()).map_err(broken("read a list of revocations"))
}

/// The key of a PEM file.
pub(crate) fn one_key(pem: &str) -> Result<PrivateKeyDer<'static>, CredentialError> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(broken("read a key"))
}

/// Adds the file's name to an error.
pub(crate) fn in_file<T>(path: PathBuf, read: Result<T, CredentialError>) -> Result<T, CredentialError> {
    read.map_err(|error| match error {
        CredentialError::Crypto { why, .. } => CredentialError::Broken { path, why },
        CredentialError::NotOurs => CredentialError::Broken { path, why: CredentialError::NotOurs.to_string() },
        other => other,
    })
}
