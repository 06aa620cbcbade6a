"""Functions of the user's own on the processes of a mesh, as instructions among the operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from mesh_core import Endpoint
from mesh_tensor._actors import RemoteEndpoint
from mesh_tensor._descriptors import form_of
from mesh_tensor._instructions import HOLE, LIST, SPECIAL
from mesh_tensor._propagate import Hit, Issuer, fake, fakes
from mesh_tensor._tensor import MeshTensor, key_of
from mesh_tensor._torch._trees import Structure
from mesh_tensor._view import PerRank, activate

if TYPE_CHECKING:
    from typing import Literal

    from mesh_core import ProcMesh

P = ParamSpec("P")
R = TypeVar("R")


def remote(
    function: Callable[P, R] | Endpoint[P, R] | None = None,
    *,
    propagate: Callable[..., Any] | Literal["ask"] | None = None,
) -> Any:
    """Run a function on every process of a mesh; mesh tensors among its arguments arrive as the process's own tensors.

    Tensors in its result, including those in lists, dicts and tuples, become mesh tensors. A call is one instruction
    among the operators, and the script does not wait for it.

    To find the shapes of the results, the function is run once in the script for each combination of argument shapes, on tensors without values,
    including any side effects. `propagate` is a function to run instead; or `"ask"`, which waits for the shapes that the processes
    report, for functions whose result shapes depend on values.

    Arguments and results that are not tensors must be the same on all processes. Gradients do not flow through the function.

    `remote(actors.step)` does the same for an endpoint of actors: tensors in its results stay on the actors' processes and become mesh tensors. The
    call runs in order with other calls of the actors and with the operators around it. The script waits for the shapes of the results
    unless `propagate` is a function.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import activate, fetch, remote
    >>> @remote
    ... def spread(x, factor):
    ...     return {"low": x.min() * factor, "high": x.max() * factor}
    >>> with this_host().spawn_procs({"gpus": 2}) as procs, activate(procs):
    ...     found = spread(torch.arange(5.0), 10)
    ...     print(fetch(found["high"]).values())
    [tensor(40.), tensor(40.)]
    """
    if function is None:
        return functools.partial(remote, propagate=propagate)
    if isinstance(function, Endpoint):
        if propagate is not None and propagate != "ask" and not callable(propagate):
            raise TypeError(f"propagate= must be a function or 'ask', got {propagate!r}")
        return RemoteEndpoint(function, None if propagate == "ask" else propagate)
    if not callable(function):
        raise TypeError(f"remote() takes a function, got {function!r}")
    if propagate is not None and propagate != "ask" and not callable(propagate):
        raise TypeError(f"propagate= must be a function or 'ask', got {propagate!r}")
    return RemoteFunction(function, propagate)


class RemoteFunction(Generic[P, R]):
    """A function that runs on the processes of a mesh; created by :func:`remote`."""

    def __init__(self, function: Callable[P, R], propagate: Any) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._propagate = propagate
        self._name = getattr(function, "__qualname__", repr(function))

    def __repr__(self) -> str:
        return f"<remote function {self._name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it where the tensors among the arguments are, or on the mesh that is active."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        local = [each for each in tensors if type(each) is not MeshTensor]
        if local:
            raise TypeError(
                f"{self._name} got a tensor of this process, {tuple(local[0].shape)} of {local[0].dtype}: give it to the mesh "
                "first, with share()"
            )
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise ValueError(
                f"no gradient flows through {self._name}: detach() its arguments, or call it within torch.no_grad()"
            )
        active = _active()
        with _disable_current_modes():
            result: R = self._run(active, leaves, spec, tensors)
            return result

    def on(self, procs: ProcMesh) -> Callable[P, R]:
        """Return the same function, to be run on this mesh; for calls without a tensor among their arguments."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with activate(procs):
                return self(*args, **kwargs)

        return run

    def _run(self, active: Issuer | None, leaves: list[Any], spec: Any, tensors: list[Any]) -> Any:
        issuer = tensors[0].descriptor.stream.issuer if tensors else active
        if issuer is None:
            raise ValueError(
                f"{self._name} got no tensor of a mesh, and no mesh is active: call it within activate(procs), or as "
                f"{self._name}.on(procs)(...)"
            )
        others = {each.procs for each in tensors} - {issuer.stream.procs}
        if others:
            raise ValueError(
                f"{self._name} got a tensor on {issuer.stream.procs}, and another on {others.pop()}; a function works on one mesh"
            )
        key = (self, spec, *map(key_of, leaves))
        hit, made = issuer.function(key, partial(self._learn, issuer, leaves, spec), tensors)
        if hit.shape is None:
            return issuer.results(made[0])
        values, shape = hit.shape
        supply = iter(made)
        return pytree.tree_unflatten([next(supply) if each is HOLE else each for each in values], shape)

    def _learn(self, issuer: Issuer, leaves: list[Any], spec: Any) -> Hit:
        """Find the forms of the results, and teach the workers the function."""
        stream = issuer.stream
        arguments = [HOLE if isinstance(each, torch.Tensor) else each for each in leaves]
        count = sum(each is HOLE for each in arguments)
        if self._propagate == "ask":
            always = [self._function, Structure(spec), *arguments]
            template = stream.teach(((SPECIAL, "ask", self._name), None), always, {}, count, 1, LIST, ())
            return Hit(template, [stream.descriptor(form_of(torch.empty(0)))], 0, True)
        with fakes():
            known: dict[int, torch.Tensor] = {}
            stand_ins = [fake(each, known, MeshTensor) for each in leaves]
            args, kwargs = pytree.tree_unflatten(stand_ins, spec)
            try:
                found = (self._propagate or self._function)(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"the forms of what {self._name} returns depend on values ({error}): say what they are with "
                    "@remote(propagate=function), or have the processes asked with @remote(propagate='ask')"
                ) from None
        values, shape = pytree.tree_flatten(found)
        results: list[Any] = [
            stream.descriptor(form_of(each)) for each in values if isinstance(each, torch.Tensor)
        ]
        told = [(each.form[0], each.form[3]) for each in results]
        always = [self._function, Structure(spec), told, *arguments]
        template = stream.teach(
            ((SPECIAL, "call", self._name), None), always, {}, count, len(results), LIST, ()
        )
        hit = Hit(template, results, 0, True)
        hit.shape = [HOLE if isinstance(each, torch.Tensor) else each for each in values], shape
        return hit


def _active() -> Issuer | None:
    """Return the issuer of the active mesh."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, PerRank):
            return mode.here()
    return None
