"""Replicas that are kept busy: :class:`Pool`.

``places`` decides who works next, without clock or I/O; ``turns`` stands around it where the pool was made, and ``sharing`` is
the way there from other processes; ``tasks`` runs tasks on the turns it is given, and is the same everywhere; ``following``
says on which thread.
"""
