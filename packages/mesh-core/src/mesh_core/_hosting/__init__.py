"""Actors that run in this process: each in its cell, run by a thread or the event loop, and answered by the rules of its endpoints.

It imports `_meshes` and what that imports.
"""
