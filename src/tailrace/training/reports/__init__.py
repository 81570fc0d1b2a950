"""What a step leaves for people: every trained token on wish, the rows of a step that was not finite, MFU."""
