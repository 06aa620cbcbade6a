"""Stages that feed each other: :class:`Pipeline`.

``flow`` decides what may happen next, without clock or I/O; ``running`` carries that out on the turns of each stage's actors (as a
pool has them); ``packed`` passes values on without unpickling them; ``stats`` says which stage is the slowest.
"""
