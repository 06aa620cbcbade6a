"""``mesh doctor``."""

import json
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mesh_core._common.errors import PluginError, PluginLoadError
from mesh_core.cli import _exit
from mesh_core.cli._quiet import quiet_manager
from mesh_core.plugins import DOCTOR_CHECKS, DoctorCheck, Finding, PluginManager

LIMIT: Final = 30.0
"""Seconds that a check may take."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found, or why it was skipped."""

    name: str
    distribution: str
    findings: tuple[Finding, ...]
    skipped: str = ""


class DoctorCommand:
    """Run every installed check and say what is wrong and what to do."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare ``--json`` and ``--limit``."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
        parser.add_argument(
            "--limit",
            type=float,
            default=LIMIT,
            metavar="SECONDS",
            help=f"how long each check may take (by default {LIMIT:g} seconds)",
        )

    def run(self, args: Namespace) -> int:
        """Print what was found; the status is 1 if any check failed, 0 with warnings only."""
        manager = quiet_manager()
        width = max((len(name) for name in manager.names(DOCTOR_CHECKS)), default=0)
        results = []
        for result in examine(manager, limit=args.limit):
            results.append(result)
            if not args.json:
                # As they come: one that takes long does not hold back what the others have found.
                print(_as_lines(result, width), flush=True)
        print(_as_json(results) if args.json else _sum(results))
        return (
            _exit.FAILED
            if any(each.status == "fail" for result in results for each in result.findings)
            else _exit.OK
        )


def examine(manager: PluginManager, *, limit: float = LIMIT) -> Iterator[CheckResult]:
    """Run the checks one after the other, by name. One that misbehaves is a failure of its own, not of the rest."""
    for name in manager.names(DOCTOR_CHECKS):
        origin = manager.origin(DOCTOR_CHECKS, name)
        try:
            check = manager.get(DOCTOR_CHECKS, name)
        except PluginLoadError as error:
            finding = Finding(status="fail", detail=f"cannot be loaded: {error.cause}", remedy=error.remedy)
            yield CheckResult(name, origin, (finding,))
            continue
        yield _limited(manager, check, name, origin, limit)


def _limited(manager: PluginManager, check: DoctorCheck, name: str, origin: str, limit: float) -> CheckResult:
    results: list[CheckResult] = []

    def run() -> None:
        applies = manager.probe(check)
        found = _findings(check, origin) if applies else ()
        results.append(CheckResult(name, origin, found, skipped="" if applies else applies.reason))

    # Nothing ends what a check waits for; the end of the command does not wait for it.
    thread = threading.Thread(target=run, name=f"mesh-doctor-{name}", daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    late = Finding(
        status="fail",
        detail=f"the check has not finished within {limit:g} s",
        remedy=f"see what it waits for, such as a file system that does not answer, or report this to the author of {origin}",
    )
    return CheckResult(name, origin, (late,))


def _findings(check: DoctorCheck, origin: str) -> tuple[Finding, ...]:
    try:
        findings = tuple(check.create()())
        strangers = [type(each).__name__ for each in findings if not isinstance(each, Finding)]
        if strangers or not findings:
            raise PluginError(f"a check must give one or more Findings, got {', '.join(strangers) or 'none'}")
        return findings
    except Exception as error:  # noqa: BLE001 - whatever an outside check raises, the others still run
        detail = f"the check itself failed: {type(error).__name__}: {error}"
        return (Finding(status="fail", detail=detail, remedy=f"report this to the author of {origin}"),)


def _as_json(results: list[CheckResult]) -> str:
    checks = [
        {
            "name": result.name,
            "from": result.distribution,
            "skipped": result.skipped,
            "findings": [
                {"status": each.status, "detail": each.detail, "remedy": each.remedy}
                for each in result.findings
            ],
        }
        for result in results
    ]
    return json.dumps({"schema": 1, **_counts(results), "checks": checks}, indent=2)


def _as_lines(result: CheckResult, width: int) -> str:
    rows = [("skip", result.name, result.skipped)] if result.skipped else []
    for each in result.findings:
        rows.append((each.status, result.name, each.detail))
        if each.remedy:
            rows.append(("", "", f"-> {each.remedy}"))
    return "\n".join(f"{status:<4}  {name:<{width}}  {text}".rstrip() for status, name, text in rows)


def _sum(results: list[CheckResult]) -> str:
    counts = _counts(results)
    none = "" if results else "no checks are installed\n"
    return f"{none}\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"


def _counts(results: list[CheckResult]) -> dict[str, int]:
    statuses = [each.status for result in results for each in result.findings]
    return {status: statuses.count(status) for status in ("ok", "warn", "fail")}
