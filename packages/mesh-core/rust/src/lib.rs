//! The Python face of the runtime: conversions, leaving the interpreter, errors; no decisions.

mod bypass;
mod call;
mod callables;
mod codes;
mod completion;
mod credentials;
mod door;
mod flow;
mod guests;
mod hosts;
mod inbox;
mod inspect;
mod lines;
mod logs;
mod moves;
mod namespaces;
mod part;
mod port;
mod refs;
mod runtime;
mod target;
mod topology;
mod visits;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
mod _native {
    use super::*;

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        topology::register(m)?;
        m.add_class::<runtime::PyRuntime>()?;
        m.add_class::<target::PyTarget>()?;
        m.add_class::<target::PyPlacement>()?;
        m.add_class::<hosts::PyHost>()?;
        m.add_function(wrap_pyfunction!(hosts::attach, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::attach_dialers, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::be_host, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::interfaces, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::displace_host, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::introductions, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::place_host, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::peers, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::live_hosts, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::roll, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::release_hosts, m)?)?;
        m.add_function(wrap_pyfunction!(hosts::host_name, m)?)?;
        m.add_function(wrap_pyfunction!(moves::publish_moves, m)?)?;
        m.add_function(wrap_pyfunction!(moves::learn_moves, m)?)?;
        m.add_function(wrap_pyfunction!(moves::known_moves, m)?)?;
        m.add_function(wrap_pyfunction!(moves::locate, m)?)?;
        m.add_function(wrap_pyfunction!(moves::seat, m)?)?;
        m.add_function(wrap_pyfunction!(moves::incarnation, m)?)?;
        m.add_function(wrap_pyfunction!(moves::gone, m)?)?;
        m.add_function(wrap_pyfunction!(guests::let_in, m)?)?;
        m.add_function(wrap_pyfunction!(guests::dismiss, m)?)?;
        m.add_function(wrap_pyfunction!(guests::leave_job, m)?)?;
        m.add_function(wrap_pyfunction!(guests::has_lost_job, m)?)?;
        m.add("HOST_MESHES", mesh_proto::HOST_MESHES)?;
        m.add("GUEST_MESHES", mesh_proto::GUEST_MESHES)?;
        m.add_class::<runtime::PySender>()?;
        m.add_class::<call::PyCall>()?;
        m.add_class::<call::PyLost>()?;
        m.add_class::<completion::PyCompletion>()?;
        m.add_class::<completion::PyFinisher>()?;
        m.add_class::<flow::PyDeferral>()?;
        m.add_class::<inbox::PyInbox>()?;
        m.add_class::<inbox::PyMessage>()?;
        m.add_class::<inbox::PyWaker>()?;
        m.add_class::<part::PyPart>()?;
        m.add_class::<inspect::PyClockStop>()?;
        m.add_class::<inspect::PyJournal>()?;
        m.add_class::<port::PyMailbox>()?;
        m.add_class::<port::PyOutlet>()?;
        m.add_class::<refs::PyKept>()?;
        m.add_class::<refs::PyPutting>()?;
        m.add_class::<refs::PyRefPart>()?;
        m.add_function(wrap_pyfunction!(callables::hold, m)?)?;
        m.add_function(wrap_pyfunction!(bypass::set_bypass, m)?)?;
        m.add_function(wrap_pyfunction!(refs::capture, m)?)?;
        m.add_function(wrap_pyfunction!(refs::putting, m)?)?;
        m.add_function(wrap_pyfunction!(refs::kept, m)?)?;
        m.add_function(wrap_pyfunction!(door::die_with_parent, m)?)?;
        m.add_function(wrap_pyfunction!(port::packing, m)?)?;
        m.add_function(wrap_pyfunction!(door::name_process, m)?)?;
        m.add_function(wrap_pyfunction!(door::exit_with, m)?)?;
        m.add_function(wrap_pyfunction!(door::adopt_orphans, m)?)?;
        m.add_function(wrap_pyfunction!(door::start_marked, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::unshare, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::beget_in, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::mount, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::change_mount, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::give_up_privileges, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::let_look, m)?)?;
        m.add_function(wrap_pyfunction!(namespaces::ask_to_die_with_parent, m)?)?;
        m.add_function(wrap_pyfunction!(door::guard_sigterm, m)?)?;
        m.add_function(wrap_pyfunction!(door::begin_sigterm, m)?)?;
        m.add_function(wrap_pyfunction!(door::repeat_sigterm, m)?)?;
        m.add_function(wrap_pyfunction!(door::release_sigterm, m)?)?;
        m.add_function(wrap_pyfunction!(door::begin_exit, m)?)?;
        m.add_function(wrap_pyfunction!(door::serve_to_the_end, m)?)?;
        m.add_function(wrap_pyfunction!(codes::codes, m)?)?;
        m.add_function(wrap_pyfunction!(visits::jobs_of_host, m)?)?;
        m.add_function(wrap_pyfunction!(visits::visit_job, m)?)?;
        m.add_class::<visits::PyVisitEnd>()?;
        m.add_function(wrap_pyfunction!(credentials::credentials_new, m)?)?;
        m.add_function(wrap_pyfunction!(credentials::credentials_owner, m)?)?;
        m.add_function(wrap_pyfunction!(credentials::credentials_list, m)?)?;
        m.add_function(wrap_pyfunction!(credentials::credentials_issue, m)?)?;
        m.add_function(wrap_pyfunction!(credentials::credentials_renew, m)?)?;
        m.add_function(wrap_pyfunction!(credentials::credentials_revoke, m)?)?;
        m.add_class::<logs::PyLogs>()?;
        m.add_class::<lines::PyLineWriter>()?;
        m.add_function(wrap_pyfunction!(logs::line_buffer_stdio, m)?)?;
        m.add_function(wrap_pyfunction!(logs::flush_stdio, m)?)?;
        Ok(())
    }
}
