"""What every process of a service needs, without any DiLoCo concept: configuration, logs, channels."""
