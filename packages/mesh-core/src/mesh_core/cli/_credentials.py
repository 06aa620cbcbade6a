"""``mesh credentials``."""

import json
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from datetime import timedelta
from pathlib import Path

from mesh_core._common.credentials import LIFETIME, LONGEST, Certificate, Credentials
from mesh_core.cli import _exit
from mesh_core.cli._table import aligned


class CredentialsCommand:
    """Create, show, renew and revoke the credentials of a job."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the subcommands."""
        commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="do", help="what to do")
        for name, summary in (
            ("new", "create credentials for a new job"),
            ("issue", "create a folder for one more host or an observer, which can be revoked separately"),
            ("renew", "issue new certificates for the keys in a folder"),
            ("show", "list a folder's certificates and how long they are valid"),
            ("revoke", "revoke a certificate and all others for the same key"),
        ):
            each = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            each.add_argument("dir", type=Path, metavar="DIR", help="the job's folder")
            if name == "issue":
                each.add_argument("out", type=Path, metavar="OUT", help="the new folder")
                each.add_argument(
                    "--observer",
                    action="store_true",
                    help="for an observer, who may look into jobs (mesh look --host) and do nothing else",
                )
            elif name == "renew":
                each.add_argument(
                    "out",
                    type=Path,
                    metavar="OUT",
                    nargs="?",
                    help="the folder to renew (default: DIR itself)",
                )
            elif name == "show":
                each.add_argument("--json", action="store_true", help="print JSON instead of a table")
            elif name == "revoke":
                each.add_argument(
                    "which",
                    metavar="WHICH",
                    help="a serial number or fingerprint (the first digits suffice), or the certificate's file",
                )
            if name in ("new", "issue", "renew"):
                for unit in ("days", "hours", "seconds"):
                    each.add_argument(
                        f"--{unit}",
                        type=_number,
                        default=0.0,
                        metavar="N",
                        help=f"make certificates valid for N {unit}; the units add up",
                    )

    def run(self, args: Namespace) -> int:
        """Run one subcommand."""
        if args.do == "new":
            _new(args.dir, _lifetime(args))
        elif args.do == "issue":
            _issue(args.dir, args.out, _lifetime(args), observer=args.observer)
        elif args.do == "renew":
            _renew(args.dir, args.out, _lifetime(args))
        elif args.do == "show":
            _show(Credentials.load(args.dir), as_json=args.json)
        else:
            _revoke(args.dir, args.which)
        return _exit.OK


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def _lifetime(args: Namespace) -> timedelta:
    seconds = args.days * 86_400 + args.hours * 3_600 + args.seconds
    return timedelta(seconds=min(seconds, LONGEST.total_seconds())) if seconds else LIFETIME


def _new(path: Path, lifetime: timedelta) -> None:
    credentials = Credentials.new(path, lifetime=lifetime)
    print(f"created credentials for job {credentials.job} in {path}, valid for {_age(lifetime)}")
    print()
    rows = [
        ("in your script", f"attach_to_workers([...], credentials={str(path)!r})"),
        ("for each host", f"scp -rp {shlex.quote(str(credentials.host_path))} HOST:mesh-credentials"),
        ("on each host", "mesh host --listen 0.0.0.0:26600 --credentials mesh-credentials"),
    ]
    print(aligned(rows))
    print()
    print(
        f"Anyone who can read {path / 'ca.key'} can let anyone into the job: do not copy it to another machine."
    )


def _issue(path: Path, out: Path, lifetime: timedelta, *, observer: bool) -> None:
    credentials = Credentials.load(path)
    issue = credentials.issue_observer if observer else credentials.issue_host
    made = issue(out, lifetime=lifetime)
    print(
        f"created {out} for {'an observer' if observer else 'a host'}: certificate {_short(made)}, valid for {_age(lifetime)}"
    )


def _renew(path: Path, out: Path | None, lifetime: timedelta) -> None:
    for made in Credentials.load(path).renew(out, lifetime=lifetime):
        print(f"renewed the {made.role} certificate: now {_short(made)}, valid for {_age(lifetime)}")


def _revoke(path: Path, which: str) -> None:
    credentials = Credentials.load(path)
    before = _revoked(credentials)
    gone = credentials.revoke(which)
    others = len(_revoked(credentials) - before - {gone.serial})
    more = f", and {others} more for the same key" if others else ""
    print(f"revoked the {gone.role} certificate {_short(gone)}{more}")
    print(
        f"A running controller that uses {path} notices this and tells its hosts. "
        f"Copy the new {path / 'crl.pem'} to hosts that are waiting for a job."
    )


def _revoked(credentials: Credentials) -> set[str]:
    return {each.serial for each in credentials.certificates if each.revoked}


def _show(credentials: Credentials, *, as_json: bool) -> None:
    certificates = credentials.certificates
    if as_json:
        rows = [
            {
                "role": each.role,
                "state": each.state,
                "serial": each.serial,
                "fingerprint": each.fingerprint,
                "not_before": each.not_before.isoformat(),
                "not_after": each.not_after.isoformat(),
                "revoked": each.revoked.isoformat() if each.revoked else None,
            }
            for each in certificates
        ]
        print(
            json.dumps(
                {"schema": 1, "job": credentials.job, "owner": credentials.owner, "certificates": rows},
                indent=2,
            )
        )
        return
    print(
        f"job {credentials.job}"
        + ("" if credentials.owner else f" ({_whose(certificates[0])} folder: it cannot issue or revoke)")
    )
    table = [("CERTIFICATE", "ROLE", "STATE", "UNTIL", "REMAINING")]
    for each in certificates:
        remaining = _age(each.remaining) if each.state == "valid" else "-"
        table.append((_short(each), each.role, each.state, f"{each.not_after:%Y-%m-%d %H:%M} UTC", remaining))
    print(aligned(table))


def _whose(certificate: Certificate) -> str:
    return "an observer's" if certificate.role == "observer" else "a host's"


def _short(certificate: Certificate) -> str:
    return certificate.fingerprint[:16]


def _age(span: timedelta) -> str:
    """Format a time span in its two largest units.

    >>> _age(timedelta(days=6, hours=23, minutes=59)), _age(timedelta(minutes=95)), _age(timedelta(seconds=2.5))
    ('6 d 23 h', '1 h 35 min', '2 s')
    """
    minutes, seconds = divmod(int(span.total_seconds()), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
