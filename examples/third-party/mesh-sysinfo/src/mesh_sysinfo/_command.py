"""`mesh sysinfo`."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from mesh_sysinfo._machine import Machine, read_machine


class SysinfoCommand:
    """Show what a machine has."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
        parser.add_argument(
            "--root", type=Path, default=Path("/"), help="read another file tree, such as a container's"
        )

    def run(self, args: Namespace) -> int:
        """Print it."""
        machine = read_machine(args.root)
        print(json.dumps(asdict(machine), indent=2) if args.json else describe(machine))
        return 0 if machine.cores else 1


def describe(machine: Machine) -> str:
    """The machine in lines."""
    rows = [("cores", str(machine.cores)), ("memory", gib(machine.memory_bytes))]
    rows += [(f"node {each.number}", f"CPUs {each.cpus}, {gib(each.memory_bytes)}") for each in machine.nodes]
    for each in machine.gpus:
        place = f", node {each.node}" if each.node is not None else ""
        rows.append(
            ("gpu", f"{each.address}  {each.vendor} {each.device}, driver {each.driver or 'none'}{place}")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def gib(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:.1f} GiB"
