"""Replicas that are kept busy: :class:`Pool`.

``_places`` decides who works next, without clock or I/O; ``_turns`` stands around it where the pool was made, and ``_sharing`` is
the way there from other processes; ``_tasks`` runs tasks on the turns it is given, and is the same everywhere; ``_following``
says on which thread.
"""
