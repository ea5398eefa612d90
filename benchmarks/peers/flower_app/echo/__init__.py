"""A Flower app that sends a payload to a client and gets it back."""
