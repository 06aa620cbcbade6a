"""Opening a store by its name."""

from mesh_core.plugins import PluginManager
from mesh_stores._contract import STORES, Store


def open_store(url: str) -> Store:
    """Open ``name:location``, such as ``folder:/checkpoints``.

    >>> open_store("folder:/tmp")  # doctest: +ELLIPSIS
    <mesh_stores._folder.FolderStore object at ...>
    """
    name, _, location = url.partition(":")
    manager = PluginManager()
    plugin = manager.get(STORES, name)
    able = manager.probe(plugin)
    if not able:
        raise OSError(f"store {name!r} cannot work here: {able.reason}. Try: {able.remedy}.")
    return plugin.create(location)
