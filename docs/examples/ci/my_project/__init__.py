"""A project whose loaders are audited in CI."""
