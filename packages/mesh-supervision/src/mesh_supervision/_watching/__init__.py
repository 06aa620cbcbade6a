"""Commands and servers that show a running job. They read `mesh_core.inspect`, and change nothing.

Nothing else in the package imports this: code that restarts workers does not need it.
"""
