"""Replays of event tapes: a fresh machine gets the same events and must decide the same."""
