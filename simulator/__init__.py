"""Runs of the production machines in virtual time, without tensors, sockets or clocks."""
