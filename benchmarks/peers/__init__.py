"""The same float32 payload there and back between two processes, by our calls and by those of others."""
