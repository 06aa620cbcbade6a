"""A process's part of the global view: the instructions on tensors that are spread over a mesh."""
