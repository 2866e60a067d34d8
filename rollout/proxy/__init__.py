"""Routing of generation requests: `core` decides (no sockets, no clock), `process` moves the bytes."""
