"""One measurement in a fresh interpreter: `python -m meshbench.child SYSTEM ITEM [--quick]`, JSON on stdout.

`SYSTEM` is the name of a module in `meshbench.adapters`. Everything else that anybody prints goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from time import perf_counter

from meshbench.adapter import load
from meshbench.catalogue import ITEMS, Scale


def main() -> None:
    """Measure and print.

    Example:
        python -m meshbench.child rawsocket call_sync --quick
    """
    parser = argparse.ArgumentParser(prog="python -m meshbench.child", description=__doc__)
    parser.add_argument("system")
    parser.add_argument("item", choices=list(ITEMS))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()

    # Workers inherit file descriptor 1 and may print to it; the result must stand alone.
    answer = os.dup(1)
    os.dup2(2, 1)

    start = perf_counter()
    system = load(arguments.system)
    imported = perf_counter() - start
    samples = ITEMS[arguments.item].run(system, Scale(quick=arguments.quick, import_seconds=imported))
    with open(answer, "w") as out:
        json.dump(samples, out)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
