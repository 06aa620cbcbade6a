"""Log failed calls whose futures nobody has looked at, one line each.

The runtime detects them (``crates/mesh-runtime/src/unseen.rs``) and sends the process a notice, which is logged here.
"""

from __future__ import annotations

import logging
from _pickle import loads as _c_loads
from typing import TYPE_CHECKING

from mesh_core._futures.promise_registry import Promises

if TYPE_CHECKING:
    from mesh_core._native import Message
    from mesh_core._process.process import Process

_LONGEST = 500


def report(notice: Message) -> None:
    """Log that a call failed and that nobody has looked at its future."""
    endpoint, actor, (_, rank, _), others = (
        notice.name.lstrip(".!>+"),
        notice.shape,
        notice.src,
        notice.others,
    )
    where = f"on rank {rank}"
    if (undelivered := notice.undelivered()) is not None:
        said = undelivered[1]
        what = said if notice.is_end else f"the message came back: {said}"
    else:
        told = _c_loads(notice.raw()[0])[0]
        if told["cut_short"]:
            return
        where = f"on rank {told['rank']}, host {told['host']}, pid {told['pid']}"
        text = told["message"].partition("\n")[0][:_LONGEST]
        what = f"{told['cause_name']}: {text}" if text else told["cause_name"]
    more = f" (and {others} more {'rank' if others == 1 else 'ranks'})" if others else ""
    logging.getLogger("mesh").error(
        "a call has failed, and nobody has looked at its future: %s of actor %r %s%s: %s",
        endpoint,
        actor,
        where,
        more,
        what,
    )


def report_left(process: Process) -> None:
    """Log failures that nobody has looked at although their futures still exist, at the end of the script."""
    for notice in process.runtime.unseen():
        report(notice)
    if (promises := process.slots.find(Promises)) is not None:
        for failure in list(promises.failures):
            failure.tell()
