"""Buckets of parameters: their flat vectors, the averages of these, and the order in which the ranks start them."""
