"""What has died or failed, who owned it, and what becomes of that: failures, owned meshes, policies at work, repairs.

It imports the rooms below: `_common`, `_serialize`, `_geometry`, `_futures`, and the contract in `policies`.
"""
