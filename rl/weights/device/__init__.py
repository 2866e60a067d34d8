"""Channels from device to device, through a store in the run's folder (`link`): `nccl`, `ipc`."""
