//! Who this process is and whom it admits, according to a folder of credentials that is read again when its files
//! change.

use super::error::{CredentialError, Reason};
use super::facts::{Certificate, PeerFacts, RevocationList, hex, unix};
use super::files::{self, Stamp};
use super::provider;
use super::role::Role;
use super::verify::{Members, expectation};
use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

/// How often an identity that watches its files looks for changes.
const LOOK: Duration = Duration::from_secs(1);

/// A member's own certificate and key, and what it needs to check those of others.
#[derive(Debug)]
pub struct Identity {
    dir: PathBuf,
    role: Role,
    loaded: RwLock<Arc<Loaded>>,
    lookout: Option<Lookout>,
}

/// For an identity that watches its own files.
#[derive(Debug)]
struct Lookout {
    /// Where newer revocation lists appear, as DER, beside the folder's own.
    list: Option<PathBuf>,
    last: Mutex<(Instant, Option<Stamp>)>,
}

/// One state of the files, ready for use.
#[derive(Debug)]
struct Loaded {
    own: PeerFacts,
    ca: CertificateDer<'static>,
    /// The certificate and key, from which the rest is rebuilt when the revocation list changes.
    certificate: CertificateDer<'static>,
    key: Key,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    list: Option<List>,
    stamps: [Option<Stamp>; 4],
}

/// A key in PEM. `Debug` does not show it.
#[derive(Clone)]
struct Key(Arc<str>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// A revocation list with a verified signature.
#[derive(Clone, Debug)]
struct List {
    der: CertificateRevocationListDer<'static>,
    number: u64,
    revoked: Arc<HashSet<String>>,
}

impl List {
    fn check(der: CertificateRevocationListDer<'static>, ca: &Certificate<'_>) -> Result<Self, CredentialError> {
        let bad = |why: &str| CredentialError::Crypto { what: "use a list of revocations", why: why.to_owned() };
        let read = RevocationList::read(&der).map_err(|_| bad("it is not a list of revocations"))?;
        if !provider::signed_by(ca.public_key, read.signed, read.signature) {
            return Err(bad("it was not signed by this job's authority"));
        }
        let revoked = Arc::new(read.revoked.iter().map(|(serial, _)| hex(serial)).collect());
        let number = read.number;
        Ok(Self { der, number, revoked })
    }

    /// The newer of two.
    fn newer(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        one.into_iter().chain(other).max_by_key(|list| list.number)
    }
}

fn paths(dir: &Path, role: Role) -> [PathBuf; 4] {
    [files::CA.to_owned(), role.file("pem"), role.file("key"), files::CRL.to_owned()].map(|name| dir.join(name))
}

impl Loaded {
    fn read(dir: &Path, role: Role, check: bool) -> Result<Self, CredentialError> {
        let all = paths(dir, role);
        let stamps = all.each_ref().map(|path| files::stamp(path));
        let [ca_path, cert_path, key_path, crl_path] = all;
        let ca = files::in_file(ca_path.clone(), files::one_certificate(&files::read_trusted(&ca_path)?))?;
        let certificate = files::in_file(cert_path.clone(), files::one_certificate(&files::read(&cert_path)?))?;
        let key = Key(files::read_key(&key_path)?.into());
        let authority = files::in_file(ca_path, Certificate::read(&ca).map_err(|_| CredentialError::NotOurs))?;
        if stamps[3].is_none() {
            return Err(CredentialError::NoList { path: crl_path });
        }
        let list = files::in_file(
            crl_path.clone(),
            files::one_list(&files::read(&crl_path)?).and_then(|der| List::check(der, &authority)),
        )?;
        let own = files::in_file(cert_path.clone(), PeerFacts::of(&certificate))?;
        if own.role != role {
            return Err(CredentialError::Broken { path: cert_path, why: format!("it is that of a {}", own.role) });
        }
        let loaded = files::in_file(key_path, Self::build(ca, certificate, key, Some(list), stamps))?;
        if check {
            loaded.usable(cert_path)?;
        }
        Ok(loaded)
    }

    fn build(
        ca: CertificateDer<'static>,
        certificate: CertificateDer<'static>,
        key: Key,
        list: Option<List>,
        stamps: [Option<Stamp>; 4],
    ) -> Result<Self, CredentialError> {
        let own = PeerFacts::of(&certificate)?;
        let provider = provider::provider();
        let members = Self::members(&own.job, &ca, list.as_ref())?;
        let what = "use the key with its certificate";
        let chain = vec![certificate.clone()];
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(CredentialError::crypto("set up TLS"))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&members) as _)
            .with_client_auth_cert(chain.clone(), files::one_key(&key.0)?)
            .map_err(CredentialError::crypto(what))?;
        // Every connection must show its certificate: resuming an earlier one would bypass revocation.
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        client.enable_secret_extraction = true;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(CredentialError::crypto("set up TLS"))?
            .with_client_cert_verifier(members)
            .with_single_cert(chain, files::one_key(&key.0)?)
            .map_err(CredentialError::crypto(what))?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.ignore_client_order = true;
        server.enable_secret_extraction = true;
        let (client, server) = (Arc::new(client), Arc::new(server));
        Ok(Self { own, ca, certificate, key, client, server, list, stamps })
    }

    fn members(job: &str, ca: &CertificateDer<'static>, list: Option<&List>) -> Result<Arc<Members>, CredentialError> {
        Members::new(job, ca, list.map(|list| list.der.clone()), &provider::provider()).map(Arc::new)
    }

    /// Whether others would admit this side: better to report a mix-up early.
    fn usable(&self, path: PathBuf) -> Result<(), CredentialError> {
        let members = Self::members(&self.own.job, &self.ca, self.list.as_ref())?;
        members.check(&self.certificate, UnixTime::now()).map(drop).map_err(|error| {
            let why = match Reason::of(&error) {
                Reason::Expired => return CredentialError::Expired { path },
                Reason::OtherJob => "it was not signed by the authority in ca.pem".to_owned(),
                other => other.to_string(),
            };
            CredentialError::Broken { path, why }
        })
    }
}

impl Identity {
    /// Reads a folder: a controller's identity if it has one, else a host's.
    ///
    /// # Errors
    /// If files are missing, do not belong together or have expired, or if others can read the key.
    pub fn load(dir: &Path) -> Result<Arc<Self>, CredentialError> {
        let role = if dir.join("controller.pem").exists() { Role::Controller } else { Role::Host };
        Self::load_as(dir, role)
    }

    /// Reads an identity that may look into jobs: a controller's if the folder has one, else an observer's.
    ///
    /// # Errors
    /// As [`Identity::load`].
    pub fn load_to_look(dir: &Path) -> Result<Arc<Self>, CredentialError> {
        let holds = |role: Role| dir.join(role.file("pem")).exists();
        let role = if holds(Role::Controller) { Role::Controller } else { Role::Observer };
        Self::load_as(dir, role)
    }

    /// Reads one role's identity. A host's may also be in the folder `host` inside the given one, as in the folder of a
    /// job's owner.
    ///
    /// # Errors
    /// As [`Identity::load`].
    pub fn load_as(dir: &Path, role: Role) -> Result<Arc<Self>, CredentialError> {
        let inner = dir.join(role.name());
        let name = role.file("pem");
        let dir = if !dir.join(&name).exists() && inner.join(&name).exists() { &inner } else { dir };
        if !dir.join(&name).exists() {
            let remedy = match role {
                Role::Controller => "give the folder that `mesh credentials new` has made",
                Role::Host => "give a folder that `mesh credentials new` or `issue` has made for hosts",
                Role::Observer => {
                    "a host's cannot look into jobs; give the folder of the job's owner, or one that `mesh credentials issue --observer` \
                     has made"
                }
            };
            if !dir.exists() {
                return Err(CredentialError::NoFolder { path: dir.into(), remedy });
            }
            return Err(CredentialError::None {
                path: dir.into(),
                role: match role {
                    Role::Controller => "a controller",
                    Role::Host => "a host",
                    Role::Observer => "an observer",
                },
                remedy,
            });
        }
        Self::open(dir, role, true)
    }

    fn open(dir: &Path, role: Role, check: bool) -> Result<Arc<Self>, CredentialError> {
        let loaded = Loaded::read(dir, role, check)?;
        Ok(Arc::new(Self { dir: dir.into(), role, loaded: RwLock::new(Arc::new(loaded)), lookout: None }))
    }

    /// Reads a folder as [`Identity::load`] does, and looks for changes at the beginning of each handshake and when
    /// [`Identity::look`] is called. `list` is where newer revocation lists appear, if anywhere.
    ///
    /// # Errors
    /// As [`Identity::load`].
    pub fn load_watching(dir: &Path, list: Option<&Path>) -> Result<Arc<Self>, CredentialError> {
        let role = if dir.join("controller.pem").exists() { Role::Controller } else { Role::Host };
        let loaded = Loaded::read(dir, role, true)?;
        let lookout = Lookout { list: list.map(Path::to_owned), last: Mutex::new((Instant::now(), None)) };
        let made = Self { dir: dir.into(), role, loaded: RwLock::new(Arc::new(loaded)), lookout: Some(lookout) };
        made.look_at_list();
        Ok(Arc::new(made))
    }

    /// Adopts changes in the files, if this identity watches them and has not looked within a second. Unusable files
    /// change nothing: the next look tries again.
    pub fn look(&self) {
        let Some(lookout) = &self.lookout else { return };
        {
            let mut last = lookout.last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.0.elapsed() < LOOK {
                return;
            }
            last.0 = Instant::now();
        }
        // On failure the current state remains in use until it expires, which the dialed peer then reports.
        let _ = self.reload_if_changed();
        self.look_at_list();
    }

    fn look_at_list(&self) {
        let Some(Lookout { list: Some(path), last }) = &self.lookout else { return };
        let found = files::stamp(path);
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        // A list that is not from this authority counts as none.
        if found.is_some()
            && found != last.1
            && files::read_list(path).is_ok_and(|der| self.adopt_revocations(&der).is_ok())
        {
            last.1 = found;
        }
    }

    /// Reads an identity that others will refuse.
    #[cfg(test)]
    pub(crate) fn load_unchecked(dir: &Path, role: Role) -> Arc<Self> {
        Self::open(dir, role, false).unwrap()
    }

    fn loaded(&self) -> Arc<Loaded> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The folder that was read.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its role.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// The contents of its own certificate.
    #[must_use]
    pub fn own(&self) -> PeerFacts {
        self.loaded().own.clone()
    }

    /// Reads the files again if any of them has changed, and uses them for new connections. If they are unusable, the
    /// current ones remain in use: the error tells why, and the next call tries again.
    ///
    /// # Errors
    /// As [`Identity::load`], or if the files now belong to another job.
    pub fn reload_if_changed(&self) -> Result<bool, CredentialError> {
        let before = self.loaded();
        let stamps = paths(&self.dir, self.role).each_ref().map(|path| files::stamp(path));
        if stamps == before.stamps {
            return Ok(false);
        }
        let mut read = Loaded::read(&self.dir, self.role, true)?;
        if read.ca != before.ca {
            return Err(CredentialError::Broken {
                path: self.dir.join(files::CA),
                why: "it is another job's now, but this process works for the first one".to_owned(),
            });
        }
        let mut slot = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        // A peer may have sent a newer list meanwhile than the file has.
        if slot.list.as_ref().is_some_and(|held| read.list.as_ref().is_none_or(|list| list.number < held.number)) {
            let list = List::newer(read.list, slot.list.clone());
            read = Loaded::build(read.ca, read.certificate, read.key, list, read.stamps)?;
        }
        *slot = Arc::new(read);
        Ok(true)
    }

    /// The revocation list in use, as signed by the authority. It may be sent to other members.
    #[must_use]
    pub fn revocations(&self) -> Option<Vec<u8>> {
        self.loaded().list.as_ref().map(|list| list.der.to_vec())
    }

    /// Adopts a revocation list from a peer, if it is newer than the one in use. It is kept only in memory.
    ///
    /// # Errors
    /// If it was not signed by this job's authority.
    pub fn adopt_revocations(&self, der: &[u8]) -> Result<bool, CredentialError> {
        let ca = self.loaded().ca.clone();
        let authority = Certificate::read(&ca).map_err(|_| CredentialError::NotOurs)?;
        let list = List::check(CertificateRevocationListDer::from(der.to_vec()), &authority)?;
        let mut slot = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        if slot.list.as_ref().is_some_and(|held| held.number >= list.number) {
            return Ok(false);
        }
        let held = &**slot;
        let made = Loaded::build(held.ca.clone(), held.certificate.clone(), held.key.clone(), Some(list), held.stamps)?;
        *slot = Arc::new(made);
        Ok(true)
    }

    /// Whether an admitted peer may stay.
    ///
    /// # Errors
    /// If its certificate has expired or was revoked since.
    pub fn check_peer(&self, peer: &PeerFacts, now: SystemTime) -> Result<(), Reason> {
        let loaded = self.loaded();
        if peer.job != loaded.own.job {
            return Err(Reason::OtherJob);
        }
        if unix(now) > unix(peer.not_after) {
            return Err(Reason::Expired);
        }
        match &loaded.list {
            Some(list) if list.revoked.contains(&peer.serial) => Err(Reason::Revoked),
            _ => Ok(()),
        }
    }

    pub(crate) fn client(&self, expect: Option<Role>) -> Result<(Arc<ClientConfig>, ServerName<'static>), Reason> {
        self.look();
        let loaded = self.loaded();
        let name = ServerName::try_from(expectation(expect, &loaded.own.job))
            .map_err(|error| Reason::BadCertificate(error.to_string()))?;
        Ok((Arc::clone(&loaded.client), name))
    }

    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        self.look();
        Arc::clone(&self.loaded().server)
    }
}
