"""Workloads that come with the project; each is named `package.module:factory` in a run file."""
