"""Send records of ``logging`` from workers to the script's handlers.

Records travel as JSON, together with the text that is shown if the script has no handlers. Nothing in them is trusted: a
worker, perhaps on another host, may have written anything.

RCD-1: a record has at most :data:`LONGEST` bytes, whatever was logged; what does not fit is cut and marked as cut.
RCD-2: reading a record raises nothing and creates no loggers; what is not a record is shown as text.
"""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

from mesh_core._features.logs.fallback import Fallback

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST = 64 * 1024
"""How many bytes a record may have."""

# To how much texts and values of extra fields are cut if a record is too long.
_CUT_TEXT = 16 * 1024
_CUT_VALUE = 512
_CUT_FIELDS = 32
# How many coordinates of an actor a record may have.
_MOST_LABELS = 64

_TEXTS = ("name", "levelname", "pathname", "filename", "module", "funcName", "threadName", "processName")
_NUMBERS = ("lineno", "thread", "process")
_OPTIONAL = ("exc_text", "stack_info", "taskName")

Told = tuple[str, int, str, str, str]
"""The actor, its rank, its coordinates, its host, and the record as JSON."""


def _own_fields() -> frozenset[str]:
    return frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Encoder:
    """Encodes a worker's records as JSON."""

    def __init__(self) -> None:
        self._own = _own_fields()

    def encode(self, record: logging.LogRecord) -> bytes:
        """Encode a record, whose exception was formatted already, as ASCII without line breaks."""
        fields = vars(record)
        told: dict[str, Any] = {key: fields.get(key) for key in (*_TEXTS, *_NUMBERS, *_OPTIONAL)}
        told["msg"] = record.getMessage()
        told["levelno"], told["created"] = record.levelno, record.created
        extra = {key: value for key, value in fields.items() if key not in self._own}
        try:
            # Fails for values such as circular lists and unusual dictionary keys; `_plain` replaces them by their repr.
            data = json.dumps({**told, "extra": extra}, default=_shown).encode("ascii")
        except (TypeError, ValueError, RecursionError):
            extra = {key: _plain(value) for key, value in extra.items()}
            data = json.dumps({**told, "extra": extra}, default=_shown).encode("ascii")
        if len(data) > LONGEST:
            for key in ("msg", *_TEXTS, *_OPTIONAL):
                if isinstance(told[key], str):
                    told[key] = _cut(told[key], _CUT_TEXT // 8 if key in _TEXTS else _CUT_TEXT // 4)
            few = list(extra.items())[:_CUT_FIELDS]
            extra = {_cut(key, _CUT_VALUE): _cut(_shown(value), _CUT_VALUE) for key, value in few}
            data = json.dumps({**told, "extra": extra}, default=_shown).encode("ascii")
        return data if len(data) <= LONGEST else b""


def _shown(value: object) -> str:
    from mesh_core._common.display import shown

    return shown(value, LONGEST // 4)


def _plain(value: object) -> object:
    """Return a value if JSON can encode it, else its ``repr``."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return _shown(value)
    return value


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


class Records:
    """Passes records to the script's loggers, as if they had been logged there."""

    def __init__(self) -> None:
        self._own = _own_fields()
        now = logging.makeLogRecord({})
        # The time from which `relativeCreated` counts.
        self._began = now.created - now.relativeCreated / 1000

    @property
    def wanted(self) -> bool:
        """Whether the script has set up handlers on the root logger."""
        return any(not isinstance(handler, Fallback) for handler in logging.root.handlers)

    @property
    def possible(self) -> bool:
        """Whether the script has set up handlers on any logger."""
        loggers = list(logging.root.manager.loggerDict.values())
        return self.wanted or any(
            isinstance(each, logging.Logger)
            and any(not isinstance(handler, Fallback) for handler in each.handlers)
            for each in loggers
        )

    def hand_on(self, records: Iterable[Told]) -> bool:
        """Pass on records that have handlers; return false if none has, so that the text is shown instead."""
        done = False
        for told in records:
            record = self._read(told)
            if record is None:
                continue
            logger = _logger(record.name)
            if not _handled(logger):
                continue
            done = True
            if record.levelno >= _level(logger):
                logger.handle(record)
        return done

    def _read(self, told: Told) -> logging.LogRecord | None:
        actor, rank, point, host, text = told
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        made: dict[str, Any] = {}
        for key in _TEXTS:
            made[key] = _of(fields.get(key), str, "")
        for key in _NUMBERS:
            made[key] = _of(fields.get(key), int, 0)
        for key in _OPTIONAL:
            made[key] = _of(fields.get(key), str, None)
        made["name"] = made["name"] or "root"
        made["msg"], made["args"] = _of(fields.get("msg"), str, ""), ()
        made["levelno"] = min(max(_of(fields.get("levelno"), int, logging.INFO), 0), 1000)
        made["levelname"] = made["levelname"] or logging.getLevelName(made["levelno"])
        created = float(min(max(_number(fields.get("created")), 0.0), 2.0**35))
        made["created"], made["msecs"] = created, float(int((created - int(created)) * 1000))
        made["actor"], made["rank"], made["host"], made["point"] = actor, rank, host, _coordinates(point)
        made["relativeCreated"] = (created - self._began) * 1000
        if logging.getLogRecordFactory() is logging.LogRecord:
            # The usual constructor would register this thread, which is unknown to `threading`, forever.
            record = logging.LogRecord.__new__(logging.LogRecord)
            vars(record).update(made, exc_info=None)
        else:
            record = logging.makeLogRecord(made)
        for key, value in _of(fields.get("extra"), dict, {}).items():
            # Never replace standard fields or attributes of the class, such as its methods.
            if key not in self._own and not hasattr(logging.LogRecord, key):
                vars(record)[key] = value
        return record


def _of(value: Any, kind: type, default: Any) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else default


def _number(value: Any) -> float:
    # A whole number may be too large to become a float.
    if isinstance(value, int):
        value = float(value) if abs(value) < 1 << 60 else 0.0
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


def _coordinates(point: str) -> dict[str, int]:
    """Parse coordinates such as ``hosts=1,gpus=3``.

    >>> _coordinates("hosts=1,gpus=3")
    {'hosts': 1, 'gpus': 3}
    """
    found = {}
    for each in point.split(",")[:_MOST_LABELS]:
        label, _, index = each.rpartition("=")
        if label and index.isascii() and index.isdigit() and len(index) < 20:
            found[label] = int(index)
    return found


def _logger(name: str) -> logging.Logger:
    """Return the logger of that name or, if the script has none, its nearest existing ancestor."""
    known = logging.root.manager.loggerDict
    while name:
        found = known.get(name)
        if isinstance(found, logging.Logger):
            return found
        name = name.rpartition(".")[0]
    return logging.root


def _line(logger: logging.Logger) -> Iterable[logging.Logger]:
    """Yield the loggers whose handlers receive this logger's records."""
    at: logging.Logger | None = logger
    while at is not None:
        yield at
        at = at.parent if at.propagate else None


def _handled(logger: logging.Logger) -> bool:
    return any(not isinstance(handler, Fallback) for each in _line(logger) for handler in each.handlers)


def _level(logger: logging.Logger) -> int:
    """Return the level that the script has set for this logger or an ancestor below the root.

    The root's level is ignored: its default would hide what Mesh shows by default, and Mesh's ``log_level`` decides what
    workers send. So are levels set by Mesh itself.
    """
    at: logging.Logger | None = logger
    while at is not None and at is not logging.root:
        if at.level and not any(isinstance(handler, Fallback) for handler in at.handlers):
            return at.level
        at = at.parent
    return logging.NOTSET
