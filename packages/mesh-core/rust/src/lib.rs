//! The Python bindings of the runtime: conversions, leaving the interpreter, errors; no decisions.
//!
//! One file per concept. Each file about a process's runtime adds its methods to `Runtime` in its own `#[pymethods]` block.

mod block;
mod bypass;
mod call;
mod callables;
mod codes;
mod completion;
mod credentials;
mod deferral;
mod dlpack;
mod door;
mod errors;
mod event_loop;
mod finisher;
mod gate;
mod guests;
mod handover;
mod hosts;
mod inbox;
mod inspect;
mod lines;
mod logs;
mod lost;
mod mailbox;
mod memory;
mod message;
mod moves;
mod namespaces;
mod packing;
mod payload;
mod port;
mod process;
mod procs;
mod refs;
mod runtime;
mod sender;
mod sigterm;
mod target;
mod time;
mod topology;
mod visits;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
mod _native {
    use super::*;

    #[pymodule_export]
    use super::block::{PyBlock, PyBlocks};
    #[pymodule_export]
    use super::bypass::set_bypass;
    #[pymodule_export]
    use super::call::PyCall;
    #[pymodule_export]
    use super::callables::hold;
    #[pymodule_export]
    use super::codes::codes;
    #[pymodule_export]
    use super::completion::PyCompletion;
    #[pymodule_export]
    use super::credentials::{
        credentials_issue, credentials_list, credentials_new, credentials_owner, credentials_renew, credentials_revoke,
    };
    #[pymodule_export]
    use super::deferral::PyDeferral;
    #[pymodule_export]
    use super::dlpack::dlpack;
    #[pymodule_export]
    use super::door::{begin_exit, serve_to_the_end};
    #[pymodule_export]
    use super::event_loop::{PyEventLoop, PyWaker};
    #[pymodule_export]
    use super::finisher::PyFinisher;
    #[pymodule_export]
    use super::guests::{dismiss, has_lost_job, leave_job, let_in};
    #[pymodule_export]
    use super::hosts::{
        PyHost, attach, attach_dialers, be_host, displace_host, host_name, interfaces, introductions, live_hosts,
        peers, place_host, release_hosts, roll,
    };
    #[pymodule_export]
    use super::inbox::PyInbox;
    #[pymodule_export]
    use super::inspect::{PyClockStop, PyJournal};
    #[pymodule_export]
    use super::lines::PyLineWriter;
    #[pymodule_export]
    use super::logs::{PyLogs, flush_stdio, line_buffer_stdio};
    #[pymodule_export]
    use super::lost::PyLost;
    #[pymodule_export]
    use super::mailbox::PyMailbox;
    #[pymodule_export]
    use super::memory::PyPart;
    #[pymodule_export]
    use super::message::PyMessage;
    #[pymodule_export]
    use super::moves::{
        given_up, gone, incarnation, known_moves, learn_moves, locate, publish_given_up, publish_moves, seat,
    };
    #[pymodule_export]
    use super::namespaces::{
        ask_to_die_with_parent, beget_in, change_mount, filter_calls, give_up_privileges, leave_keyring, let_look,
        mount, unshare,
    };
    #[pymodule_export]
    use super::packing::packing;
    #[pymodule_export]
    use super::port::PyOutlet;
    #[pymodule_export]
    use super::process::{adopt_orphans, die_with_parent, exit_with, name_process, start_marked};
    #[pymodule_export]
    use super::refs::{PyKept, PyPutting, PyRefPart, capture, kept, putting};
    #[pymodule_export]
    use super::runtime::PyRuntime;
    #[pymodule_export]
    use super::sender::PySender;
    #[pymodule_export]
    use super::sigterm::{begin_sigterm, guard_sigterm, release_sigterm, repeat_sigterm};
    #[pymodule_export]
    use super::target::{PyPlacement, PyTarget};
    #[pymodule_export]
    use super::topology::{PyExtent, PyPoint, PyRegion, PySlice};
    #[pymodule_export]
    use super::visits::{PyVisitEnd, jobs_of_host, visit_job};

    #[pymodule_export]
    const COPIED_BYTES: usize = super::block::COPIED;
    #[pymodule_export]
    const GUEST_MESHES: u64 = mesh_proto::GUEST_MESHES;
    #[pymodule_export]
    const LONGEST_REASON: usize = mesh_proto::GivenUp::LONGEST;
    #[pymodule_export]
    const HOST_MESHES: u64 = mesh_proto::HOST_MESHES;

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        topology::register(m)
    }
}
