"""Queues between processes: :class:`Queue`.

``_store`` decides what is in a queue and who gets it, without clock or I/O; ``_server`` is the actor around it; ``_client`` is
the end in each process that puts or takes; ``_queue`` is what users see.
"""
