"""Queues between processes: :class:`Queue`.

``store`` decides what is in a queue and who gets it, without clock or I/O; ``server`` is the actor around it; ``client`` is
the end in each process that puts or takes; ``queue`` is what users see.
"""
