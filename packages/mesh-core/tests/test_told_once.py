"""SUP-1: what a call of the script has raised is not raised again by an alarm that was still on its way."""

from mesh_core import MeshFailure, _process


def test_a_failure_that_its_call_has_raised_is_not_raised_by_the_next_wait(runtime: None) -> None:
    faults = _process.current().faults
    failure = MeshFailure(mesh_name="owner", rank=0, _key=(7, 0, 1))
    faults._at_root(failure, told=False)
    faults.hear(failure)  # the call's own reply came between the notice and the alarm
    assert faults.take() is None
    assert faults.unheard() == []
