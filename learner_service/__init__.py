"""The learner of a Decoupled DiLoCo run: trains on its own data and never waits for anybody."""
