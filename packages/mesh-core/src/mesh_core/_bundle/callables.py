"""What the native layer calls: functions and classes of several rooms, passed to it once when mesh_core is imported."""

from __future__ import annotations

import sys
import threading
from _pickle import dumps as plain_dumps
from _pickle import loads as plain_loads
from _signal import set_wakeup_fd  # type: ignore[import-not-found]  # built in; `signal` takes longer to import
from typing import Any

from mesh_core._common import codes
from mesh_core._common.context import current_instance
from mesh_core._common.current import current
from mesh_core._common.errors import AuthenticationError, MeshError, of_native
from mesh_core._native import hold
from mesh_core._serialize import dump_message, loads

# The modules imported inside these functions are imported when first needed, not with mesh_core.


def _arrive(value: Any) -> object:
    from mesh_core._meshes.refs import arrive

    return arrive(value)


def _too_large(*told: Any) -> BaseException:
    from mesh_core._meshes.refs import too_large

    return too_large(*told)


def _crowded(*told: Any) -> BaseException:
    from mesh_core._futures.flow_errors import crowded

    return crowded(*told)


def _refusal(*told: Any) -> BaseException | None:
    from mesh_core._futures.flow_errors import refusal

    return refusal(*told)


def _unsent(*told: Any) -> BaseException:
    from mesh_core._futures.flow_errors import unsent

    return unsent(*told)


def _not_spawned(*told: Any) -> BaseException:
    from mesh_core._futures.flow_errors import not_spawned

    return not_spawned(*told)


def _alarm() -> BaseException | None:
    """Return what a waiting call raises when a failure reached the script."""
    return current().supervision.alarm()


def _current_actor() -> int:
    """Return the actor that the calling thread works for; 0 for none."""
    instance = current_instance()
    return 0 if instance is None else instance.actor_id


def _in_coroutine() -> bool:
    """Return whether an event loop runs in this thread, which must not be blocked."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _on_main_thread() -> bool:
    return threading.main_thread().ident == threading.get_ident()


def hand_over() -> None:
    """Give the native layer the functions it calls, and the enums whose members it returns."""
    hold(
        {
            "dumps": dump_message,
            "loads": loads,
            "plain_dumps": plain_dumps,
            "plain_loads": plain_loads,
            "arrive": _arrive,
            "too_large": _too_large,
            "of_native": of_native,
            "mesh_error": MeshError,
            "authentication_error": AuthenticationError,
            "alarm": _alarm,
            "current_actor": _current_actor,
            "in_coroutine": _in_coroutine,
            "on_main_thread": _on_main_thread,
            "set_wakeup_fd": set_wakeup_fd,
            "crowded": _crowded,
            "refusal": _refusal,
            "unsent": _unsent,
            "not_spawned": _not_spawned,
        },
        [
            codes.MessageKind,
            codes.Request,
            codes.Question,
            codes.Undelivered,
            codes.HostState,
            codes.FailureKind,
            codes.NativeError,
        ],
    )
