"""Stages that feed each other: :class:`Pipeline`.

``_flow`` decides what may go on, without clock or I/O; ``_running`` carries that out on the turns of each stage's actors (as a
pool has them); ``_packed`` passes values on without unpickling them; ``_stats`` says which stage is the slowest.
"""
