"""Loaders and samplers of other packages, used as their users do: what patching them does, measured."""
