"""``mesh plugins``."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from mesh_core.cli import _exit
from mesh_core.cli._quiet import quiet_manager
from mesh_core.cli._table import aligned
from mesh_core.plugins import PluginReport


class PluginsCommand:
    """List every installed plugin and whether it can be used here, and if not, why and what would help."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare ``--json``."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, args: Namespace) -> int:
        """Print the list and return 0, even if a plugin is broken: checking is up to `mesh doctor`."""
        reports = quiet_manager().survey()
        print(_as_json(reports) if args.json else _as_table(reports))
        return _exit.OK


def _as_json(reports: tuple[PluginReport, ...]) -> str:
    plugins = [asdict(each) | {"capabilities": dict(each.capabilities)} for each in reports]
    return json.dumps({"schema": 1, "plugins": plugins}, indent=2)


def _as_table(reports: tuple[PluginReport, ...]) -> str:
    if not reports:
        return "no plugins are installed"
    rows = [("KIND", "NAME", "FROM", "STATUS")]
    rows += [
        (each.kind, each.name or "-", f"{each.distribution} {each.version}", _status(each))
        for each in reports
    ]
    table = aligned(rows)
    notes = [
        f"{each.kind} {each.name or each.distribution}: {each.reason}\n  -> {each.remedy}"
        for each in reports
        if each.reason
    ]
    return "\n\n".join([table, *notes])


def _status(report: PluginReport) -> str:
    capabilities = ", ".join(f"{key}={value}" for key, value in report.capabilities.items())
    return f"{report.status} ({capabilities})" if capabilities else report.status
