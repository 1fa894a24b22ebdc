"""The device mesh and the communication between pipeline stages."""
