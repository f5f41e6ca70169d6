"""A module for each package, with its ``CASES``."""
