"""Worker processes of a family: work that blocks, crashes or hangs, off the environment server's event loop.

`pool` is the server's side, `serving` the worker's, `wire` what they say to each other.
"""
