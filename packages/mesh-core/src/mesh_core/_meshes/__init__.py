"""Meshes of hosts, processes and actors as users hold them: spawning, calling endpoints, ports, references, repairs.

It imports the rooms below, and knows nothing of how actors run.
"""
