"""Everything that touches numbers: schema, fragments, encodings, merge and outer step.

NumPy only, except `tree`, `placement` and `device`, the learner's side, which need jax. The syncer imports none of
the three.
"""
