"""``mesh doctor``."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from mesh_core._errors import PluginError, PluginLoadError
from mesh_core.cli import _exit
from mesh_core.cli._quiet import quiet_manager
from mesh_core.cli._table import aligned
from mesh_core.plugins import DOCTOR_CHECKS, DoctorCheck, Finding, PluginManager


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
        """Declare ``--json``."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of lines")

    def run(self, args: Namespace) -> int:
        """Print what was found; the status is 1 if any check failed, 0 with warnings only."""
        results = list(examine(quiet_manager()))
        print(_as_json(results) if args.json else _as_lines(results))
        return (
            _exit.FAILED
            if any(each.status == "fail" for result in results for each in result.findings)
            else _exit.OK
        )


def examine(manager: PluginManager) -> Iterator[CheckResult]:
    """Run the checks one after the other, by name. One that misbehaves is a failure of its own, not of the rest."""
    for name in manager.names(DOCTOR_CHECKS):
        origin = manager.origin(DOCTOR_CHECKS, name)
        try:
            check = manager.get(DOCTOR_CHECKS, name)
        except PluginLoadError as error:
            finding = Finding(status="fail", detail=f"cannot be loaded: {error.cause}", remedy=error.remedy)
            yield CheckResult(name, origin, (finding,))
            continue
        applies = manager.probe(check)
        if not applies:
            yield CheckResult(name, origin, (), skipped=applies.reason)
            continue
        yield CheckResult(name, origin, _findings(check, origin))


def _findings(check: DoctorCheck, origin: str) -> tuple[Finding, ...]:
    try:
        findings = tuple(check.create()())
        strangers = [type(each).__name__ for each in findings if not isinstance(each, Finding)]
        if strangers or not findings:
            raise PluginError(f"a check gives one or more Findings, not {', '.join(strangers) or 'none'}")
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


def _as_lines(results: list[CheckResult]) -> str:
    rows: list[tuple[str, str, str]] = []
    for result in results:
        if result.skipped:
            rows.append(("skip", result.name, result.skipped))
        for each in result.findings:
            rows.append((each.status, result.name, each.detail))
            if each.remedy:
                rows.append(("", "", f"-> {each.remedy}"))
    counts = _counts(results)
    rows_text = aligned(rows) if rows else "no checks are installed"
    return f"{rows_text}\n\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"


def _counts(results: list[CheckResult]) -> dict[str, int]:
    statuses = [each.status for result in results for each in result.findings]
    return {status: statuses.count(status) for status in ("ok", "warn", "fail")}
