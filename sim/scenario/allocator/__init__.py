"""Settings of PyTorch's caching allocator, as people write them, and what each version knows of them."""
