"""Replicas that are kept busy: :class:`Pool`.

``places`` decides which replica works next, without clock or I/O. ``turns`` wraps it in the process that made the pool, and
``sharing`` gives other processes access to it. ``tasks`` runs tasks on the turns that it gets, in every process. ``following``
decides on which thread this happens.
"""
