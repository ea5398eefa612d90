"""Everything that touches numbers: schema, fragments, encodings, merge and outer step.

NumPy only, except `tree` and `device`, the learner's side, which need jax. The syncer imports neither of
the two.
"""
