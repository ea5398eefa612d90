"""Decoupled DiLoCo: the shared library of the syncer, the learners and the tools."""
