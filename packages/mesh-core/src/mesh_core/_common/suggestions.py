"""Suggests the name a user probably meant, for errors about unknown names."""

from collections.abc import Iterable


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
