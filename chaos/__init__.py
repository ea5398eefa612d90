"""Faults on purpose: a run of real processes, a seeded schedule of faults, and a checker of what became of it all."""
