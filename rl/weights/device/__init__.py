"""Channels from device to device: `nccl`."""
