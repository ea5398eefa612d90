"""The pure core: protocol decisions and nothing else (no clock, sockets, threads, randomness or tensors)."""
