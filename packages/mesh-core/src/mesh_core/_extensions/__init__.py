"""The extensions of a process: what they are, how they travel to other processes, and their messages.

`mesh_core.extensions` is the public face.

It imports `_meshes` and the rooms below it.
"""
