"""The demo: a syncer, some learners and an evaluator on this machine, with faults, a summary and a picture."""
