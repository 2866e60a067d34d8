"""The broker: issues tickets, enforces freshness and redundancy, assembles batches, keeps the ledger.

`BrokerCore` (core.py) is the state machine, `process.py` its production shell.
"""

from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules

__all__ = ["BrokerCore", "Rules"]
