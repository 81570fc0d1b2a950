"""Packaged configurations, TOML files and models: `tailrace recipes` lists them, `tailrace train <name>` runs one."""
