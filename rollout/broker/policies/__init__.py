"""What is optional in the broker. `rollout/broker/policy.py` says what a policy is, and which exist."""
