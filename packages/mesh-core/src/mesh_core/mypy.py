"""A plugin for mypy that reports a wrong constructor argument of ``spawn`` in the constructor's own words.

``procs.spawn("t", Trainer, "fast")`` is an error for every type checker. By itself, mypy only says that no overload of ``spawn``
fits. With this plugin it says what it says of ``Trainer(lr="fast")``, which names the parameter. In ``pyproject.toml``::

    [tool.mypy]
    plugins = ["mesh_core.mypy"]

It also checks the constructor's arguments beside ``supervise=``, where no signature of ``spawn`` can describe them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy.checker import TypeChecker
    from mypy.errors import ErrorInfo
    from mypy.nodes import ArgKind, CallExpr, Expression
    from mypy.plugin import MethodSigContext, Plugin
    from mypy.types import FunctionLike, Type

_SPAWN = "mesh_core._meshes.procs.ProcMesh.spawn"


class _Arguments(NamedTuple):
    """Arguments of a call, as mypy has them."""

    values: list[Expression]
    kinds: list[ArgKind]
    names: list[str | None]


def plugin(version: str) -> type[Plugin]:  # noqa: ARG001 - what mypy passes
    """Return the class of the plugin; mypy calls this."""
    from mypy.plugin import Plugin

    class MeshPlugin(Plugin):
        def get_method_signature_hook(
            self, fullname: str
        ) -> Callable[[MethodSigContext], FunctionLike] | None:
            return _signature if fullname == _SPAWN else None

    return MeshPlugin


def _signature(context: MethodSigContext) -> FunctionLike:
    """Return a signature of ``spawn`` as declared, or one that takes anything if what is wrong with the call was reported."""
    from mypy.checker import TypeChecker
    from mypy.nodes import CallExpr
    from mypy.types import AnyType, FunctionLike, TypeOfAny, get_proper_type

    declared, call, checker = context.default_signature, context.context, context.api
    if not isinstance(call, CallExpr) or not isinstance(checker, TypeChecker):
        return declared
    # mypy asks for both signatures. A call concerns one of them.
    supervised = "supervise" in call.arg_names
    if supervised != ("supervise" in declared.arg_names):
        return declared
    given = _Arguments(call.args, call.arg_kinds, call.arg_names)
    if not supervised and not _check(checker, declared, given, call)[1]:
        return declared
    found = _split(given)
    if found is None:
        return declared
    cls, given = found
    made = get_proper_type(checker.get_expression_type(cls))
    if not isinstance(made, FunctionLike) or not made.is_type_obj():
        return declared
    instance, errors = _check(checker, made, given, _call_of(cls, made, given, call))
    if not errors:
        return declared
    checker.msg.add_errors(errors)
    anything = AnyType(TypeOfAny.from_error)
    return declared.copy_modified(
        arg_types=[anything] * len(declared.arg_types), ret_type=instance, variables=()
    )


def _split(given: _Arguments) -> tuple[Expression, _Arguments] | None:
    """Return the class that is spawned, and the arguments of its constructor; ``None`` if that cannot be told."""
    from mypy.nodes import ARG_POS

    cls, own, rest = None, ["name", "cls"], _Arguments([], [], [])
    for value, kind, name in zip(*given, strict=True):
        taken = own[0] if own and kind == ARG_POS else name
        if taken in own:
            own.remove(taken)
            cls = value if taken == "cls" else cls
        elif own and kind.is_star():
            return None
        elif name != "supervise":
            rest.values.append(value)
            rest.kinds.append(kind)
            rest.names.append(name)
    return None if cls is None else (cls, rest)


def _call_of(cls: Expression, made: FunctionLike, given: _Arguments, call: CallExpr) -> CallExpr:
    """Return a call of the class, in place of the one of ``spawn``; mypy reports arguments by the names that are in it."""
    from mypy.nodes import ARG_OPT, ARG_POS, CallExpr
    from mypy.types import CallableType

    names = list(given.names)
    if isinstance(made, CallableType):
        declared = zip(made.arg_names, made.arg_kinds, strict=True)
        parameters = iter([name for name, kind in declared if kind in (ARG_POS, ARG_OPT)])
        for at, kind in enumerate(given.kinds):
            if kind != ARG_POS:
                break
            names[at] = next(parameters, None)
    there = CallExpr(cls, given.values, given.kinds, names)
    there.set_line(call)
    return there


def _check(
    checker: TypeChecker, callee: FunctionLike, given: _Arguments, call: CallExpr
) -> tuple[Type, list[ErrorInfo]]:
    """Return the result's type, and what mypy would report."""
    with checker.msg.filter_errors(save_filtered_errors=True) as watch:
        result, _ = checker.expr_checker.check_call(callee, *given[:2], call, given.names)
    return result, watch.filtered_errors()
