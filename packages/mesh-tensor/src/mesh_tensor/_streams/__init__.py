"""Streams: several queues of work in each process of a mesh, and tensors lent from one to another."""
