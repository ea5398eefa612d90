"""Measurements that anyone can repeat; each prints what it ran on. Tests never assert on their figures."""
