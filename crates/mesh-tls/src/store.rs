//! The folder of a job's owner: its authority, its controller's identity, and an identity for its hosts to copy.
//!
//! ```text
//! DIR/  ca.pem  ca.key  crl.pem  controller.pem  controller.key   mode 0700, all files 0600
//! DIR/issued/   every certificate that was ever made, by serial number: what can be revoked
//! DIR/host/     ca.pem  crl.pem  host.pem  host.key               all that a host needs; copied to hosts
//! OUT/          ca.pem  crl.pem  observer.pem  observer.key       all that an observer needs
//! ```

use super::authority::{Authority, Revocation, name_of_key};
use super::error::CredentialError;
use super::facts::{PeerFacts, RevocationList, hex};
use super::files::{self, CA, CA_KEY, CRL};
use super::role::Role;
use super::whole;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const ISSUED: &str = "issued";
/// The fewest digits of a serial number or fingerprint that may identify a certificate.
const FEWEST_DIGITS: usize = 6;

/// A job's authority and its certificates, in a folder.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    authority: Arc<Authority>,
}

/// An issued certificate, and whether it was revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its contents.
    pub facts: PeerFacts,
    /// When it was revoked, if it was.
    pub revoked: Option<SystemTime>,
}

impl Store {
    /// Creates a new job's folder, which must not exist yet or be empty.
    ///
    /// # Errors
    /// If something is there, or the folder is another user's, or cannot be written. Then nothing is left behind.
    pub fn create(dir: &Path, lifetime: Duration, hosts: Duration) -> Result<Self, CredentialError> {
        let now = SystemTime::now();
        let authority = Arc::new(Authority::create(now)?);
        let fill = |dir: &Path| {
            let store = Self { dir: dir.into(), authority: Arc::clone(&authority) };
            store.fill(lifetime, hosts, now)
        };
        whole::make(dir, fill, |()| ())?;
        Ok(Self { dir: dir.into(), authority })
    }

    fn fill(&self, lifetime: Duration, hosts: Duration, now: SystemTime) -> Result<(), CredentialError> {
        files::make_dir(&self.dir.join(ISSUED))?;
        files::write(&self.dir.join(CRL), &self.authority.sign_revocations(&[], 1, now)?)?;
        self.issue(&self.dir, Role::Controller, lifetime, now, None)?;
        files::make_dir(&self.dir.join(Role::Host.name()))?;
        self.bundle(&self.dir.join(Role::Host.name()), Role::Host, hosts, now, None)?;
        files::write(&self.dir.join(CA_KEY), &self.authority.key())?;
        // Last: without it, this is not a job's folder.
        files::write(&self.dir.join(CA), self.authority.certificate())
    }

    /// Opens the folder of a job's owner.
    ///
    /// # Errors
    /// If it holds no authority, or others can read its key.
    pub fn open(dir: &Path) -> Result<Self, CredentialError> {
        let (ca, key) = (dir.join(CA), dir.join(CA_KEY));
        if !key.exists() {
            let remedy = if ca.exists() {
                "this folder is a host's; give that of the job's owner, which `mesh credentials new` has made"
            } else {
                "give a folder that `mesh credentials new` has made"
            };
            return Err(CredentialError::None { path: dir.into(), role: "a job's owner", remedy });
        }
        let pem = files::read_key(&key)?;
        let authority = files::in_file(key, Authority::from_pem(&files::read_trusted(&ca)?, &pem))?;
        Ok(Self { dir: dir.into(), authority: Arc::new(authority) })
    }

    /// Whether a folder is a job owner's, with an authority, rather than a host's or an observer's.
    ///
    /// # Errors
    /// If it is neither.
    pub fn is_owners(dir: &Path) -> Result<bool, CredentialError> {
        let owners = dir.join(CA_KEY).exists();
        if !owners && member_in(dir).is_none() {
            let remedy = "give a folder that `mesh credentials new` or `issue` has made";
            return Err(CredentialError::None { path: dir.into(), role: "a job", remedy });
        }
        Ok(owners)
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The job's name.
    #[must_use]
    pub fn job(&self) -> &str {
        self.authority.job()
    }

    /// Creates a folder with everything that a host needs, and no more. Hosts may share one, but only separate ones can
    /// be revoked separately.
    ///
    /// # Errors
    /// If something is there already, or the folder is another user's, or cannot be written. Then nothing is left
    /// behind.
    pub fn issue_host(&self, out: &Path, lifetime: Duration) -> Result<PeerFacts, CredentialError> {
        self.issue_folder(out, Role::Host, lifetime)
    }

    /// Creates a folder with everything that an observer needs, and no more.
    ///
    /// # Errors
    /// As [`Store::issue_host`].
    pub fn issue_observer(&self, out: &Path, lifetime: Duration) -> Result<PeerFacts, CredentialError> {
        self.issue_folder(out, Role::Observer, lifetime)
    }

    fn issue_folder(&self, out: &Path, role: Role, lifetime: Duration) -> Result<PeerFacts, CredentialError> {
        let _lock = self.lock()?;
        let now = SystemTime::now();
        let forget = |facts: &PeerFacts| drop(std::fs::remove_file(self.record(&facts.serial)));
        whole::make(out, |dir| self.bundle(dir, role, lifetime, now, None), forget)
    }

    /// Issues new certificates for the keys in a folder: a host's, an observer's, or the owner's (the controller's, and
    /// that in `host`). Running members adopt them by themselves.
    ///
    /// # Errors
    /// If there are no keys, or all were revoked, or something cannot be written.
    pub fn renew(&self, out: &Path, lifetime: Duration) -> Result<Vec<PeerFacts>, CredentialError> {
        let _lock = self.lock()?;
        let now = SystemTime::now();
        let issued = self.certificates()?;
        let list = self.dir.join(CRL);
        if !list.exists() {
            let (none, number) = revoked_in(&self.dir)?;
            files::write(&list, &self.authority.sign_revocations(&none, number, now)?)?;
        }
        let mut made = Vec::new();
        let mut revoked = None;
        let inner = out.join(Role::Host.name());
        for (dir, role) in [(out, Role::Controller), (out, Role::Host), (out, Role::Observer), (&inner, Role::Host)] {
            let path = dir.join(role.file("key"));
            if !path.exists() {
                continue;
            }
            let ca = dir.join(CA);
            if files::read(&ca)? != self.authority.certificate() {
                return Err(CredentialError::Broken { path: ca, why: "it is another job's".to_owned() });
            }
            let key = files::read_key(&path)?;
            let name = files::in_file(path.clone(), name_of_key(&key))?;
            if issued.iter().any(|entry| entry.revoked.is_some() && entry.facts.key == name) {
                revoked.get_or_insert(path);
                continue;
            }
            made.push(match role {
                Role::Controller => self.issue(dir, role, lifetime, now, Some(&key))?,
                Role::Host | Role::Observer => self.bundle(dir, role, lifetime, now, Some(&key))?,
            });
        }
        if let (true, Some(path)) = (made.is_empty(), revoked) {
            return Err(CredentialError::Revoked { path });
        }
        if made.is_empty() {
            let remedy = "`mesh credentials issue` makes a new folder for a host";
            return Err(CredentialError::None { path: out.into(), role: "a member", remedy });
        }
        Ok(made)
    }

    /// All certificates, oldest first.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn certificates(&self) -> Result<Vec<Entry>, CredentialError> {
        certificates_in(&self.dir)
    }

    /// Revokes a certificate, given by its serial number, its fingerprint, the beginning of either, or its file. All
    /// other certificates for the same key are revoked too, since its owner could show any of them. Members that see
    /// the new list drop the owner at once.
    ///
    /// # Errors
    /// If no certificate matches, or several do.
    pub fn revoke(&self, what: &str) -> Result<Entry, CredentialError> {
        let _lock = self.lock()?;
        let facts = self.find(what)?;
        let (mut revoked, number) = revoked_in(&self.dir)?;
        let issued = self.certificates()?.into_iter().map(|entry| entry.facts);
        let mut gone: Vec<_> = issued.filter(|one| one.key == facts.key).map(|one| one.serial).collect();
        if !gone.contains(&facts.serial) {
            gone.push(facts.serial.clone());
        }
        gone.retain(|serial| revoked.iter().all(|one| one.serial != *serial));
        let before = revoked.iter().find(|one| one.serial == facts.serial).map(|one| one.at);
        if let (true, Some(_)) = (gone.is_empty(), before) {
            return Ok(Entry { facts, revoked: before });
        }
        let now = SystemTime::now();
        revoked.extend(gone.into_iter().map(|serial| Revocation { serial, at: now }));
        let list = self.authority.sign_revocations(&revoked, number + 1, now)?;
        files::write(&self.dir.join(CRL), &list)?;
        let hosts = self.dir.join(Role::Host.name());
        if hosts.is_dir() {
            files::write(&hosts.join(CRL), &list)?;
        }
        Ok(Entry { facts, revoked: before.or(Some(now)) })
    }

    fn find(&self, what: &str) -> Result<PeerFacts, CredentialError> {
        let unknown = || CredentialError::Unknown(what.to_owned());
        if Path::new(what).is_file() {
            let facts = read_facts(Path::new(what))?;
            return if facts.job == self.job() { Ok(facts) } else { Err(unknown()) };
        }
        let digits: String = what.chars().filter(|c| *c != ':').map(|c| c.to_ascii_lowercase()).collect();
        if digits.len() < FEWEST_DIGITS {
            return Err(unknown());
        }
        let matches = |facts: &PeerFacts| facts.serial.starts_with(&digits) || facts.fingerprint.starts_with(&digits);
        let mut found = self.certificates()?.into_iter().map(|entry| entry.facts).filter(matches);
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one),
            (Some(_), Some(_)) => Err(CredentialError::Ambiguous(what.to_owned())),
            (None, _) => Err(unknown()),
        }
    }

    /// Issues a certificate and its key into `dir`. An existing key is kept, so the two always match.
    fn issue(
        &self,
        dir: &Path,
        role: Role,
        lifetime: Duration,
        now: SystemTime,
        key: Option<&str>,
    ) -> Result<PeerFacts, CredentialError> {
        let issued = self.authority.issue(role, lifetime, now, key)?;
        // Recorded first: a certificate that is not on record cannot be revoked by its number.
        let record = self.record(&issued.facts.serial);
        files::write(&record, &issued.certificate)?;
        let hand_out = || {
            if key.is_none() {
                files::write(&dir.join(role.file("key")), &issued.key)?;
            }
            files::write(&dir.join(role.file("pem")), &issued.certificate)
        };
        hand_out().inspect_err(|_| drop(std::fs::remove_file(&record)))?;
        Ok(issued.facts)
    }

    /// The file that records that a certificate was issued.
    fn record(&self, serial: &str) -> PathBuf {
        self.dir.join(ISSUED).join(format!("{serial}.pem"))
    }

    fn bundle(
        &self,
        dir: &Path,
        role: Role,
        lifetime: Duration,
        now: SystemTime,
        key: Option<&str>,
    ) -> Result<PeerFacts, CredentialError> {
        files::write(&dir.join(CA), self.authority.certificate())?;
        files::write(&dir.join(CRL), &files::read(&self.dir.join(CRL))?)?;
        self.issue(dir, role, lifetime, now, key)
    }

    /// Locks the folder for changes, so that neither of two concurrent writers loses the other's revocation.
    fn lock(&self) -> Result<File, CredentialError> {
        let path = self.dir.join(CA_KEY);
        let file = File::open(&path).map_err(CredentialError::io("open", &path))?;
        flock(&file, FlockOperation::LockExclusive)
            .map_err(|errno| CredentialError::io("lock", &path)(errno.into()))?;
        Ok(file)
    }
}

/// The revocations, and the number of their list. Without a list, the number is higher than any earlier one, so that
/// the next list outdoes those that members hold.
fn revoked_in(dir: &Path) -> Result<(Vec<Revocation>, u64), CredentialError> {
    let path = dir.join(CRL);
    if !path.exists() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        return Ok((Vec::new(), now.as_secs()));
    }
    let der = files::in_file(path.clone(), files::one_list(&files::read(&path)?))?;
    let list = RevocationList::read(&der)
        .map_err(|_| CredentialError::Broken { path, why: "it is not a list of revocations".to_owned() })?;
    let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    let revoked = list.revoked.iter().map(|(serial, when)| Revocation { serial: hex(serial), at: at(*when) });
    Ok((revoked.collect(), list.number))
}

/// The member whose folder this is, if it has no authority.
fn member_in(dir: &Path) -> Option<Role> {
    [Role::Host, Role::Observer].into_iter().find(|role| dir.join(role.file("pem")).exists())
}

/// The certificates of a folder, oldest first: all that an authority has issued, or the one of a host or an observer.
///
/// # Errors
/// If they cannot be read.
pub fn certificates_in(dir: &Path) -> Result<Vec<Entry>, CredentialError> {
    let mut paths = Vec::new();
    if Store::is_owners(dir)? {
        let issued = dir.join(ISSUED);
        let failed = || CredentialError::io("read", &issued);
        for entry in std::fs::read_dir(&issued).map_err(failed())? {
            paths.push(entry.map_err(failed())?.path());
        }
        // Skip what is being written just now.
        paths.retain(|path| path.extension().is_some_and(|ext| ext == "pem"));
    } else {
        paths.push(dir.join(member_in(dir).unwrap_or(Role::Host).file("pem")));
    }
    let (revoked, _) = revoked_in(dir)?;
    let read = |path: &PathBuf| {
        let facts = read_facts(path)?;
        let revoked = revoked.iter().find(|one| one.serial == facts.serial).map(|one| one.at);
        Ok(Entry { facts, revoked })
    };
    let mut all = paths.iter().map(read).collect::<Result<Vec<_>, CredentialError>>()?;
    all.sort_by_cached_key(|entry| (entry.facts.not_before, entry.facts.role, entry.facts.serial.clone()));
    Ok(all)
}

fn read_facts(path: &Path) -> Result<PeerFacts, CredentialError> {
    let read = files::read(path).and_then(|pem| files::one_certificate(&pem)).and_then(|der| PeerFacts::of(&der));
    files::in_file(path.into(), read)
}
