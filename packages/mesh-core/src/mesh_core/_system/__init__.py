"""What Mesh asks of the operating system.

Environment, marks of processes that belong together, titles, standard streams, stack dumps, scratch folders. It imports only
`_common`.
"""
