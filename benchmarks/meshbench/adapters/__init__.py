"""One module per system, each with a class `System` that does the same work by that system's own means.

A module here imports its system when it is imported, and little else: worker processes import it too, and
what it drags in would count as the system's memory.
"""
