//! Enums known to both sides: each has its members in Rust and in Python (`mesh_core._common.codes`) under the same names.
//!
//! Python passes the classes ([`crate::handover`]). From then on a member costs a table look-up, and Python compares by
//! identity. Values without a member are `OTHER` or `UNKNOWN`.

use crate::handover::handed;
use mesh_proto::control::Question;
use mesh_proto::messages::Request;
use mesh_proto::{EndKind, Kind, Undelivered};
use mesh_runtime::{ErrorKind, HostState};
use pyo3::exceptions::PyValueError;
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
        Ok(handed(py, &self.found)?)
    }

    fn member(&self, py: Python<'_>, place: usize) -> PyResult<Py<PyAny>> {
        Ok(self.all(py)?[place].clone_ref(py))
    }

    /// The place of a member.
    fn place(&self, one: &Bound<'_, PyAny>) -> PyResult<usize> {
        let place = self.all(one.py())?.iter().position(|member| member.is(one));
        place.ok_or_else(|| PyValueError::new_err(format!("expected a {}, got {one:?}", self.class)))
    }
}

/// Defines a function that returns the member for a Rust value, and the table of the members that it returns.
macro_rules! gives {
    ($(#[$doc:meta])* $give:ident($type:ty) from $table:ident = $class:literal { $($pattern:pat => $member:ident,)+ }) => {
        static $table: Members = Members::new($class, &[$(stringify!($member)),+]);

        $(#[$doc])*
        pub(crate) fn $give(py: Python<'_>, value: $type) -> PyResult<Py<PyAny>> {
            #[allow(non_camel_case_types, clippy::upper_case_acronyms)] // as in Python
            enum Place { $($member),+ }
            let place = match value { $($pattern => Place::$member),+ };
            $table.member(py, place as usize)
        }
    };
}

/// Defines a function that returns what a member stands for in Rust, and the table of the members that it accepts.
macro_rules! takes {
    ($(#[$doc:meta])* $take:ident -> $type:ty, from $table:ident = $class:literal { $($member:ident => $value:expr,)+ }) => {
        static $table: Members = Members::new($class, &[$(stringify!($member)),+]);

        $(#[$doc])*
        pub(crate) fn $take(one: &Bound<'_, PyAny>) -> PyResult<$type> {
            Ok([$($value),+][$table.place(one)?])
        }
    };
}

gives! {
    /// A `MessageKind`.
    kind(Kind) from KINDS = "MessageKind" {
        Kind::Spawn => SPAWN,
        Kind::Call => CALL,
        Kind::Tell => TELL,
        Kind::Reply => REPLY,
        Kind::StopActor => STOP_ACTOR,
        Kind::StopProc => STOP_PROC,
        Kind::Cancel => CANCEL,
        Kind::Undeliverable => UNDELIVERABLE,
        Kind::Down => DOWN,
        Kind::Failure => FAILURE,
        Kind::Post => POST,
        Kind::Partial => PARTIAL,
        Kind::Inspect => INSPECT,
        Kind::Extend => EXTENSION,
        Kind::Unseen => UNSEEN,
        _ => OTHER,
    }
}

takes! {
    /// What a `Request` asks for, and whether the replies are combined.
    request -> (Request, bool), from REQUESTS = "Request" {
        CALL => (Request::CALL, false),
        REDUCE => (Request::CALL, true),
        SPAWN => (Request::Spawn, false),
        STOP_ACTOR => (Request::StopActor, false),
        FAILURE => (Request::Failure, false),
        EXTENSION => (Request::Extend, false),
        TASK => (Request::TASK, false),
        TASK_AHEAD => (Request::TASK_AHEAD, false),
    }
}

takes! {
    /// What a `Question` asks.
    question -> Question, from QUESTIONS = "Question" {
        STATE => Question::State,
        STACKS => Question::Stacks,
        DUMP => Question::Dump,
        THREADS => Question::Threads,
        WAITS => Question::Waits,
        TREE => Question::Tree,
        USAGE => Question::Usage,
        SHARES => Question::Shares,
    }
}

gives! {
    /// An `Undelivered`.
    undelivered(&Undelivered) from UNDELIVERED = "Undelivered" {
        Undelivered::Unknown(_) => UNKNOWN,
        Undelivered::NoActor => NO_ACTOR,
        Undelivered::NeverSpawned => NEVER_SPAWNED,
        Undelivered::ActorStopped => ACTOR_STOPPED,
        Undelivered::Ended(_) => ENDED,
        Undelivered::PortDropped => PORT_DROPPED,
        Undelivered::PortHandedOn => PORT_HANDED_ON,
        Undelivered::UnknownQuestion => UNKNOWN_QUESTION,
        Undelivered::NoThread => NO_THREAD,
        Undelivered::NoExtensions => NO_EXTENSIONS,
        Undelivered::NoRoom(_) => NO_ROOM,
        Undelivered::NotBegun => NOT_BEGUN,
    }
}

gives! {
    /// A `HostState`.
    host_state(HostState) from HOST_STATES = "HostState" {
        HostState::Attaching => ATTACHING,
        HostState::Running => RUNNING,
        HostState::Suspect => SUSPECT,
        HostState::Unreachable => UNREACHABLE,
        HostState::Stopped => STOPPED,
        HostState::Dead => DEAD,
    }
}

gives! {
    /// A `FailureKind`.
    end(EndKind) from ENDS = "FailureKind" {
        EndKind::Exited => EXITED,
        EndKind::Killed => KILLED,
        EndKind::OutOfMemory => OUT_OF_MEMORY,
        EndKind::SpawnFailed => SPAWN_FAILED,
        EndKind::SpawnTimeout => SPAWN_TIMEOUT,
        EndKind::BootstrapFailed => BOOTSTRAP_FAILED,
        EndKind::ForkServerDied => FORK_SERVER_DIED,
        EndKind::ConnectionLost => CONNECTION_LOST,
        EndKind::HostDead => HOST_DEAD,
        EndKind::HostUnreachable => HOST_UNREACHABLE,
        EndKind::HostNotAttached => HOST_NOT_ATTACHED,
        EndKind::HostNotAuthenticated => HOST_NOT_AUTHENTICATED,
        EndKind::HostAbsent => HOST_ABSENT,
        EndKind::Unknown => UNKNOWN,
    }
}

gives! {
    /// A `NativeError`.
    error(ErrorKind) from ERRORS = "NativeError" {
        ErrorKind::Closed => CLOSED,
        ErrorKind::Forked => FORKED,
        ErrorKind::NoSuchProc => NO_SUCH_PROC,
        ErrorKind::PortClosed => PORT_CLOSED,
        ErrorKind::Full => FULL,
        ErrorKind::Frame => FRAME,
        ErrorKind::Spawn => SPAWN,
        ErrorKind::Os => OS,
        ErrorKind::NotController => NOT_CONTROLLER,
        ErrorKind::Credentials => CREDENTIALS,
        ErrorKind::Address => ADDRESS,
    }
}

static ALL: [&Members; 7] = [&KINDS, &REQUESTS, &QUESTIONS, &UNDELIVERED, &HOST_STATES, &ENDS, &ERRORS];

/// Takes a class, whose members are returned from now on.
pub(crate) fn hold(class: &Bound<'_, PyAny>) -> PyResult<()> {
    let name: String = class.getattr("__name__")?.extract()?;
    let Some(members) = ALL.iter().find(|members| members.class == name) else {
        return Err(PyValueError::new_err(format!("the native layer has no enum called {name}")));
    };
    let found = members.names.iter().map(|name| Ok(class.getattr(*name)?.unbind())).collect::<PyResult<_>>()?;
    let _ = members.found.set(class.py(), found);
    Ok(())
}

/// Returns the known classes, each with the names of its members.
#[pyfunction]
pub(crate) fn codes() -> Vec<(&'static str, Vec<&'static str>)> {
    ALL.iter().map(|members| (members.class, members.names.to_vec())).collect()
}
