"""Big arrays that stay where they were made: stores, slabs of shared memory, accounts of who holds what."""
