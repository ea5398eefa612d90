"""The syncer's state: the interface, an implementation in memory, and a durable one."""
