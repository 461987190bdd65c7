"""Reducers, which exchange payloads between ranks and combine them."""
