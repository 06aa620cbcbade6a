"""Tensors of meshes in files: `torch.distributed.checkpoint`, planned by the controller and written by the workers."""
