"""Meshes of hosts, processes and actors as their users hold them: spawning, calling endpoints, ports, references, repairs.

It imports all rooms named above it in the contract, and knows nothing of how actors run.
"""
