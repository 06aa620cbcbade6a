"""Enums that Python and the native layer both know: ``rust/src/codes.rs`` has the same members by the same names.

The native layer hands out these very members, so that ``is`` compares them.
"""

from __future__ import annotations

import enum


class MessageKind(enum.Enum):
    """What a message is for."""

    SPAWN = enum.auto()
    """Make an actor."""
    CALL = enum.auto()
    """Run an endpoint and reply."""
    TELL = enum.auto()
    """Run an endpoint; nobody waits."""
    REPLY = enum.auto()
    """An answer."""
    STOP_ACTOR = enum.auto()
    """Stop an actor, after what was sent before."""
    STOP_PROC = enum.auto()
    """Stop the process."""
    CANCEL = enum.auto()
    """The caller no longer waits."""
    UNDELIVERABLE = enum.auto()
    """A message has come back."""
    DOWN = enum.auto()
    """A process has ended."""
    FAILURE = enum.auto()
    """An actor has failed, for its owner."""
    POST = enum.auto()
    """A value for a channel."""
    PARTIAL = enum.auto()
    """A share of a combined reply."""
    INSPECT = enum.auto()
    """The process is asked for its stacks."""
    EXTENSION = enum.auto()
    """A message for an extension, or of Mesh itself to the process."""
    UNSEEN = enum.auto()
    """A call has failed, and nobody has looked at its future."""
    OTHER = enum.auto()
    """Nothing that Python sees."""


class Request(enum.Enum):
    """What a sender sends."""

    CALL = enum.auto()
    """Calls of an endpoint, or messages to one that nobody waits for."""
    REDUCE = enum.auto()
    """Calls whose replies are combined on the way up."""
    SPAWN = enum.auto()
    """The making of an actor."""
    STOP_ACTOR = enum.auto()
    """The stop of one."""
    FAILURE = enum.auto()
    """The failure of one, to its owner."""
    EXTENSION = enum.auto()
    """Messages to an extension of a process."""
    TASK = enum.auto()
    """Calls that can be taken back until they have begun."""
    TASK_AHEAD = enum.auto()
    """The same, each behind another one."""


class Question(enum.Enum):
    """What a process is asked about itself."""

    STATE = enum.auto()
    """A worker: what its actors have done and do now."""
    STACKS = enum.auto()
    """A worker: the stacks of its threads, from its event loop."""
    DUMP = enum.auto()
    """A worker: the same without the loop, which has not answered."""
    THREADS = enum.auto()
    """A worker: which thread works for which actor, and on what."""
    WAITS = enum.auto()
    """A process: who waits there, for whom, and since when."""
    TREE = enum.auto()
    """An agent: which processes there are on its host."""
    USAGE = enum.auto()
    """An agent: what its host and its processes use."""
    SHARES = enum.auto()
    """An agent: the same with shares of memory."""


class Undelivered(enum.Enum):
    """Why a message has come back, or why its call gets no answer."""

    NO_ACTOR = enum.auto()
    """No such actor is there."""
    NEVER_SPAWNED = enum.auto()
    """It came before its actor's spawn, which did not follow."""
    ACTOR_STOPPED = enum.auto()
    """The actor stopped before it came to the message."""
    ENDED = enum.auto()
    """The process has ended."""
    PORT_DROPPED = enum.auto()
    """The endpoint let go of the port of the call."""
    PORT_HANDED_ON = enum.auto()
    """All that were handed the port of the call let go of it."""
    UNKNOWN_QUESTION = enum.auto()
    """The process does not know the question."""
    NO_THREAD = enum.auto()
    """There was no thread to answer the question with."""
    NO_EXTENSIONS = enum.auto()
    """It is an agent, which has no extensions."""
    NO_ROOM = enum.auto()
    """It was dropped where it came: too much that nobody has looked at is there."""
    NOT_BEGUN = enum.auto()
    """It is a task that was taken back before it had begun."""
    UNKNOWN = enum.auto()
    """Something that this version does not know."""


class HostState(enum.StrEnum):
    """How a host is; a string, as snapshots show it."""

    ATTACHING = "attaching"
    """It is being attached."""
    RUNNING = "running"
    """It is part of the job."""
    SUSPECT = "suspect"
    """It is silent."""
    UNREACHABLE = "unreachable"
    """It was lost, and is being connected to again."""
    STOPPED = "stopped"
    """It was let go."""
    DEAD = "dead"
    """It is dead."""


class NativeError(enum.Enum):
    """What an error of the native layer is; :func:`mesh_core._common.errors.of_native` has a class for each."""

    CLOSED = enum.auto()
    FORKED = enum.auto()
    NO_SUCH_PROC = enum.auto()
    PORT_CLOSED = enum.auto()
    FULL = enum.auto()
    FRAME = enum.auto()
    SPAWN = enum.auto()
    OS = enum.auto()
    NOT_CONTROLLER = enum.auto()
    CREDENTIALS = enum.auto()
    ADDRESS = enum.auto()


class FailureKind(enum.Enum):
    """What kind of failure it is: what programs decide by, where texts are for people."""

    EXITED = "exited"
    """The process exited, with the status in ``exitcode``."""
    KILLED = "killed"
    """A signal killed the process; ``signal`` says which."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed the process for lack of memory, as far as the kernel's counters tell."""
    SPAWN_FAILED = "spawn_failed"
    """The process could not be made."""
    SPAWN_TIMEOUT = "spawn_timeout"
    """The process did not report in the time that its spawn allowed."""
    BOOTSTRAP_FAILED = "bootstrap_failed"
    """The ``bootstrap=`` of the process raised, or an extension as it started."""
    FORK_SERVER_DIED = "fork_server_died"
    """The process that had forked it ended, and its workers with it."""
    CONNECTION_LOST = "connection_lost"
    """The process's connection ended, and nobody has reported its exit status."""
    HOST_DEAD = "host_dead"
    """The whole host is dead; ``host_fate`` says how that was found out."""
    HOST_UNREACHABLE = "host_unreachable"
    """The whole host was lost, and could not be connected to again."""
    HOST_NOT_ATTACHED = "host_not_attached"
    """The host could never be attached to the job."""
    HOST_NOT_AUTHENTICATED = "host_not_authenticated"
    """The host never was part of the job: one side does not accept the other's credentials."""
    HOST_ABSENT = "host_absent"
    """The host is not part of the job, or not yet."""
    ACTOR_FAILED = "actor_failed"
    """An actor failed, with ``exception``; its process lives on."""
    UNKNOWN = "unknown"
    """Nothing else is known."""
