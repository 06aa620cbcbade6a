"""Suggests the name a user probably meant, for errors about unknown names."""

from collections.abc import Iterable, Mapping


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the one of ``names`` most similar to ``name``, or ``None`` if none is similar.

    >>> nearest("plguins", ["doctor", "plugins"])
    'plugins'
    """
    import difflib  # only needed for errors: keeps `import mesh_core` cheap

    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` to end a message, or nothing if no name is similar.

    >>> did_you_mean("plguins", ["doctor", "plugins"])
    "; did you mean 'plugins'?"
    >>> did_you_mean("zebra", ["doctor", "plugins"])
    ''
    """
    match = nearest(name, names, cutoff=cutoff)
    return f"; did you mean {match!r}?" if match is not None else ""


_ELSEWHERE = {
    "ca": "the authority of a job is in the folder that credentials= names",
    "propagate": "say it where results become tensors, remote(actors.step, propagate=...) of mesh_tensor",
    "instrument": "leave it out; all endpoints are traced if OpenTelemetry is set up",
}
"""What does the work of options that other libraries have."""


def unknown_option(function: str, unknown: Mapping[str, object], known: Iterable[str]) -> str:
    """Return the error for the first unknown keyword argument of a function.

    >>> unknown_option("attach_to_workers", {"ca": "x"}, ["credentials"])
    "attach_to_workers() got an unexpected keyword argument 'ca': the authority of a job is in the folder that credentials= names"
    """
    name = next(iter(unknown))
    hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"
