"""Nodes: which ranks share memory."""
