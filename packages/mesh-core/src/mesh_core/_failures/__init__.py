"""What has died or failed, who owned it, and what becomes of that: failures, owned meshes, policies at work, repairs.

It imports `_common`, `_serialize`, `_geometry` and `_futures`. `mesh_core.policies` is the public face of `policies.py`.
"""
