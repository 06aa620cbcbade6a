//! Enums that both sides know: each has its members in Rust and in Python (`mesh_core._common.codes`), which name them alike.
//!
//! Python hands the classes over as mesh_core is imported ([`crate::callables`]); from then on a member costs a look at a
//! table, and Python compares by identity. What is not in the table is what Python calls `OTHER`, or `UNKNOWN`.

use mesh_proto::control::Question;
use mesh_proto::messages::Request;
use mesh_proto::{EndKind, Kind, Undelivered};
use mesh_runtime::{ErrorKind, HostState};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The members of a Python enum, in the order of their names here.
struct Members {
    class: &'static str,
    names: &'static [&'static str],
    found: PyOnceLock<Box<[Py<PyAny>]>>,
}

impl Members {
    const fn new(class: &'static str, names: &'static [&'static str]) -> Self {
        Self { class, names, found: PyOnceLock::new() }
    }

    fn all(&self, py: Python<'_>) -> PyResult<&[Py<PyAny>]> {
        let missing = || PyRuntimeError::new_err(format!("{} was not handed to the native layer", self.class));
        Ok(self.found.get(py).ok_or_else(missing)?)
    }

    fn member(&self, py: Python<'_>, place: usize) -> PyResult<Py<PyAny>> {
        Ok(self.all(py)?[place].clone_ref(py))
    }

    /// Which member an object is.
    fn place(&self, one: &Bound<'_, PyAny>) -> PyResult<usize> {
        let place = self.all(one.py())?.iter().position(|member| member.is(one));
        place.ok_or_else(|| PyValueError::new_err(format!("expected a {}, got {one:?}", self.class)))
    }
}

static KINDS: Members = Members::new(
    "MessageKind",
    &[
        "OTHER",
        "SPAWN",
        "CALL",
        "TELL",
        "REPLY",
        "STOP_ACTOR",
        "STOP_PROC",
        "CANCEL",
        "UNDELIVERABLE",
        "DOWN",
        "FAILURE",
        "POST",
        "PARTIAL",
        "INSPECT",
        "EXTENSION",
        "UNSEEN",
    ],
);

/// A `MessageKind`.
pub(crate) fn kind(py: Python<'_>, kind: Kind) -> PyResult<Py<PyAny>> {
    let place = match kind {
        Kind::Spawn => 1,
        Kind::Call => 2,
        Kind::Tell => 3,
        Kind::Reply => 4,
        Kind::StopActor => 5,
        Kind::StopProc => 6,
        Kind::Cancel => 7,
        Kind::Undeliverable => 8,
        Kind::Down => 9,
        Kind::Failure => 10,
        Kind::Post => 11,
        Kind::Partial => 12,
        Kind::Inspect => 13,
        Kind::Extend => 14,
        Kind::Unseen => 15,
        _ => 0,
    };
    KINDS.member(py, place)
}

static REQUESTS: Members =
    Members::new("Request", &["CALL", "REDUCE", "SPAWN", "STOP_ACTOR", "FAILURE", "EXTENSION", "TASK", "TASK_AHEAD"]);

/// What a `Request` asks for, and whether the replies are combined.
pub(crate) fn request(one: &Bound<'_, PyAny>) -> PyResult<(Request, bool)> {
    Ok(match REQUESTS.place(one)? {
        0 => (Request::CALL, false),
        1 => (Request::CALL, true),
        2 => (Request::Spawn, false),
        3 => (Request::StopActor, false),
        4 => (Request::Failure, false),
        5 => (Request::Extend, false),
        6 => (Request::TASK, false),
        _ => (Request::TASK_AHEAD, false),
    })
}

static QUESTIONS: Members =
    Members::new("Question", &["STATE", "STACKS", "DUMP", "THREADS", "WAITS", "TREE", "USAGE", "SHARES"]);

/// What a `Question` asks.
pub(crate) fn question(one: &Bound<'_, PyAny>) -> PyResult<Question> {
    Ok(match QUESTIONS.place(one)? {
        0 => Question::State,
        1 => Question::Stacks,
        2 => Question::Dump,
        3 => Question::Threads,
        4 => Question::Waits,
        5 => Question::Tree,
        6 => Question::Usage,
        _ => Question::Shares,
    })
}

static UNDELIVERED: Members = Members::new(
    "Undelivered",
    &[
        "UNKNOWN",
        "NO_ACTOR",
        "NEVER_SPAWNED",
        "ACTOR_STOPPED",
        "ENDED",
        "PORT_DROPPED",
        "PORT_HANDED_ON",
        "UNKNOWN_QUESTION",
        "NO_THREAD",
        "NO_EXTENSIONS",
        "NO_ROOM",
        "NOT_BEGUN",
    ],
);

/// An `Undelivered`.
pub(crate) fn undelivered(py: Python<'_>, why: &Undelivered) -> PyResult<Py<PyAny>> {
    let place = match why {
        Undelivered::NoActor => 1,
        Undelivered::NeverSpawned => 2,
        Undelivered::ActorStopped => 3,
        Undelivered::Ended(_) => 4,
        Undelivered::PortDropped => 5,
        Undelivered::PortHandedOn => 6,
        Undelivered::UnknownQuestion => 7,
        Undelivered::NoThread => 8,
        Undelivered::NoExtensions => 9,
        Undelivered::NoRoom(_) => 10,
        Undelivered::NotBegun => 11,
        Undelivered::Unknown(_) => 0,
    };
    UNDELIVERED.member(py, place)
}

static HOST_STATES: Members =
    Members::new("HostState", &["ATTACHING", "RUNNING", "SUSPECT", "UNREACHABLE", "STOPPED", "DEAD"]);

/// A `HostState`.
pub(crate) fn host_state(py: Python<'_>, state: HostState) -> PyResult<Py<PyAny>> {
    let place = match state {
        HostState::Attaching => 0,
        HostState::Running => 1,
        HostState::Suspect => 2,
        HostState::Unreachable => 3,
        HostState::Stopped => 4,
        HostState::Dead => 5,
    };
    HOST_STATES.member(py, place)
}

static ENDS: Members = Members::new(
    "FailureKind",
    &[
        "EXITED",
        "KILLED",
        "OUT_OF_MEMORY",
        "SPAWN_FAILED",
        "SPAWN_TIMEOUT",
        "BOOTSTRAP_FAILED",
        "FORK_SERVER_DIED",
        "CONNECTION_LOST",
        "HOST_DEAD",
        "HOST_UNREACHABLE",
        "HOST_NOT_ATTACHED",
        "HOST_NOT_AUTHENTICATED",
        "HOST_ABSENT",
        "UNKNOWN",
    ],
);

/// A `FailureKind`.
pub(crate) fn end(py: Python<'_>, kind: EndKind) -> PyResult<Py<PyAny>> {
    let place = match kind {
        EndKind::Exited => 0,
        EndKind::Killed => 1,
        EndKind::OutOfMemory => 2,
        EndKind::SpawnFailed => 3,
        EndKind::SpawnTimeout => 4,
        EndKind::BootstrapFailed => 5,
        EndKind::ForkServerDied => 6,
        EndKind::ConnectionLost => 7,
        EndKind::HostDead => 8,
        EndKind::HostUnreachable => 9,
        EndKind::HostNotAttached => 10,
        EndKind::HostNotAuthenticated => 11,
        EndKind::HostAbsent => 12,
        EndKind::Unknown => 13,
    };
    ENDS.member(py, place)
}

static ERRORS: Members = Members::new(
    "NativeError",
    &[
        "CLOSED",
        "FORKED",
        "NO_SUCH_PROC",
        "PORT_CLOSED",
        "FULL",
        "FRAME",
        "SPAWN",
        "OS",
        "NOT_CONTROLLER",
        "CREDENTIALS",
        "ADDRESS",
    ],
);

/// A `NativeError`.
pub(crate) fn error(py: Python<'_>, kind: ErrorKind) -> PyResult<Py<PyAny>> {
    let place = match kind {
        ErrorKind::Closed => 0,
        ErrorKind::Forked => 1,
        ErrorKind::NoSuchProc => 2,
        ErrorKind::PortClosed => 3,
        ErrorKind::Full => 4,
        ErrorKind::Frame => 5,
        ErrorKind::Spawn => 6,
        ErrorKind::Os => 7,
        ErrorKind::NotController => 8,
        ErrorKind::Credentials => 9,
        ErrorKind::Address => 10,
    };
    ERRORS.member(py, place)
}

static ALL: [&Members; 7] = [&KINDS, &REQUESTS, &QUESTIONS, &UNDELIVERED, &HOST_STATES, &ENDS, &ERRORS];

/// Takes a class whose members are handed out from now on.
pub(crate) fn hold(class: &Bound<'_, PyAny>) -> PyResult<()> {
    let name: String = class.getattr("__name__")?.extract()?;
    let Some(members) = ALL.iter().find(|members| members.class == name) else {
        return Err(PyValueError::new_err(format!("the native layer knows no enum {name}")));
    };
    let found = members.names.iter().map(|name| Ok(class.getattr(*name)?.unbind())).collect::<PyResult<_>>()?;
    let _ = members.found.set(class.py(), found);
    Ok(())
}

/// The classes that are known here, each with the names of its members: Python has the same.
#[pyfunction]
pub(crate) fn codes() -> Vec<(&'static str, Vec<&'static str>)> {
    ALL.iter().map(|members| (members.class, members.names.to_vec())).collect()
}
