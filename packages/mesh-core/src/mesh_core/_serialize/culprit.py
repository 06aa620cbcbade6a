"""Errors for objects that cannot be sent or rebuilt: which object, why, and what to do."""

from __future__ import annotations

import types
from collections.abc import Iterator

from mesh_core._common.errors import SerializationError, Unsendable
from mesh_core._serialize.handlers import NoHandlerError, registered
from mesh_core._serialize.pickle import dump_by_value

# The search pickles parts of the message again, so both are bounded.
_MAX_DEPTH = 16
_MAX_TRIALS = 256


def serialization_error(obj: object, error: Exception, root: str | None) -> SerializationError:
    """Return an error that names the innermost object that cannot be pickled."""
    path, value, cause = _find(obj, error, root)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = (
        cause.advice
        if isinstance(cause, Unsendable)
        else "Create it where it is used (in the actor's __init__, say), "
        f"send what it is made from, or give its class ({kind}) a __reduce__ method."
    )
    return SerializationError(
        f"cannot send {path}: {_reason(cause)}. {advice}",
        path=path,
        type_name=kind,
    )


def explain_load_failure(error: Exception) -> SerializationError:
    """Return the error to raise when a complete message cannot be rebuilt."""
    if isinstance(error, ModuleNotFoundError):
        advice = f"Module {error.name!r} must be importable in both processes: install it there, or send code by value."
    elif isinstance(error, (AttributeError, ImportError)):
        advice = "Both processes must run the same version of the code that defines it."
    elif isinstance(error, NoHandlerError):
        return SerializationError(
            f"cannot rebuild a message: {error}. Call register_handler() here too: in the module of the type, which the "
            "actor's module imports, in a bootstrap, or in the start() of an extension that these processes carry."
        )
    else:
        advice = "Its class must be able to rebuild the result of its __reduce__ or __getstate__."
    return SerializationError(f"cannot rebuild a message: {_reason(error)}. {advice}")


def _reason(error: Exception) -> str:
    if isinstance(error.__cause__, RecursionError) or isinstance(error, RecursionError):
        return "it is nested too deeply to be pickled"
    try:
        text = str(error).strip().rstrip(".")
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything
        text = ""
    plain = isinstance(error, TypeError) and text.startswith("cannot ")
    return text if plain else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _find(obj: object, error: Exception, root: str | None) -> tuple[str, object, Exception]:
    """Descend into the first part that fails, for as long as there is one."""
    path, value, cause = root or "the message", obj, error
    parts = _call_parts(obj) if root is None else None
    trials = 0
    for _ in range(_MAX_DEPTH):
        for step, child in parts if parts is not None else _parts(value):
            trials += 1
            if trials > _MAX_TRIALS:
                return path, value, cause
            failure = _failure(child)
            # An object that refuses to be sent says why; its parts are not the reason.
            if failure is not None and isinstance(failure, Unsendable) >= isinstance(cause, Unsendable):
                # The first step of a call is the whole path.
                path = step if parts is not None else path + step
                value, cause = child, failure
                break
        else:
            return path, value, cause
        parts = None
    return path, value, cause


def _failure(value: object) -> Exception | None:
    try:
        dump_by_value(value)
    except Exception as error:  # noqa: BLE001 - foreign pickling code may raise anything
        return error
    return None


def _call_parts(obj: object) -> list[tuple[str, object]] | None:
    """Return the named arguments if ``obj`` is what a call or a spawn sends: a tuple that ends with args and kwargs."""
    if type(obj) is tuple and len(obj) in (2, 5) and type(obj[-2]) is tuple and type(obj[-1]) is dict:
        args, kwargs = obj[-2:]
        named = [(f"args[{place}]", value) for place, value in enumerate(args)]
        return named + [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts of ``value``, each with the step that leads to it."""
    if type(value) in registered().reducers:
        return  # a reducer need not send the parts
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"[{_short(key)}]", item
            yield f" key {_short(key)}", key
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", item) for name, item in zip(value._fields, value, strict=False))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" element {_short(item)}", item) for item in value)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not name.startswith("__"))
    else:
        yield from _attributes(value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what is sent with a function that is pickled by value."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f" (its closure's {name!r})", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f" (the global {name!r})", function.__globals__[name]
    for place, default in enumerate(function.__defaults__ or ()):
        yield f" (its default {place})", default


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    import dataclasses  # slow to import, and only needed for errors

    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield f".{field.name}", getattr(value, field.name)
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__ may raise anything
        return f"<{type(value).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."
