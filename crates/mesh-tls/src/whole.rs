//! A folder that appears with its full contents, or not at all.

use super::error::CredentialError;
use super::files;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Has `fill` make the contents of a folder, which must not exist yet, or be this user's and empty.
///
/// The contents are made beside it, in a folder that nobody else can enter, which is then renamed in one step. If that
/// is impossible, as for a mounted volume, they are made in place. `undo` takes back what `fill` did elsewhere.
pub(crate) fn make<T>(
    dir: &Path,
    fill: impl Fn(&Path) -> Result<T, CredentialError>,
    undo: impl Fn(&T),
) -> Result<T, CredentialError> {
    let empty = open_empty(dir)?;
    let staged = beside(dir);
    let made = files::make_dir(&staged).and_then(|()| {
        let filled = fill(&staged)?;
        match std::fs::rename(&staged, dir) {
            Ok(()) => Ok(filled),
            Err(error) => {
                undo(&filled);
                Err(match error.kind() {
                    // Somebody else was faster.
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotADirectory => {
                        CredentialError::Exists { path: dir.into() }
                    }
                    _ => CredentialError::io("make the folder", &staged)(error),
                })
            }
        }
    });
    match made {
        Ok(filled) => {
            files::sync_dir(dir.parent().unwrap_or(Path::new(".")));
            Ok(filled)
        }
        Err(error) => {
            let _ = std::fs::remove_dir_all(&staged);
            match empty {
                Some(at) if has_a_fixed_name(&error) => fill_in_place(dir, &at, fill),
                _ => Err(named_after(error, &staged, dir)),
            }
        }
    }
}

/// A name for the future `dir`, in the same folder.
fn beside(dir: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(dir.file_name().unwrap_or_default());
    name.push(format!(".{:016x}", files::random()));
    dir.parent().unwrap_or(Path::new(".")).join(name)
}

/// Opens the folder, if it exists. Fails unless it belongs to this user and is empty.
fn open_empty(dir: &Path) -> Result<Option<OwnedFd>, CredentialError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let at = match rustix::fs::open(dir, flags, Mode::empty()) {
        Ok(at) => at,
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        // A file, or a link.
        Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
            return Err(CredentialError::Exists { path: dir.into() });
        }
        Err(errno) => return Err(CredentialError::io("open", dir)(errno.into())),
    };
    let failed = |errno: rustix::io::Errno| CredentialError::io("look at", dir)(errno.into());
    let (owner, user) = (rustix::fs::fstat(&at).map_err(failed)?.st_uid, rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(CredentialError::Foreign { path: dir.into(), owner, user });
    }
    let entries = rustix::fs::Dir::read_from(&at).map_err(failed)?;
    for entry in entries {
        if !matches!(entry.map_err(failed)?.file_name().to_bytes(), b"." | b"..") {
            return Err(CredentialError::Exists { path: dir.into() });
        }
    }
    Ok(Some(at))
}

/// Whether a folder cannot be replaced: something is mounted there, or its parent belongs to someone else.
fn has_a_fixed_name(error: &CredentialError) -> bool {
    use io::ErrorKind as Kind;
    let CredentialError::Io { what: "make the folder", error, .. } = error else { return false };
    matches!(
        error.kind(),
        Kind::ResourceBusy | Kind::PermissionDenied | Kind::ReadOnlyFilesystem | Kind::CrossesDevices
    )
}

fn fill_in_place<T>(
    dir: &Path,
    at: &OwnedFd,
    fill: impl Fn(&Path) -> Result<T, CredentialError>,
) -> Result<T, CredentialError> {
    rustix::fs::fchmod(at, Mode::RWXU).map_err(|errno| CredentialError::io("close to others", dir)(errno.into()))?;
    let same = |meta: std::fs::Metadata| {
        rustix::fs::fstat(at).is_ok_and(|opened| (opened.st_dev, opened.st_ino) == (meta.dev(), meta.ino()))
    };
    if !std::fs::symlink_metadata(dir).is_ok_and(same) {
        return Err(CredentialError::Exists { path: dir.into() });
    }
    fill(dir).inspect_err(|_| {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
        }
    })
}

/// Turns an error about the folder made beside `dir` into one about `dir`.
fn named_after(error: CredentialError, staged: &Path, dir: &Path) -> CredentialError {
    match error {
        CredentialError::Io { what, path, error } => {
            let path = path
                .strip_prefix(staged)
                .map_or(path.clone(), |rest| if rest.as_os_str().is_empty() { dir.into() } else { dir.join(rest) });
            CredentialError::Io { what, path, error }
        }
        other => other,
    }
}
