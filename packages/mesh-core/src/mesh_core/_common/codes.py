"""Enums shared by Python and the native layer: ``rust/src/codes.rs`` has the same members under the same names.

The native layer returns these very members, so they can be compared with ``is``.
"""

from __future__ import annotations

import enum


class MessageKind(enum.Enum):
    """What a message is for."""

    SPAWN = enum.auto()
    """Create an actor."""
    CALL = enum.auto()
    """Run an endpoint and reply."""
    TELL = enum.auto()
    """Run an endpoint; nobody waits for a reply."""
    REPLY = enum.auto()
    """An answer."""
    STOP_ACTOR = enum.auto()
    """Stop an actor after the messages sent before."""
    STOP_PROC = enum.auto()
    """Stop the process."""
    CANCEL = enum.auto()
    """The caller no longer waits."""
    UNDELIVERABLE = enum.auto()
    """A message was returned."""
    DOWN = enum.auto()
    """A process ended."""
    FAILURE = enum.auto()
    """An actor failed; sent to its owner."""
    POST = enum.auto()
    """A value for a channel."""
    PARTIAL = enum.auto()
    """Part of a combined reply."""
    INSPECT = enum.auto()
    """A request for the process's stacks."""
    EXTENSION = enum.auto()
    """A message to an extension, or from Mesh itself to the process."""
    UNSEEN = enum.auto()
    """A call failed, and nobody has looked at its future."""
    OTHER = enum.auto()
    """Not visible to Python."""


class Request(enum.Enum):
    """What a sender sends."""

    CALL = enum.auto()
    """Calls of an endpoint, or messages to it that nobody waits for."""
    REDUCE = enum.auto()
    """Calls whose replies are combined on the way back."""
    SPAWN = enum.auto()
    """The spawn of an actor."""
    STOP_ACTOR = enum.auto()
    """The stop of an actor."""
    FAILURE = enum.auto()
    """The failure of an actor, to its owner."""
    EXTENSION = enum.auto()
    """Messages to an extension of a process."""
    TASK = enum.auto()
    """Calls that can be taken back until they begin."""
    TASK_AHEAD = enum.auto()
    """The same, each queued behind another one."""


class Question(enum.Enum):
    """A question to a process about itself."""

    STATE = enum.auto()
    """To a worker: what its actors have done and are doing."""
    STACKS = enum.auto()
    """To a worker: the stacks of its threads, from its event loop."""
    DUMP = enum.auto()
    """To a worker: the same without the event loop, which did not answer."""
    THREADS = enum.auto()
    """To a worker: which thread works for which actor, and on what."""
    WAITS = enum.auto()
    """To any process: who waits there, for whom, and since when."""
    TREE = enum.auto()
    """To an agent: the processes on its host."""
    USAGE = enum.auto()
    """To an agent: the resource usage of its host and processes."""
    SHARES = enum.auto()
    """To an agent: the same, with shares of memory."""


class Undelivered(enum.Enum):
    """Why a message was returned, or why its call gets no answer."""

    NO_ACTOR = enum.auto()
    """There is no such actor."""
    NEVER_SPAWNED = enum.auto()
    """It arrived before its actor's spawn, which did not follow."""
    ACTOR_STOPPED = enum.auto()
    """The actor stopped before it handled the message."""
    ENDED = enum.auto()
    """The process ended."""
    PORT_DROPPED = enum.auto()
    """The endpoint dropped the call's port."""
    PORT_HANDED_ON = enum.auto()
    """Everyone who was given the call's port dropped it."""
    UNKNOWN_QUESTION = enum.auto()
    """The process does not know the question."""
    NO_THREAD = enum.auto()
    """There was no thread to answer the question."""
    NO_EXTENSIONS = enum.auto()
    """It is an agent, which has no extensions."""
    NO_ROOM = enum.auto()
    """It was dropped on arrival: the process holds too many unread replies."""
    NOT_BEGUN = enum.auto()
    """It was a task that was taken back before it began."""
    UNKNOWN = enum.auto()
    """A reason that this version does not know."""


class HostState(enum.StrEnum):
    """A host's state; a string, as shown in snapshots."""

    ATTACHING = "attaching"
    """It is being attached."""
    RUNNING = "running"
    """It is part of the job."""
    SUSPECT = "suspect"
    """It has been silent for a while."""
    UNREACHABLE = "unreachable"
    """It was lost and is being reconnected to."""
    STOPPED = "stopped"
    """It was released."""
    DEAD = "dead"
    """It is dead."""


class NativeError(enum.Enum):
    """The kind of a native error; :func:`mesh_core._common.errors.of_native` maps each to an exception class."""

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
    """The kind of a failure, for programs to decide by; texts are for people."""

    EXITED = "exited"
    """The process exited, with the status in ``exitcode``."""
    KILLED = "killed"
    """A signal killed the process; ``signal`` says which."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed the process for lack of memory, as far as the kernel's counters tell."""
    SPAWN_FAILED = "spawn_failed"
    """The process could not be created."""
    SPAWN_TIMEOUT = "spawn_timeout"
    """The process did not report within the spawn timeout."""
    BOOTSTRAP_FAILED = "bootstrap_failed"
    """The ``bootstrap=`` function of the process raised, or an extension failed to start."""
    FORK_SERVER_DIED = "fork_server_died"
    """The fork server that the process was forked from ended, and its workers with it."""
    CONNECTION_LOST = "connection_lost"
    """The connection to the process ended, and nobody reported an exit status."""
    HOST_DEAD = "host_dead"
    """The whole host is dead; ``host_fate`` says how that was detected."""
    HOST_UNREACHABLE = "host_unreachable"
    """The whole host was lost and could not be reconnected to."""
    HOST_NOT_ATTACHED = "host_not_attached"
    """The host could never be attached to the job."""
    HOST_NOT_AUTHENTICATED = "host_not_authenticated"
    """The host never joined the job: one side does not accept the other's credentials."""
    HOST_ABSENT = "host_absent"
    """The host is not part of the job, or not yet."""
    ACTOR_FAILED = "actor_failed"
    """An actor failed with ``exception``; its process is still running."""
    UNKNOWN = "unknown"
    """Nothing else is known."""
