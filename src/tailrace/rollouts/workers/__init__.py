"""Processes that run users' synchronous functions, so that one which never returns can be killed."""
