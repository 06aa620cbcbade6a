"""The answers of probes, which are asked once in a process, by whichever manager is first.

PLUG-3: a plugin that was loaded by a manager is probed once in a process. A probe that takes long is warned of by name.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from mesh_core.plugins._descriptors import ProbeResult
from mesh_core.plugins._scan import PluginEntry

SLOW_S: Final = 0.5
"""How long a probe may take before it is warned of."""


class Probes:
    """What probes have answered in this process, by the module that offers the plugin: imported anew, it is another plugin."""

    def __init__(self) -> None:
        self._answers: weakref.WeakKeyDictionary[ModuleType, dict[PluginEntry, ProbeResult[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._nested = threading.local()

    def ask(
        self, module: ModuleType, entry: PluginEntry, word: str, probe: Callable[[], ProbeResult[Any]]
    ) -> ProbeResult[Any]:
        """Return the answer, running the probe if nobody has yet. It may ask for others."""
        # Without a lock, which two probes that ask for each other would wait for. At worst two threads ask at once.
        answers = self._answers.setdefault(module, {})
        if entry in answers:
            return answers[entry]
        outer, self._nested.seconds = getattr(self._nested, "seconds", 0.0), 0.0
        began = time.monotonic()
        try:
            answer = answers.setdefault(entry, probe())
        finally:
            total = time.monotonic() - began
            own, self._nested.seconds = total - self._nested.seconds, outer + total
        if own > SLOW_S:
            logging.getLogger("mesh_core.plugins").warning(
                "the probe of %s %r of %s has taken %.1f s, for which everybody waits who looks for one; a probe must be cheap: "
                "report this to the author of %s, or switch it off with MESH_PLUGINS=-%s",
                word,
                entry.name,
                entry.origin,
                own,
                entry.distribution,
                entry.name,
            )
        return answer


PROBES: Final = Probes()
"""Those of this process."""
