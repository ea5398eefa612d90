"""The evaluator: joins a run as an observer, follows its published versions, and reports how good they are."""
