"""Where a name is that ``mesh_core`` does not have: in which of Mesh's other packages, or under which other name."""

from __future__ import annotations

_NAMES = {
    "mesh_rdma": (
        "BufferGone Copy Explanation Exported HandleRefused InvalidTransfer OutcomeUnknown PartsFailed Peer "
        "Piece Publication PublicationGone PublicationReader RDMAAction RDMABuffer RDMAError RDMATimeout "
        "ReaderFailure TRANSPORTS Transport TransportCapabilities TransportPlugin TransportStatus "
        "TransportUnavailable VersionUnavailable Watch Weights broadcast empty explain get_rdma_backend "
        "is_ibverbs_available transports"
    ),
    "mesh_tensor": (
        "Borrow CaptureError Captured CheckpointError ColumnParallel Compilation FullyShard GlobalTensor "
        "Inspection Mesh MeshTensor Part RanksDisagree RemoteException RemoteFunction RowParallel SPMDActor "
        "Span StreamError Timeline Usage activate all_gather all_to_all allow_clear_text capture "
        "current_stream default_stream distribute export_safetensors fetch fetch_shard inspect load "
        "manual_seed module_to_mesh rank_tensor reduce remote save share show slice_mesh spmd timeline "
        "to_mesh usage use_backend"
    ),
    "mesh_supervision": (
        "Backoff ByKind ByRank Change Circuit CircuitBreaker Dashboard ElasticMesh Escalate Group Health "
        "HealthWatch Ignore JobTrace Levels Limits MetricsServer Notice OneForAll OneForOne RestForOne "
        "RestartType Snapshots Strategy Supervisor Trouble TroubleKind Version export_metrics form_group "
        "heal_mesh keep_snapshots leaving snapshot watch_collectives watch_health whole"
    ),
    "mesh_launchers": (
        "CredentialsState DialingLauncher HostSpec HostState Job JobExists JobNotFound JobState LAUNCHERS "
        "LaunchError Launcher LauncherPlugin Phase Place RenewingLauncher Report attach_job jobs launch"
    ),
}
"""The public names of each package."""

_OTHERWISE = {"concurrent_endpoint": "endpoint(concurrent=True)"}
"""What other libraries have by a name of its own."""


def where(name: str) -> str:
    """Say where a name is, as the end of an error's text; empty if it is nowhere.

    >>> where("heal_mesh")
    ': it is in mesh_supervision (pip install mesh-supervision)'
    """
    if name in _OTHERWISE:
        return f": write {_OTHERWISE[name]}"
    having = [module for module, names in _NAMES.items() if name in names.split()]
    if not having:
        return ""
    named = [f"{module} (pip install {module.replace('_', '-')})" for module in having]
    return f": it is in {' and in '.join(named)}"
