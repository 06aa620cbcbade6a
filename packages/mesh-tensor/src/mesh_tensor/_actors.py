"""Endpoints of actors whose results are tensors of a mesh."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import mesh_of
from mesh_core.extensions import procs_of
from mesh_tensor._descriptors import form_of
from mesh_tensor._errors import described
from mesh_tensor._instructions import HOLE, LIST, NUMBER, SPECIAL
from mesh_tensor._propagate import Hit, fake, fakes
from mesh_tensor._tensor import MeshTensor, issuer_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core import Endpoint, Future, ProcMesh, ValueMesh
    from mesh_tensor._meeting import Exchange
    from mesh_tensor._propagate import Issuer

P = ParamSpec("P")
R = TypeVar("R")


class RemoteEndpoint(Generic[P, R]):
    """An endpoint whose results are tensors of a mesh; made by :func:`remote`."""

    def __init__(self, endpoint: Endpoint[P, R], propagate: Callable[..., Any] | None) -> None:
        self._endpoint = endpoint
        self._propagate = propagate
        self._name = f"{mesh_of(endpoint.actors).class_name}.{endpoint.name}"
        self._forms: dict[Any, tuple[list[Any], Any, list[Any]]] = {}

    def __repr__(self) -> str:
        return f"<remote endpoint {self._name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it on every actor, and return mesh tensors for the results."""
        procs = procs_of(self._endpoint.actors)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._check(leaves, procs)
        issuer = issuer_of(procs)
        issuer.stream.tensors.recorded(lambda recorder: recorder.exchanges("call an actor"))
        with _disable_current_modes():
            known = None if self._propagate is None else self._known(issuer, leaves, spec)
            issuer.stream.exchange.join()
            number = next(issuer.stream.tensors.numbers)
            future = self._endpoint.with_options(keep=True).call(*args, **kwargs)
            future.add_done_callback(partial(_pass_on, issuer.stream.exchange, number))
            result: R = (
                self._asked(issuer, number) if known is None else self._promised(issuer, number, known)
            )
            return result

    def _check(self, leaves: list[Any], procs: ProcMesh) -> None:
        for each in leaves:
            if not hasattr(each, "descriptor"):
                continue
            stream = each.descriptor.stream
            if stream.procs != procs:
                raise ValueError(
                    f"{self._name} runs on {procs}, and an argument is {described(each)}: move it there with to_mesh()"
                )
            if each.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"no gradient flows through {self._name}: detach() its arguments, or call it within torch.no_grad()"
                )

    def _asked(self, issuer: Issuer, number: int) -> Any:
        """Wait for the forms of the results, and name each."""

        def learn() -> Any:
            return self._hit(issuer, "collect", [NUMBER], [issuer.stream.descriptor(_EMPTY)])

        _, (whole,) = issuer.function(("collect", self._name), learn, [], number)
        return issuer.results(whole)

    def _promised(self, issuer: Issuer, number: int, known: tuple[list[Any], Any, list[Any]]) -> Any:
        values, shape, forms = known

        def learn() -> Any:
            return self._hit(
                issuer, "collected", [[(each.form[0], each.form[3]) for each in forms], NUMBER], forms
            )

        _, made = issuer.function(("collected", self._name, *forms), learn, [], number)
        supply = iter(made)
        return pytree.tree_unflatten([next(supply) if each is HOLE else each for each in values], shape)

    def _hit(self, issuer: Issuer, what: str, always: list[Any], made: list[Any]) -> Any:
        template = issuer.stream.teach(
            ((SPECIAL, what, self._name), None), always, {}, 0, len(made), LIST, ()
        )
        return Hit(template, made, 0, True)

    def _known(self, issuer: Issuer, leaves: list[Any], spec: Any) -> tuple[list[Any], Any, list[Any]]:
        """Find the forms of the results, by the given `propagate`."""
        assert self._propagate is not None
        with issuer.stream.tensors.without_tensors():
            key = (issuer, spec, *map(key_of, leaves))
        found = self._forms.get(key)
        if found is None:
            with fakes():
                seen: dict[int, torch.Tensor] = {}
                args, kwargs = pytree.tree_unflatten([fake(each, seen, MeshTensor) for each in leaves], spec)
                values, shape = pytree.tree_flatten(self._propagate(*args, **kwargs))
            forms = [
                issuer.stream.descriptor(form_of(each)) for each in values if isinstance(each, torch.Tensor)
            ]
            kept = [HOLE if isinstance(each, torch.Tensor) else each for each in values]
            found = self._forms[key] = kept, shape, forms
        return found


_EMPTY = ((0,), (1,), 0, torch.float32, torch.device("cpu"))


def _pass_on(exchange: Exchange, number: int, future: Future[ValueMesh[Any]]) -> None:
    """Tell each process the outcome of a call, now that it is done."""
    if future.exception() is None:
        exchange.returned(number, future.get().values())
        return

    def rest() -> None:
        # A dead process is reported before the others have answered.
        found: Any = future
        try:
            outcomes = found.get(return_exceptions=True).values()
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody is to wait for it
            outcomes = [error] * len(exchange.procs)
        exchange.returned(number, outcomes)

    threading.Thread(target=rest, name="mesh-tensor-rest", daemon=True).start()
