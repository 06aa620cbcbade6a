"""How long memory stays offered once its buffer was sent: for as long as the memory exists, or until it is dropped.

BUF-1: an export that lasts does not keep the memory of an array, of a tensor's storage or of `empty`: weak references tell of its end,
which closes the export first and waits for transfers in progress (EXP-2).
BUF-2: of an object that cannot tell of its end in time, such as a bytearray, one view keeps the memory in place for all exports. They
end when nothing but that view refers to the object. The same holds for all objects if transports written in Python are installed: they
may hold a lock where memory ends, and so must not be waited for there.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from mesh_rdma._native import Block, Memory

if TYPE_CHECKING:
    from mesh_rdma._native import Export, Tie

_PRESERVED = (2, 12)
"""The first version of torch of which it is certain that a storage ends with its Python object, whoever else refers to it."""
_FEW = 64
"""So many pinned objects are looked at whenever a buffer is made; more of them when as many again have been added."""
_SOON, _LATE = 1.0, 10.0
"""Seconds that the end of memory waits for transfers: until garbage is collected, which may hold a view; until that is logged."""


class _Pin:
    """Exports of one object, and the only reference to the object that they need."""

    def __init__(self, holder: memoryview | tuple[Any] | None, memory: Memory | None) -> None:
        self.holder = holder
        """``None`` if the exports keep the object themselves, until they are dropped."""
        self.memory = memory
        self.exports: dict[int, Export] = {}

    def is_alone(self) -> bool:
        """Whether nothing else refers to the object."""
        holder = self.holder
        if isinstance(holder, memoryview):
            return sys.getrefcount(holder.obj) <= _ALONE_IN_VIEW
        return isinstance(holder, tuple) and sys.getrefcount(holder[0]) <= _ALONE_IN_TUPLE


def _alone_in_view(holder: memoryview) -> int:
    return sys.getrefcount(holder.obj)


def _alone_in_tuple(holder: tuple[Any]) -> int:
    return sys.getrefcount(holder[0])


_ALONE_IN_VIEW = _alone_in_view(memoryview(bytearray(1)))
_ALONE_IN_TUPLE = _alone_in_tuple((object(),))


def _root(kept: Any) -> Any:
    """Return the object whose life is that of the memory: a storage, the array that has the memory, or what is behind a view."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    while True:
        if torch is not None and isinstance(kept, torch.Tensor):
            return kept.untyped_storage()
        if isinstance(kept, tuple):
            # Of a tensor, with its storage.
            return kept[1]
        if isinstance(kept, memoryview) and kept.obj is not None:
            kept = kept.obj
        elif numpy is not None and isinstance(kept, numpy.ndarray) and _has_memory(kept.base, numpy, torch):
            kept = kept.base
        else:
            return kept


def _has_memory(base: Any, numpy: Any, torch: Any) -> bool:
    """Whether the memory of an array with this base is that of the base, for as long as the base exists."""
    views = (numpy.ndarray, memoryview, bytearray, bytes)
    return isinstance(base, views) or (torch is not None and isinstance(base, torch.Tensor))


def _tells(root: Any) -> bool:
    """Whether weak references are told of the object's end before its memory is freed, and nothing else frees the memory."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(root, torch.UntypedStorage):
        return bool(torch.torch_version.TorchVersion(torch.__version__) >= _PRESERVED)
    if numpy is not None and isinstance(root, numpy.ndarray):
        # A subclass with slots may have no place for weak references.
        return type(root).__weakrefoffset__ != 0
    return isinstance(root, Block)


def _pin(kept: Any, root: Any) -> _Pin:
    if isinstance(kept, tuple):
        # References of C++ to a storage count as one to its Python object.
        return _Pin((root,) if _tells(root) else None, None)
    if kept is root:
        # No view: an array that only states its address.
        return _Pin((root,), None)
    try:
        view = memoryview(root)
        memory = Memory.of_view(view)
    except (TypeError, ValueError, BufferError):
        # An array of dates has no buffer, and need not be held in place. What gives only one view at a time has given it.
        return _Pin((root,) if type(root).__module__ == "numpy" else None, None)
    return _Pin(view, memory)


class Lasting:
    """The exports of this process that outlast their buffers."""

    def __init__(self) -> None:
        self.may_wait = True
        """Whether all who may work on memory can be waited for where it ends."""
        self._owners: dict[int, tuple[weakref.ref[Any], Tie]] = {}
        """The owners of memory whose end closes an export, by the export's number (BUF-1)."""
        self._pins: dict[int, _Pin] = {}
        """By the identity of the objects, which they keep (BUF-2)."""
        self._pinned: dict[int, int] = {}
        """Where the pin of an export is, by its number."""
        self._limit = self._most_owners = _FEW
        # Reentrant: garbage may be collected, and looked for, at any time.
        self._lock = threading.RLock()

    def last(self, export: Export) -> None:
        """Offer the memory for as long as it exists: a buffer of it is being sent."""
        if export.lasts:
            return
        kept = export.kept()
        if kept is None:
            return
        root = _root(kept)
        with self._lock:
            if isinstance(root, Block) or (self.may_wait and _tells(root)):
                self._leave_to(root, export)
            else:
                self._keep_in_place(export, kept, root)
            export.lasts = True

    def _leave_to(self, root: Any, export: Export) -> None:
        key, tie, owners = export.key, export.tie(), self._owners
        if tie is None:
            return
        # Its memory is kept by the export itself.
        waits = not isinstance(root, Block)

        def ended(_owner: object) -> None:
            owners.pop(key, None)
            if not owners:
                self._most_owners = _FEW
            _end(tie, waits)

        if len(owners) >= self._most_owners:
            # Exports of memory that lives on may have been dropped elsewhere.
            for other in [other for other, (_, its) in list(owners.items()) if its.is_over]:
                owners.pop(other, None)
            self._most_owners = max(2 * len(owners), _FEW)
        owners[key] = weakref.ref(root, ended), tie
        export.entrust(None if waits else root)

    def _keep_in_place(self, export: Export, kept: Any, root: Any) -> None:
        pin = self._pins.get(id(root)) or _pin(kept, root)
        if pin.holder is not None and not export.keep(pin.holder, pin.memory):
            # Another view of the object is of other memory.
            root, pin = kept, _Pin(None, None)
        if not self._pins and self._after_collection not in gc.callbacks:
            gc.callbacks.append(self._after_collection)
        self._pins[id(root)] = pin
        self._pinned[export.key] = id(root)
        pin.exports[export.key] = export

    def look(self) -> None:
        """End the exports of objects that nothing else refers to."""
        # If another thread is looking, that will do.
        if self._pins and self._lock.acquire(blocking=False):
            try:
                for pin in [each for each in self._pins.values() if each.is_alone()]:
                    for key, export in list(pin.exports.items()):
                        export.lasts = False
                        self.forget(key)
                self._limit = max(2 * len(self._pins), _FEW)
            finally:
                self._lock.release()

    def look_at_times(self) -> None:
        """The same, if they are few, or many more than the last time."""
        if self._pins and not _FEW < len(self._pins) < self._limit:
            self.look()

    def _after_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.look()

    def forget(self, key: int, *, is_kept: bool = False) -> None:
        """Let go of an export that is not offered any more, or no longer than its buffer exists; which may keep its memory."""
        with self._lock:
            root = self._pinned.pop(key, None)
            pin = None if root is None else self._pins.get(root)
            if root is not None and pin is not None:
                # The memory goes with the last of these, which may run anything.
                export = pin.exports.pop(key, None)
                if not pin.exports:
                    del self._pins[root]
                del export
            found = self._owners.get(key)
            # Until then, the memory's end has to wait for transfers.
            if found is not None and (is_kept or found[1].is_over):
                self._owners.pop(key, None)

    def counts(self) -> tuple[int, int]:
        """Return for how many exports the end of memory is waited for, and how many keep memory in place."""
        return len(self._owners), len(self._pinned)

    def owner(self, key: int) -> tuple[bool, Any]:
        """Return whether an export ends with the owner of its memory, and that owner if it still exists."""
        found = self._owners.get(key)
        return (False, None) if found is None else (True, found[0]())

    def end(self) -> list[Any]:
        """Look no more, as the process ends. Return all of these owners."""
        if self._after_collection in gc.callbacks:
            gc.callbacks.remove(self._after_collection)
        return [owner for each, _ in list(self._owners.values()) if (owner := each()) is not None]


def _end(tie: Tie, waits: bool) -> None:
    """Close an export whose memory is about to be freed."""
    tie.close(waits)
    if not waits or tie.ended(_SOON):
        return
    gc.collect()
    if not tie.ended(_LATE):
        import logging

        logging.getLogger("mesh_rdma").warning(
            "memory that was offered to other processes is about to be freed, and waits for one of them, which has been reading or "
            "writing it for %d s; it may be stopped, or its host be overloaded",
            _SOON + _LATE,
        )
        tie.ended()
