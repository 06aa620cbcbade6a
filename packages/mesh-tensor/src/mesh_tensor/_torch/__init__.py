"""What differs between the releases of PyTorch, and the names of PyTorch's that begin with an underscore."""
