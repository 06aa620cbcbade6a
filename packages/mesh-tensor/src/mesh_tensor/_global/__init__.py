"""The global view: one tensor of the whole mesh, with parts of it on each process."""
