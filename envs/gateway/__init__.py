"""The endpoint at which agents that own their loop ask the model: one address and one secret for each ticket."""
