"""Actors that run in this process: each in its cell, executed by a thread or the event loop, answered by the rules of its endpoints.

It imports `_meshes` and what that imports.
"""
