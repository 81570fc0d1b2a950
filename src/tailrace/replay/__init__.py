"""What entered the pipeline is captured, and run through it again offline, to measure and to compare."""
