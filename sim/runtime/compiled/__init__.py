"""torch.compile: a block traced to one graph, cut into forward and backward, fused, and run as one autograd node."""
