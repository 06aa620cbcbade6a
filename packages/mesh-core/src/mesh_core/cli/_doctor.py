"""``mesh doctor``."""

import json
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mesh_core._common.display import counted
from mesh_core._common.errors import PluginError, PluginLoadError
from mesh_core.cli import _exit
from mesh_core.cli._quiet import quiet_manager
from mesh_core.plugins import DOCTOR_CHECKS, DoctorCheck, Finding, PluginManager

LIMIT: Final = 30.0
"""How many seconds a check may take."""


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
            help=f"how long each check may take (default: {LIMIT:g} seconds)",
        )

    def run(self, args: Namespace) -> int:
        """Print the findings and return 1 if any check failed; warnings alone return 0."""
        manager = quiet_manager()
        width = max((len(name) for name in manager.names(DOCTOR_CHECKS)), default=0)
        results = []
        for result in examine(manager, limit=args.limit):
            results.append(result)
            if not args.json:
                # At once, so that a slow check does not hold back the findings of the others.
                print(_as_lines(result, width), flush=True)
        print(_as_json(results) if args.json else _totals(results))
        return _exit.FAILED if _counts(results)["fail"] else _exit.OK


def examine(manager: PluginManager, *, limit: float = LIMIT) -> Iterator[CheckResult]:
    """Run the checks one after another, in the order of their names. If one misbehaves, the others still run."""
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

    # A check that hangs cannot be interrupted; a daemon thread does not keep the command from exiting.
    thread = threading.Thread(target=run, name=f"mesh-doctor-{name}", daemon=True)
    thread.start()
    thread.join(limit)
    if results:
        return results[0]
    late = Finding(
        status="fail",
        detail=f"the check did not finish within {limit:g} s",
        remedy=f"find out what it is waiting for, such as a hung file system, or report this to the author of {origin}",
    )
    return CheckResult(name, origin, (late,))


def _findings(check: DoctorCheck, origin: str) -> tuple[Finding, ...]:
    try:
        findings = tuple(check.create()())
        strangers = [type(each).__name__ for each in findings if not isinstance(each, Finding)]
        if strangers or not findings:
            raise PluginError(
                f"a check must return one or more Findings, got {', '.join(strangers) or 'none'}"
            )
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


def _totals(results: list[CheckResult]) -> str:
    counts = _counts(results)
    none = "" if results else "no checks are installed\n"
    return f"{none}\n{counts['ok']} ok, {counted(counts['warn'], 'warning')}, {counts['fail']} failed"


def _counts(results: list[CheckResult]) -> dict[str, int]:
    statuses = [each.status for result in results for each in result.findings]
    return {status: statuses.count(status) for status in ("ok", "warn", "fail")}
