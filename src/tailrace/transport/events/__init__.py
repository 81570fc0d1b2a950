"""The event log: how training started, went on and ended, appended by roles and read by all."""
