"""Environments that run as OpenEnv servers, of any package: spoken to in their protocol, without that package."""
