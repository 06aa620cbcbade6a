"""What an extension that observes endpoints puts around them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._extensions.base import Extension
from mesh_core._extensions.events import EndpointCall
from mesh_core._hosting.responses import MARKS

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._common.context import Instance
    from mesh_core._common.tracing import Around
    from mesh_core._native import Message


def observed_by(extension: Extension) -> Around:
    """Return what tells an extension of the endpoints that begin from now on."""

    def tell(hook: Callable[..., None], *told: Any) -> None:
        try:
            hook(*told)
        except Exception:
            logging.getLogger("mesh").exception(
                "extension %r raised when it was told of %s", extension.name, told[0]
            )

    def around(
        spec: EndpointProperty[..., Any], function: Callable[..., Any], message: Message, who: Instance
    ) -> Callable[..., Any]:
        # Names of answers of another kind begin with a mark; nothing is left of those that are no endpoint.
        endpoint = message.name.lstrip("".join(MARKS))
        if not endpoint:
            return function
        call = EndpointCall(who.name, who.class_name, who.rank, endpoint)

        def run(*args: Any, **kwargs: Any) -> Any:
            tell(extension.endpoint_began, call)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                tell(extension.endpoint_ended, call, error)
                raise
            tell(extension.endpoint_ended, call, None)
            return result

        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            tell(extension.endpoint_began, call)
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                tell(extension.endpoint_ended, call, error)
                raise
            tell(extension.endpoint_ended, call, None)
            return result

        return run_coroutine if spec.is_async else run

    return around
