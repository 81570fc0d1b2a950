"""Packaged configurations: `tailrace recipes` lists them, `tailrace train <name>` runs one. TOML files and models only."""
