"""The syncer: owns the global step, merges contributions and publishes fragments."""
