//! What is in folders, who may read it, and what happens when it changes.

use super::*;
use std::os::unix::fs::PermissionsExt;

const DAY: Duration = Duration::from_secs(24 * 3600);

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_new_folder_is_its_owners_alone() {
    let job = Job::new();
    let dir = job.store.dir();
    let mut names = Vec::new();
    for folder in [dir.to_owned(), dir.join("host"), dir.join("issued")] {
        assert_eq!(mode(&folder), 0o700, "{folder:?}");
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                assert_eq!(mode(&path), 0o600, "{path:?}");
                names.push(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    names.retain(|name| !name.starts_with("issued"));
    names.sort();
    let expected = [
        "ca.key",
        "ca.pem",
        "controller.key",
        "controller.pem",
        "crl.pem",
        "host/ca.pem",
        "host/crl.pem",
        "host/host.key",
        "host/host.pem",
    ];
    assert_eq!(names, expected);
}

#[test]
fn nothing_is_written_over() {
    let job = Job::new();
    let before = files::read(&job.store.dir().join("ca.pem")).unwrap();
    let error = Store::create(job.store.dir(), WEEK, WEEK).unwrap_err();
    assert!(matches!(error, CredentialError::Exists { .. }), "{error}");
    assert_eq!(files::read(&job.store.dir().join("ca.pem")).unwrap(), before);
    let error = job.store.issue_host(&job.store.dir().join("host"), WEEK).unwrap_err();
    assert!(matches!(error, CredentialError::Exists { .. }), "{error}");
    // An empty folder is used, and closed to others.
    let empty = job.folder.join("empty");
    std::fs::create_dir(&empty).unwrap();
    set_mode(&empty, 0o755);
    job.store.issue_host(&empty, WEEK).unwrap();
    assert_eq!(mode(&empty), 0o700);
}

#[test]
fn a_failed_start_leaves_nothing() {
    let folder = Folder::new();
    let dir = folder.join("there/is/no/such/folder");
    assert!(matches!(Store::create(&dir, WEEK, WEEK).unwrap_err(), CredentialError::Io { .. }));
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
}

#[test]
fn a_key_that_others_can_read_is_refused_with_the_remedy() {
    let job = Job::new();
    let key = job.store.dir().join("controller.key");
    for bad in [0o644, 0o640, 0o660, 0o604, 0o700] {
        set_mode(&key, bad);
        let error = Identity::load(job.store.dir()).unwrap_err();
        assert!(matches!(error, CredentialError::Readable { .. }), "{error}");
        assert!(error.to_string().contains(&format!("chmod 600 {}", key.display())), "{error}");
    }
    set_mode(&key, 0o400);
    Identity::load(job.store.dir()).unwrap();
    set_mode(&job.store.dir().join("ca.key"), 0o644);
    assert!(matches!(Store::open(job.store.dir()).unwrap_err(), CredentialError::Readable { .. }));
}

#[test]
fn files_that_do_not_fit_each_other_are_named() {
    let (job, other) = (Job::new(), Job::new());
    let dir = job.store.dir();
    let host = dir.join("host");
    let keep = std::fs::read(host.join("host.key")).unwrap();
    std::fs::copy(other.store.dir().join("host/host.key"), host.join("host.key")).unwrap();
    let error = Identity::load(&host).unwrap_err().to_string();
    assert!(error.contains("host.key"), "{error}");
    std::fs::write(host.join("host.key"), keep).unwrap();
    Identity::load(&host).unwrap();
    std::fs::copy(other.store.dir().join("crl.pem"), host.join("crl.pem")).unwrap();
    let error = Identity::load(&host).unwrap_err().to_string();
    assert!(error.contains("crl.pem") && error.contains("authority"), "{error}");
    std::fs::write(host.join("crl.pem"), "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n").unwrap();
    assert!(Identity::load(&host).is_err());
    std::fs::write(host.join("crl.pem"), "").unwrap();
    assert!(Identity::load(&host).is_err());
    // Without the list nobody knows who was revoked.
    std::fs::remove_file(host.join("crl.pem")).unwrap();
    let error = Identity::load(&host).unwrap_err().to_string();
    assert!(error.contains("crl.pem is missing") && error.contains("mesh credentials renew"), "{error}");
    job.store.renew(dir, DAY).unwrap();
    Identity::load(&host).unwrap();
    std::fs::copy(dir.join("controller.pem"), host.join("host.pem")).unwrap();
    assert!(Identity::load(&host).is_err());
    std::fs::write(host.join("host.pem"), vec![b'x'; 5 << 20]).unwrap();
    assert!(Identity::load(&host).unwrap_err().to_string().contains("too long"));
}

#[test]
fn a_list_of_revocations_that_is_lost_is_made_anew_and_outdoes_those_that_members_hold() {
    let job = Job::new();
    let dir = job.store.dir();
    for _ in 0..3 {
        let host = job.store.issue_host(&job.folder.0.join("gone"), DAY).unwrap();
        job.store.revoke(&host.serial).unwrap();
        std::fs::remove_dir_all(job.folder.0.join("gone")).unwrap();
    }
    let held = Identity::load_as(dir, Role::Controller).unwrap();
    std::fs::remove_file(dir.join("crl.pem")).unwrap();
    assert!(held.reload_if_changed().unwrap_err().to_string().contains("is missing"));
    job.store.renew(dir, DAY).unwrap();
    held.reload_if_changed().unwrap();
    let host = job.store.issue_host(&job.folder.0.join("other"), DAY).unwrap();
    job.store.revoke(&host.serial).unwrap();
    let list = Identity::load_as(dir, Role::Controller).unwrap().revocations().unwrap();
    assert!(held.adopt_revocations(&list).unwrap(), "its number is above that of the first list");
}

#[test]
fn a_folder_without_credentials_says_what_to_give_instead() {
    let job = Job::new();
    let error = Identity::load(&job.folder.0).unwrap_err().to_string();
    assert!(error.contains("mesh credentials new"), "{error}");
    let error = Identity::load_as(&job.store.dir().join("host"), Role::Controller).unwrap_err().to_string();
    assert!(error.contains("controller"), "{error}");
    let error = Store::open(&job.store.dir().join("host")).unwrap_err().to_string();
    assert!(error.contains("this folder is a host's"), "{error}");
}

#[test]
fn an_expired_identity_is_refused_at_home() {
    let job = Job::new();
    let late = job.member(Role::Host, WEEK, WEEK - Duration::from_secs(60));
    let error = Identity::load(late.dir()).unwrap_err().to_string();
    assert!(error.contains("expired") && error.contains("mesh credentials renew"), "{error}");
}

#[test]
fn certificates_hold_from_a_little_earlier_for_as_long_as_was_asked() {
    let job = Job::new();
    let all = job.store.certificates().unwrap();
    assert_eq!(all.iter().map(|entry| entry.facts.role).collect::<std::collections::HashSet<_>>().len(), 2);
    for entry in &all {
        let lasts = entry.facts.not_after.duration_since(entry.facts.not_before).unwrap();
        assert_eq!(lasts, WEEK + CLOCK_SKEW);
        assert_eq!(entry.facts.job, job.store.job());
        assert_eq!(entry.revoked, None);
    }
    assert_ne!(all[0].facts.serial, all[1].facts.serial);
}

#[test]
fn revocation_goes_by_number_fingerprint_or_file_and_is_kept() {
    let job = Job::new();
    let facts: Vec<_> =
        (0..4).map(|i| job.store.issue_host(&job.folder.join(&format!("b{i}")), WEEK).unwrap()).collect();
    job.store.revoke(&facts[0].serial).unwrap();
    job.store.revoke(&facts[1].fingerprint[..20]).unwrap();
    job.store.revoke(job.folder.join("b2/host.pem").to_str().unwrap()).unwrap();
    assert_eq!(job.store.revoke(&facts[0].serial.to_uppercase()).unwrap().facts, facts[0], "twice is once");
    let again = Store::open(job.store.dir()).unwrap();
    let revoked: Vec<_> =
        again.certificates().unwrap().into_iter().filter(|e| e.revoked.is_some()).map(|e| e.facts.serial).collect();
    assert_eq!(revoked.len(), 3);
    assert!(facts[..3].iter().all(|facts| revoked.contains(&facts.serial)));
    for bad in ["", "ab", "0123456789abcdef", "/no/such/file", "zz zz zz"] {
        assert!(matches!(job.store.revoke(bad), Err(CredentialError::Unknown(_))), "{bad:?}");
    }
    let other = Job::new();
    let stranger = other.store.dir().join("controller.pem");
    assert!(matches!(job.store.revoke(stranger.to_str().unwrap()), Err(CredentialError::Unknown(_))));
}

#[test]
fn those_that_are_in_are_checked_against_time_and_the_list() {
    let job = Job::new();
    let peer = job.host.own();
    let now = SystemTime::now();
    job.controller.check_peer(&peer, now).unwrap();
    assert_eq!(job.controller.check_peer(&peer, peer.not_after + Duration::from_secs(1)), Err(Reason::Expired));
    assert_eq!(job.controller.check_peer(&Job::new().host.own(), now), Err(Reason::OtherJob));
    job.store.revoke(&peer.serial).unwrap();
    job.controller.check_peer(&peer, now).unwrap();
    assert!(job.controller.reload_if_changed().unwrap());
    assert_eq!(job.controller.check_peer(&peer, now), Err(Reason::Revoked));
}

#[test]
fn a_list_may_come_from_a_peer_if_the_authority_has_signed_it() {
    let job = Job::new();
    let far = job.folder.join("far");
    job.store.issue_host(&far, WEEK).unwrap();
    let far = Identity::load(&far).unwrap();
    let old = far.revocations().unwrap();
    job.store.revoke(&job.host.own().serial).unwrap();
    job.controller.reload_if_changed().unwrap();
    let list = job.controller.revocations().unwrap();
    assert!(far.adopt_revocations(&list).unwrap());
    assert_eq!(far.check_peer(&job.host.own(), SystemTime::now()), Err(Reason::Revoked));
    // Handshakes know it too. Older and forged lists change nothing.
    let door = Door::open(&far, Limits::default());
    assert!(door.dial(&job.host, None).is_err());
    assert_eq!(door.refused(), Reason::Revoked);
    assert!(!far.adopt_revocations(&list).unwrap());
    assert!(!far.adopt_revocations(&old).unwrap());
    assert!(far.adopt_revocations(&Job::new().controller.revocations().unwrap()).is_err());
    let mut forged = list.clone();
    *forged.last_mut().unwrap() ^= 1;
    assert!(far.adopt_revocations(&forged).is_err());
    for cut in 0..list.len() {
        assert!(far.adopt_revocations(&list[..cut]).is_err());
    }
    // An older file does not undo it.
    let renewed = job.store.renew(far.dir(), WEEK).unwrap();
    std::fs::write(far.dir().join("crl.pem"), files::read(&job.store.dir().join("host/crl.pem")).unwrap()).unwrap();
    assert!(far.reload_if_changed().unwrap());
    assert_eq!(far.own(), renewed[0]);
    assert_eq!(far.check_peer(&job.host.own(), SystemTime::now()), Err(Reason::Revoked));
}

#[test]
fn renewal_is_taken_up_by_running_members() {
    let job = Job::new();
    let before = job.host.own();
    let door = Door::open(&job.host, Limits::default());
    let made = job.store.renew(job.store.dir(), 2 * WEEK).unwrap();
    assert_eq!(made.len(), 2);
    assert!(job.host.reload_if_changed().unwrap());
    assert!(job.controller.reload_if_changed().unwrap());
    let after = job.host.own();
    assert_ne!(after.serial, before.serial);
    assert!(after.not_after > before.not_after);
    assert_eq!(door.dial(&job.controller, None).unwrap().peer, after);
    door.joined();
    assert!(matches!(job.store.renew(&job.folder.0, WEEK), Err(CredentialError::None { .. })));
}

#[test]
fn what_cannot_be_used_does_not_replace_what_can() {
    let (job, other) = (Job::new(), Job::new());
    let host = job.host.dir();
    let keep = std::fs::read(host.join("host.pem")).unwrap();
    std::fs::write(host.join("host.pem"), "half a certifi").unwrap();
    assert!(job.host.reload_if_changed().is_err());
    assert!(job.host.reload_if_changed().is_err(), "it is tried again");
    let door = Door::open(&job.host, Limits::default());
    door.dial(&job.controller, None).unwrap();
    std::fs::write(host.join("host.pem"), keep).unwrap();
    job.host.reload_if_changed().unwrap();
    for name in ["ca.pem", "crl.pem", "host.pem", "host.key"] {
        std::fs::copy(other.store.dir().join("host").join(name), host.join(name)).unwrap();
    }
    let error = job.host.reload_if_changed().unwrap_err().to_string();
    assert!(error.contains("another job's"), "{error}");
    assert_eq!(job.host.own().job, job.store.job());
}

#[test]
fn nothing_that_is_printed_shows_a_key() {
    let job = Job::new();
    let pem = files::read_key(&job.store.dir().join("ca.key")).unwrap();
    let secret: String = pem.lines().nth(1).unwrap().chars().take(24).collect();
    let own = files::read_key(&job.store.dir().join("controller.key")).unwrap();
    let own: String = own.lines().nth(2).unwrap().chars().take(24).collect();
    for shown in [format!("{:?}", job.store), format!("{:?}", job.controller)] {
        assert!(!shown.contains(&secret) && !shown.contains(&own) && !shown.contains("PRIVATE"), "{shown}");
    }
}

#[test]
fn damaged_certificates_and_lists_are_read_without_harm() {
    let job = Job::new();
    let cert = files::one_certificate(&files::read(&job.host.dir().join("host.pem")).unwrap()).unwrap();
    let list = job.controller.revocations().unwrap();
    let mut seed = 0x5eed_u64;
    for good in [cert.as_ref(), &list] {
        for cut in 0..good.len() {
            let _ = PeerFacts::of(&good[..cut]);
            let _ = facts::RevocationList::read(&good[..cut]);
        }
        for _ in 0..20_000 {
            let mut bad = good.to_vec();
            for _ in 0..=seed % 3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (seed >> 33) as usize % bad.len();
                bad[at] = (seed >> 20) as u8;
            }
            let _ = PeerFacts::of(&bad);
            let _ = facts::RevocationList::read(&bad);
        }
    }
}

#[test]
fn another_users_key_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return; // Only root can give a file away.
    }
    let job = Job::new();
    let key = job.store.dir().join("host/host.key");
    std::os::unix::fs::chown(&key, Some(12_345), None).unwrap();
    let error = Identity::load_as(job.store.dir(), Role::Host).unwrap_err();
    assert!(matches!(error, CredentialError::Owner { owner: 12_345, user: 0, .. }), "{error}");
}
