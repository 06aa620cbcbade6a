"""What died or failed, who owned it, and what is done about it: failures, owned meshes, running policies, repairs.

It imports `_common`, `_serialize`, `_geometry` and `_futures`. `mesh_core.policies` is the public face of `policies.py`.
"""
