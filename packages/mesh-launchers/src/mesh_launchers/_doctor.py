"""The check of ``mesh doctor`` for jobs that run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mesh_core.plugins import DoctorCheck, Finding, hookimpl
from mesh_launchers._launch import jobs


def look() -> Iterator[Finding]:
    """Look at the certificates of all jobs of this user."""
    found = [each for each in jobs() if each.credentials is not None]
    if not found:
        yield Finding(status="ok", detail="no jobs run")
    for each in found:
        assert each.credentials is not None
        detail = (
            f"{each.name}: credentials until {each.credentials.until:%Y-%m-%d %H:%M} UTC ({each.credentials})"
        )
        if each.credentials.trouble:
            yield Finding(status="warn", detail=detail, remedy=each.credentials.trouble)
        else:
            yield Finding(status="ok", detail=detail)


def _create() -> Callable[[], Iterator[Finding]]:
    return look


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """Offer the check."""
    yield DoctorCheck(
        name="jobs", api_version=1, create=_create, summary="certificates of jobs that run hold long enough"
    )
