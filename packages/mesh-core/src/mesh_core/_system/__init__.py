"""What Mesh asks of the operating system: environment, processes that belong together, titles, standard streams, stack dumps, scratch folders.

It imports `_common` alone.
"""
