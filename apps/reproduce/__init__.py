"""What the papers claim, tried again at the size of one small machine."""
