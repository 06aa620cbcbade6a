"""Commands and servers that show a running job. They read what `mesh_core.inspect` tells, and change nothing.

Imported by nothing else of the package: who restarts workers has no use for it.
"""
