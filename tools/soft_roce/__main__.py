"""`python -m soft_roce [--devices N] [--limit SECONDS] [--share FOLDER] -- COMMAND...`.

Its exit status is the command's; 124 if the time was up, 125 if the machine did not come up or ended without one.
"""

import argparse
import sys
from pathlib import Path

from soft_roce import CannotBoot, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="soft_roce", description="Run a command where there are RDMA devices."
    )
    parser.add_argument("--devices", type=int, default=1, help="how many: rxe0, rxe1 and so on (1)")
    parser.add_argument("--limit", type=float, default=300, help="seconds that all of it may take (300)")
    parser.add_argument("--share", type=Path, help="a folder for results, $SOFT_ROCE_SHARE in the machine")
    parser.add_argument("command", nargs="+", help="what to run there, in this folder")
    told = parser.parse_args()
    try:
        return run(told.command, devices=told.devices, limit=told.limit, share=told.share)
    except TimeoutError as error:
        print(f"soft_roce: {error}", file=sys.stderr)
        return 124
    except (CannotBoot, RuntimeError) as error:
        print(f"soft_roce: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
