"""The learner: trains without ever waiting for the network, and contributes fragments."""
