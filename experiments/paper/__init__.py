"""The paper's results in virtual time, by the production scheduler (`python -m experiments.paper`)."""
