"""Fully sharded parameters: gathered while the modules that use them compute.

UNT-1: parameters that are gathered once more for the backward pass have the values of the forward pass, or that pass raises. What autograd has kept of them, such as
transposed views, stays the same in this process; what it names on the mesh is freed, and made again at its first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref as weak

import torch
from torch import nn

from mesh_tensor._errors import described
from mesh_tensor._global._host import whole_parameters, whole_values
from mesh_tensor._stream import LetGo, Ref, Stream, caller
from mesh_tensor._streams._guard import View, storage_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.tensor.placement_types import Placement

_CALLS = "_mesh_calls"
"""The attribute of a unit with its calls in progress: of the unit, which may be a copy of the one that got the hooks."""


@dataclass(frozen=True)
class Spread:
    """How a parameter is gathered."""

    kept: tuple[Placement, ...]
    """Its own layout on the mesh."""
    used: tuple[Placement, ...]
    """The same while its unit computes."""
    is_freed: bool
    """It is gathered anew for the backward pass."""


@dataclass(frozen=True)
class _Own:
    """A parameter of a unit."""

    path: str
    """From the unit to the module that it belongs to."""
    name: str
    spread: Spread


class Units:
    """Modules whose parameters are gathered together: the items of lists of modules, such as a transformer's blocks, and the whole for the rest."""

    def __init__(self, module: nn.Module) -> None:
        self._all = dict(module.named_modules())
        self._own: dict[str, list[_Own]] = {}
        """By the name of the unit."""

    def gather(self, prefix: str, spread: Mapping[str, Spread]) -> None:
        """Have parameters of a module gathered while their unit computes."""
        unit = self._unit_of(prefix)
        if not unit:
            # It is the last to compute, and needed first in the backward pass.
            spread = {name: Spread(each.kept, each.used, is_freed=False) for name, each in spread.items()}
        path = prefix[len(unit) :].lstrip(".")
        self._own.setdefault(unit, []).extend(_Own(path, name, each) for name, each in spread.items())
        if path:
            # It may be called by itself.
            _gather_while_it_computes(
                self._all[prefix], [_Own("", name, each) for name, each in spread.items()]
            )

    def hook(self) -> None:
        """Do so from now on."""
        for unit, own in self._own.items():
            _gather_while_it_computes(self._all[unit], own)

    def _unit_of(self, prefix: str) -> str:
        """Return the outermost item of a list that a module is in, or else of a sequence, or else the whole."""
        names = prefix.split(".")
        paths = [".".join(names[:count]) for count in range(len(names))]
        for kinds in ((nn.ModuleList, nn.ModuleDict), (nn.Sequential,)):
            for count, each in enumerate(paths):
                if isinstance(self._all[each], kinds):
                    return ".".join(names[: count + 1])
        return ""


def _gather_while_it_computes(module: nn.Module, own: Sequence[_Own]) -> None:
    """Make parameters whole while a module computes: found before the modules' own parameters are looked up."""

    def begin(unit: nn.Module, _: Any) -> None:
        call = _Call()
        unit.__dict__.setdefault(_CALLS, []).append(call)
        call.begin(unit, own)

    def end(unit: nn.Module, _args: Any, _output: Any) -> None:
        calls = unit.__dict__.get(_CALLS)
        if calls:
            calls.pop().end()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


class _Call:
    """A call of a unit."""

    def __init__(self) -> None:
        self._whole: list[tuple[nn.Module, str]] = []
        """Which modules have which parameters whole."""
        self._freed: list[_FreedParameters] = []

    def begin(self, unit: nn.Module, own: Sequence[_Own]) -> None:
        """Gather what no enclosing call has gathered."""
        new: list[tuple[nn.Module, _Own, Any]] = []
        for each in own:
            owner = _inside(unit, each.path)
            if owner is not None and each.name not in owner.__dict__:
                parameter = owner._parameters.get(each.name)  # noqa: SLF001 - the parameter itself
                if parameter is not None:
                    new.append((owner, each, parameter))
        # Apart, as what is gathered together gets its gradients together.
        for needs in (True, False):
            chosen = [one for one in new if one[2].requires_grad is needs]
            if not chosen:
                continue
            parameters = [parameter for _, _, parameter in chosen]
            spreads = [each.spread for _, each, _ in chosen]
            found = whole_parameters(
                parameters, [each.kept for each in spreads], [each.used for each in spreads]
            )
            for (owner, each, _), whole in zip(chosen, found, strict=True):
                owner.__dict__[each.name] = whole
                self._whole.append((owner, each.name))
            if torch.is_grad_enabled() and all(each.spread.is_freed for _, each, _ in chosen):
                self._freed.append(_FreedParameters(parameters, spreads, found))

    def end(self) -> None:
        """Drop what was gathered."""
        for each in self._freed:
            each.let_go()
        for owner, name in self._whole:
            owner.__dict__.pop(name, None)


class _FreedParameters:
    """Parameters that were gathered by a call of a unit, and are gathered once more if autograd uses what it has kept of them."""

    def __init__(self, parameters: list[Any], spreads: Sequence[Spread], wholes: tuple[Any, ...]) -> None:
        self._parameters = parameters
        self._kept = [each.kept for each in spreads]
        self._used = [each.used for each in spreads]
        self._wholes = wholes
        """Until they are let go."""
        self._versions = [each._version for each in (*parameters, *wholes)]  # noqa: SLF001 - its public name
        self._refs: list[weak[Ref]] = []
        for each in wholes:
            storage_of(each.ref).views = []

    def let_go(self) -> None:
        """Free them and all views of them, unless they were written to."""
        wholes, self._wholes = self._wholes, ()
        if [each._version for each in (*self._parameters, *wholes)] != self._versions:  # noqa: SLF001 - its public name
            return
        for place, whole in enumerate(wholes):
            storage = storage_of(whole.ref)
            views, storage.views = storage.views or [], None
            self._refs.append(weak(whole.ref))
            whole.ref.let_go(partial(self._again, place))
            for view in views:
                ref = view.ref()
                if ref is not None and type(ref) is Ref:
                    ref.let_go(partial(_seen_again, ref.stream, view))

    def _again(self, place: int) -> int:
        """Gather all that are still needed; return the number of one."""
        now = [each._version for each in self._parameters]  # noqa: SLF001 - its public name
        for parameter, version, before in zip(self._parameters, now, self._versions, strict=False):
            if version != before:
                raise RuntimeError(
                    f"{described(parameter)}, was changed in place between the forward pass and the backward pass, which gathers it "
                    "again (reshard_after_forward=True): step the optimizer after backward()"
                )
        made = whole_values(self._parameters, self._kept, self._used)
        for at, each in enumerate(made):
            ref = self._refs[at]()
            if at != place and isinstance(ref, LetGo):
                ref.have(each.ref.taken())
        number: int = made[place].ref.taken()
        return number


def _seen_again(stream: Stream, view: View) -> int:
    """Make a view once more, of what is made once more; return its number."""
    with stream.lock:
        stream.have(view.of)
        made = stream.ref()
        stream.append(view.template, made.number, view.of, view.scalars, caller())
        return made.taken()


def _inside(unit: nn.Module, path: str) -> nn.Module | None:
    """Return a module in another one, if it is still there."""
    found: nn.Module | None = unit
    for name in path.split(".") if path else ():
        if found is None:
            break
        found = found._modules.get(name)  # noqa: SLF001 - get_submodule() raises
    return found
