"""Environments that other packages bring, in Tailrace's shape. Each imports its package only when it is loaded."""
