"""The broker: issues tickets, enforces freshness and redundancy, assembles batches, keeps the ledger.

`BrokerCore` (core.py) is the state machine, `process.py` its production shell.
"""
