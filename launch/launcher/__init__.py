"""How the processes of a run are started, killed and known to be dead: `protocol.py`, and one file for each way."""
