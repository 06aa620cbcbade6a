"""Credentials as created by scripts and the command line. What they protect is tested beside the code that checks them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import threading
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from mesh_core import AuthenticationError, Credentials, MeshError
from mesh_core.cli._credentials import CredentialsCommand

STRANGER = 54321
"""A user id that nobody has here."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    """A job's credentials, for tests that only read them."""
    return Credentials.new(tmp_path_factory.mktemp("credentials") / "job")


def files(path: Path) -> dict[str, int]:
    """Every file in the folder, and its mode."""
    return {
        str(each.relative_to(path)): stat.S_IMODE(each.stat().st_mode)
        for each in path.rglob("*")
        if each.is_file()
    }


# --- making -------------------------------------------------------------------------------------------------


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        credentials = Credentials.new(tmp_path / "job")
        credentials.issue_host(tmp_path / "b7")
    finally:
        os.umask(before)
    for folder in (tmp_path / "job", tmp_path / "job" / "host", tmp_path / "job" / "issued", tmp_path / "b7"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert set(files(tmp_path).values()) == {0o600}


def test_a_host_folder_has_no_authority(made: Credentials, tmp_path: Path) -> None:
    made.issue_host(tmp_path / "b7")
    expected = {"ca.pem", "crl.pem", "host.key", "host.pem"}
    assert set(files(tmp_path / "b7")) == set(files(made.host_path)) == expected
    authority = (made.path / "ca.key").read_text()
    assert all(authority not in each.read_text() for each in (tmp_path / "b7").iterdir())


def test_an_observer_can_only_look(tmp_path: Path) -> None:
    made = Credentials.new(tmp_path / "job")
    certificate = made.issue_observer(tmp_path / "eyes", lifetime=timedelta(hours=1))
    assert set(files(tmp_path / "eyes")) == {"ca.pem", "crl.pem", "observer.key", "observer.pem"}
    eyes = Credentials.load(tmp_path / "eyes")
    assert not eyes.owner and eyes.certificates == (certificate,) and certificate.role == "observer"
    (renewed,) = made.renew(tmp_path / "eyes", lifetime=timedelta(days=1))
    assert renewed.role == "observer" and eyes.certificates == (renewed,)
    with pytest.raises(AuthenticationError, match="give that of the job's owner"):
        eyes.issue_observer(tmp_path / "more")
    made.revoke(tmp_path / "eyes" / "observer.pem")
    assert [each.state for each in made.certificates if each.role == "observer"] == ["revoked", "revoked"]
    with pytest.raises(AuthenticationError, match="revoked"):
        made.renew(tmp_path / "eyes")


def test_existing_files_are_not_overwritten(made: Credentials) -> None:
    before = {name: (made.path / name).read_bytes() for name in files(made.path)}
    with pytest.raises(AuthenticationError, match="exists already; nothing was written"):
        Credentials.new(made.path)
    with pytest.raises(AuthenticationError, match="exists already"):
        made.issue_host(made.host_path)
    assert {name: (made.path / name).read_bytes() for name in files(made.path)} == before


def test_a_failure_leaves_no_partial_folder(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="cannot make the folder"):
        Credentials.new(tmp_path / "no" / "such" / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.once
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_no_partial_folder(tmp_path: Path, there: bool) -> None:
    """A process with a limit on file size stands in for a full disk."""
    job = tmp_path / "job"
    credentials = Credentials.new(tmp_path / "other")
    issued = len(credentials.certificates)
    if there:
        job.mkdir()
    code = """
import resource, signal, sys
from mesh_core import AuthenticationError, Credentials
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
for make in (lambda: Credentials.new(sys.argv[1]), lambda: Credentials.load(sys.argv[2]).issue_host(sys.argv[1])):
    try:
        make()
    except AuthenticationError as error:
        print(error)
"""
    # Nothing fits; or keys fit, and certificates do not.
    for limit in (0, 300):
        command = [sys.executable, "-c", code, str(job), str(tmp_path / "other"), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            assert re.match(f"cannot write {re.escape(str(job))}/[a-z./]+: File too large", line) or (
                "/other/issued/" in line
            ), line
        assert len(done.stdout.splitlines()) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == (["job", "other"] if there else ["other"])
    assert not there or list(job.iterdir()) == []
    assert len(credentials.certificates) == issued


@needs_root
def test_another_users_folder_is_not_filled(made: Credentials, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, STRANGER, STRANGER)
    with pytest.raises(AuthenticationError, match=f"belongs to user {STRANGER}, who could replace"):
        Credentials.new(theirs)
    with pytest.raises(AuthenticationError, match="nothing was written: take another folder"):
        made.issue_host(theirs)
    assert list(theirs.iterdir()) == [] and theirs.stat().st_mode & 0o777 == 0o777


def test_a_link_to_a_folder_is_not_filled(made: Credentials, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(AuthenticationError, match="exists already"):
        made.issue_host(tmp_path / "link")
    assert list((tmp_path / "folder").iterdir()) == []


def test_an_empty_folder_is_used_and_made_private(made: Credentials, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    made.issue_host(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]


@pytest.mark.once
@needs_root
def test_a_folder_whose_name_is_fixed_is_filled_in_place(tmp_path: Path) -> None:
    """For example a volume, which cannot be replaced by renaming."""
    code = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit("cannot mount here")
place = sys.argv[1]
assert libc.mount(b"none", place.encode(), b"tmpfs", 0, b"size=1m") == 0
from mesh_core import AuthenticationError, Credentials
credentials = Credentials.new(place)
print(sorted(os.listdir(place)), oct(os.stat(place).st_mode & 0o777), os.listdir(os.path.dirname(place)))
"""
    (tmp_path / "place").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "place")], capture_output=True, text=True, check=False
    )
    if "cannot mount here" in done.stderr:
        pytest.skip("mounts cannot be made here")
    names = ["ca.key", "ca.pem", "controller.key", "controller.pem", "crl.pem", "host", "issued"]
    assert done.stdout == f"{names} 0o700 ['place']\n", done.stderr


def test_two_jobs_have_nothing_in_common(made: Credentials, tmp_path: Path) -> None:
    other = Credentials.new(tmp_path / "other")
    assert other.job != made.job
    for name in ("ca.pem", "ca.key", "controller.pem", "controller.key", "host/host.key"):
        assert (other.path / name).read_bytes() != (made.path / name).read_bytes()


@pytest.mark.parametrize("lifetime", [timedelta(hours=2), 7200, 7200.0])
def test_certificates_have_the_requested_lifetime(tmp_path: Path, lifetime: timedelta | float) -> None:
    credentials = Credentials.new(tmp_path / "job", lifetime=lifetime, host_lifetime=60)
    controller, host = sorted(credentials.certificates, key=lambda each: each.role)
    assert (controller.role, host.role) == ("controller", "host")
    assert timedelta(hours=1, minutes=59) < controller.remaining <= timedelta(hours=2)
    assert timedelta(seconds=30) < host.remaining <= timedelta(seconds=60)
    # From slightly before now, since clocks differ.
    assert controller.not_before < datetime.now(UTC) - timedelta(minutes=4)
    assert controller.state == host.state == "valid"


@pytest.mark.parametrize("lifetime", [0, -1e-300, timedelta(0), float("nan")])
def test_a_lifetime_must_be_positive(tmp_path: Path, lifetime: float) -> None:
    with pytest.raises(ValueError, match="lifetime must be positive"):
        Credentials.new(tmp_path / "job", lifetime=lifetime)
    assert not (tmp_path / "job").exists()


def test_a_very_long_lifetime_is_capped(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job", lifetime=1e300)
    assert all(
        timedelta(days=3000) < each.remaining < timedelta(days=4000) for each in credentials.certificates
    )


# --- loading ------------------------------------------------------------------------------------------------


def test_a_folder_without_credentials_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="mesh credentials new") as raised:
        Credentials.load(tmp_path)
    assert isinstance(raised.value, PermissionError) and isinstance(raised.value, MeshError)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    credentials = Credentials.new(tmp_path / "job")
    key = credentials.path / "ca.key"
    key.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"chmod 600 {re.escape(str(key))}"):
        credentials.issue_host(tmp_path / "b7")
    assert not (tmp_path / "b7").exists()
    key.chmod(0o600)
    credentials.issue_host(tmp_path / "b7")


@needs_root
def test_an_authority_that_others_can_write_is_refused(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    authority = credentials.path / "ca.pem"
    authority.chmod(0o666)
    with pytest.raises(AuthenticationError, match=f"chmod go-w {re.escape(str(authority))}"):
        credentials.issue_host(tmp_path / "b7")
    authority.chmod(0o644)
    credentials.issue_host(tmp_path / "b7")
    os.chown(authority, STRANGER, STRANGER)
    with pytest.raises(AuthenticationError, match=f"belongs to user {STRANGER}"):
        credentials.issue_host(tmp_path / "b8")
    assert not (tmp_path / "b8").exists()


def test_a_host_folder_cannot_issue_or_revoke(made: Credentials, tmp_path: Path) -> None:
    shutil.copytree(made.host_path, tmp_path / "copy")
    host = Credentials.load(tmp_path / "copy")
    assert not host.owner and made.owner
    assert host.job == made.job
    assert [each.role for each in host.certificates] == ["host"]
    for attempt in (lambda: host.issue_host(tmp_path / "x"), lambda: host.revoke(host.certificates[0])):
        with pytest.raises(AuthenticationError, match="this folder is a host's"):
            attempt()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    (credentials.path / "ca.pem").write_text("no certificate")
    with pytest.raises(AuthenticationError, match=r"ca\.(pem|key) is damaged"):
        credentials.issue_host(tmp_path / "b7")
    (credentials.path / "crl.pem").write_text("no list")
    with pytest.raises(AuthenticationError, match=r"crl\.pem is damaged"):
        _ = credentials.certificates
    whole = Credentials.new(tmp_path / "whole")
    with pytest.raises(AuthenticationError, match="it holds no certificate"):
        whole.revoke(whole.host_path / "host.key")


# --- revoking and renewing ----------------------------------------------------------------------------------


def test_revocation_by_every_name(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    hosts = [credentials.issue_host(tmp_path / f"b{i}") for i in range(4)]
    credentials.revoke(hosts[0])
    credentials.revoke(hosts[1].serial[:12])
    colons = ":".join(re.findall("..", hosts[2].fingerprint.upper()))
    credentials.revoke(colons)
    gone = credentials.revoke(tmp_path / "b3" / "host.pem")
    assert gone.state == "revoked" and gone.serial == hosts[3].serial
    states = {each.serial: each.state for each in Credentials.load(credentials.path).certificates}
    assert [states[each.serial] for each in hosts] == ["revoked"] * 4
    assert sorted(states.values()).count("valid") == 2
    # The list that hosts get contains it too.
    assert (credentials.path / "crl.pem").read_bytes() == (credentials.host_path / "crl.pem").read_bytes()


def test_revoking_twice_keeps_the_first_time(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    host = credentials.issue_host(tmp_path / "b7")
    first = credentials.revoke(host).revoked
    assert first is not None
    again = credentials.revoke(host).revoked
    assert again is not None and abs(again - first) < timedelta(seconds=1)


def test_a_revoked_key_keeps_and_gets_no_certificate(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    credentials.issue_host(tmp_path / "b7")
    credentials.issue_host(tmp_path / "b8")
    older = credentials.renew(tmp_path / "b7")
    assert len(older) == 1
    credentials.revoke(tmp_path / "b7" / "host.pem")
    # The holder of b7's key may have kept any certificate that was ever issued for it.
    assert [each.state for each in credentials.certificates].count("revoked") == 2
    with pytest.raises(AuthenticationError, match=r"host\.key was revoked.*mesh credentials issue"):
        credentials.renew(tmp_path / "b7")
    credentials.renew(tmp_path / "b8")


def test_the_controller_is_renewed_after_its_hosts_key_was_revoked(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    credentials.revoke(credentials.host_path / "host.pem")
    assert [each.role for each in credentials.renew()] == ["controller"]


@pytest.mark.parametrize("which", ["", "ab", "0123456789ab", "no/such/file.pem"])
def test_an_unknown_name_revokes_nothing(made: Credentials, which: str) -> None:
    with pytest.raises(AuthenticationError, match="mesh credentials show"):
        made.revoke(which)
    assert {each.state for each in made.certificates} == {"valid"}


def test_concurrent_revocations_are_all_kept(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job")
    hosts = [credentials.issue_host(tmp_path / f"b{i}") for i in range(8)]
    start = threading.Barrier(len(hosts))

    def revoke(serial: str) -> None:
        start.wait()
        Credentials.load(credentials.path).revoke(serial)

    threads = [threading.Thread(target=revoke, args=(each.serial,)) for each in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.state for each in credentials.certificates].count("revoked") == len(hosts)


def test_renewal_keeps_the_key_and_makes_another_certificate(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "job", lifetime=60)
    key = (credentials.path / "controller.key").read_bytes()
    made = credentials.renew(lifetime=timedelta(days=30))
    assert [each.role for each in made] == ["controller", "host"]
    assert all(each.remaining > timedelta(days=29) for each in made)
    assert (credentials.path / "controller.key").read_bytes() == key
    assert len(credentials.certificates) == 4
    host = credentials.issue_host(tmp_path / "b7")
    (renewed,) = credentials.renew(tmp_path / "b7")
    assert renewed.serial != host.serial
    other = Credentials.new(tmp_path / "other")
    with pytest.raises(AuthenticationError, match="another job's"):
        other.renew(tmp_path / "b7")
    with pytest.raises(AuthenticationError, match="no credentials"):
        credentials.renew(tmp_path)


# --- secrets ------------------------------------------------------------------------------------------------


def test_repr_and_pickle_contain_no_key(made: Credentials) -> None:
    keys = [each.read_text().splitlines()[1] for each in made.path.rglob("*.key")]
    assert len(keys) == 3
    shown = [repr(made), str(made), repr(made.certificates), pickle.dumps(made).decode("latin-1")]
    assert not any(key in text for key in keys for text in shown)
    assert repr(made) == f"Credentials({str(made.path)!r})"
    assert pickle.loads(pickle.dumps(made)).job == made.job


# --- the command --------------------------------------------------------------------------------------------


def mesh(*arguments: object) -> int:
    """Run ``mesh credentials`` as the command line would."""
    command = CredentialsCommand()
    parser = ArgumentParser(prog="mesh credentials", allow_abbrev=False)
    command.configure(parser)
    return command.run(parser.parse_args([str(each) for each in arguments]))


def test_command_makes_credentials_and_says_where_they_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "my job"
    assert mesh("new", job, "--hours", 12) == 0
    said = capsys.readouterr().out
    credentials = Credentials.load(job)
    assert credentials.job in said and "12 h 0 min" in said
    assert f"credentials={str(job)!r}" in said and f"scp -rp '{job / 'host'}'" in said
    assert str(job / "ca.key") in said
    assert {each.state for each in credentials.certificates} == {"valid"}
    mesh("new", tmp_path / "long", "--days", 1e8, "--hours", 9e8)
    said = capsys.readouterr().out
    assert "valid for 3660 d 0 h" in said  # and no longer, whatever was asked for


def test_command_shows_them_as_a_table_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials = Credentials.new(tmp_path / "job")
    b7 = credentials.issue_host(tmp_path / "b7", lifetime=90)
    credentials.revoke(credentials.issue_host(tmp_path / "b8"))
    mesh("show", credentials.path)
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"job {credentials.job}"
    assert head.split() == ["CERTIFICATE", "ROLE", "STATE", "UNTIL", "REMAINING"]
    states = {row.split()[0]: row.split()[1:3] for row in rows}
    assert len(rows) == 4 and ["host", "revoked"] in states.values()
    assert states[b7.fingerprint[:16]] == ["host", "valid"]
    assert re.search(r"1 min \d+ s$", next(row for row in rows if row.startswith(b7.fingerprint[:16])))
    mesh("show", credentials.path, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["job"] == credentials.job and told["owner"]
    assert {each["serial"] for each in told["certificates"]} == {
        each.serial for each in credentials.certificates
    }
    mesh("show", tmp_path / "b7")
    assert "a host's folder" in capsys.readouterr().out
    mesh("issue", credentials.path, tmp_path / "eyes", "--observer", "--hours", "1")
    assert f"created {tmp_path / 'eyes'} for an observer: certificate " in capsys.readouterr().out
    mesh("show", tmp_path / "eyes")
    assert "an observer's folder" in capsys.readouterr().out


def test_command_issues_renews_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh("new", tmp_path / "job")
    mesh("issue", tmp_path / "job", tmp_path / "b7", "--days", 1)
    capsys.readouterr()
    mesh("renew", tmp_path / "job", tmp_path / "b7", "--days", 2)
    said = capsys.readouterr().out
    (host,) = Credentials.load(tmp_path / "b7").certificates
    assert said == f"renewed the host certificate: now {host.fingerprint[:16]}, valid for 2 d 0 h\n"
    mesh("renew", tmp_path / "job")
    assert capsys.readouterr().out.count("valid for 7 d 0 h") == 2
    mesh("revoke", tmp_path / "job", host.fingerprint[:16])
    said = capsys.readouterr().out
    assert f"revoked the host certificate {host.fingerprint[:16]}, and 1 more for the same key" in said
    revoked = {
        each.serial for each in Credentials.load(tmp_path / "job").certificates if each.state == "revoked"
    }
    assert len(revoked) == 2 and host.serial in revoked


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "1e300"])
def test_command_refuses_invalid_lifetimes(
    tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        mesh("new", tmp_path / "job", f"--days={value}")
    assert ended.value.code == 2 and "must be a positive number" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def test_credentials_are_imported_lazily() -> None:
    code = (
        "import sys, mesh_core; print('mesh_core._common.credentials' in sys.modules); mesh_core.Credentials"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
