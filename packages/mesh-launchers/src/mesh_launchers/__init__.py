"""Hosts for jobs: on this machine, on machines that ssh reaches, or from schedulers.

>>> from mesh_launchers import launch
>>> with launch("local", hosts=2) as job:
...     job.wait(timeout=60).state().launcher, job.hosts.sizes
('local', {'hosts': 2})
"""

from importlib.metadata import version as _version

from mesh_launchers._contract import (
    LAUNCHERS,
    DialingLauncher,
    HostSpec,
    Launcher,
    LauncherPlugin,
    Phase,
    Place,
    RenewingLauncher,
    Report,
)
from mesh_launchers._errors import JobExists, JobNotFound, LaunchError
from mesh_launchers._job import Job
from mesh_launchers._launch import attach_job, jobs, launch
from mesh_launchers._renewal import CredentialsState
from mesh_launchers._state import HostState, JobState

__all__ = [
    "LAUNCHERS",
    "CredentialsState",
    "DialingLauncher",
    "HostSpec",
    "HostState",
    "Job",
    "JobExists",
    "JobNotFound",
    "JobState",
    "LaunchError",
    "Launcher",
    "LauncherPlugin",
    "Phase",
    "Place",
    "RenewingLauncher",
    "Report",
    "__version__",
    "attach_job",
    "jobs",
    "launch",
]

__version__ = _version("mesh-launchers")
